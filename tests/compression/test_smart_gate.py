from __future__ import annotations

import pytest
from smart_texts import haystack, python_code, table

from fleetd.compression.document import Document
from fleetd.compression.gate import evidence, judge, least_share, spread
from fleetd.compression.gate_places import pointing

LOOKUPS = """
What is the secret code of the harbour office?
Who guards the vault that Marta owns?
What is the mail of user31?
How many people live in Brookfield?
How tall is the north tower?
In which year was the bridge of Alden built?
What does the function compute_7 return?
Which colour is the door of the tea room?
What is the total on invoice 1734?
From which platform does the night train to Selkirk leave?
Why did the parser fail?
What was the error message of the last build?
What's the price of the blue lamp?
Who signed the contract with the printing shop?
How much did the boiler cost?
How many rooms does the summer house have?
When does the library close on Friday?
Explain how the retry works in handler_3.
Where is the timeout configured?
What did Ruth say about the roof?
What is the average speed of the ferry?
Is the quarry open in winter?
Tell me the locker number of Oskar.
According to the document, when does it start?
What does the document say about all refunds?
What must be done in order to open the gate?
Which price remained unchanged this year?
Who is the translator of the book?
What is the quote for the boiler?
What format does the file have?
On which port does this service listen?
Which review did it get from Marta?
Is there a copy of this contract in the archive?
Wie lautet der Code des alten Lagers?
Explain the code of the vault to me.
Find the code of the harbour office.
What happened to the ferry?
How many rooms does the summer house have today?
Which keys were left at the desk?
Write the number of the locker.
What is the name of the file?
""".strip().splitlines()
WHOLE = {
    "summarise": """
Summarize the text.
Please give me a short summary of this document.
What are the main points?
What is this article about?
TL;DR
Give an overview of the report.
Write the gist in two sentences.
Fasse den Text zusammen.
Describe what happened in the story.
What happens in this chapter?
""",
    "count": """
How many different towns are mentioned?
How many times does the word market appear?
Count the errors in the log.
What is the total of all orders?
How often is Marta mentioned?
What is the average price across the table?
How many rows are in the table?
How many of the users have no mail address?
What is the total number of records?
What is the most common colour?
Add up the amounts.
How many customers have no address?
""",
    "compare": """
List all towns in the text.
Compare the two proposals.
Which town has the highest code?
Name every person who attended.
Who has the most points?
What are the differences between the first and the last chapter?
Put the events in chronological order.
Find all contradictions in the report.
Show all the names mentioned in the text.
List the towns mentioned in the text.
Which towns are mentioned?
What are all the codes?
What are the names of all employees?
""",
    "verbatim": """
Quote the function compute_7 exactly.
Rewrite this code in Rust.
Translate the text into French.
Repeat the second paragraph word for word.
Refactor the class above.
Please translate it.
You should review the code below and then improve it.
Give me the exact wording of clause 4.
Fix the bugs in this file.
Proofread my essay.
Print the whole function handler_3.
Reproduce the table without changes.
Review the following code.
Continue the story.
Convert this file to TypeScript.
Copy the code of handler_9 verbatim.
Fix this function.
Add type hints to this file.
Optimise the code.
Write unit tests for this class.
Explain this code.
Find the bug in this code.
Rename handler to worker in the code above.
Show me the function compute_7.
What does clause 4 say exactly?
Turn this into a table.
Make this shorter.
What's wrong with this function?
""",
    "in other words": """
Put it in German.
Recite paragraph three.
Boil it down for me.
Who appears most?
""",
}

# Each lookup is answered in one place of it.
TEXT = "\n\n".join(
    [haystack(1), *(f"Somebody wrote: {q.rstrip('?.')}, as it is." for q in LOOKUPS), haystack(2)]
)


def about(*turns: str) -> Document:
    return Document.of_messages([{"role": "user", "content": turn} for turn in turns])


@pytest.mark.parametrize("question", LOOKUPS)
def test_a_question_about_a_part_is_let_through(question: str) -> None:
    assert judge(about(TEXT, question)).declined == ""


@pytest.mark.parametrize("question", [q for text in WHOLE.values() for q in text.strip().splitlines()])
def test_a_task_that_needs_all_of_the_text_is_declined(question: str) -> None:
    assert judge(about(f"{haystack(1)}\n\n{python_code()}\n\n{table()}", question)).declined


@pytest.mark.parametrize(
    "messages",
    [
        [("system", "Translate what the user sends into German."), ("user", TEXT)],
        [("user", "Summarise the report that I send next."), ("assistant", "Send it."), ("user", TEXT)],
        [("user", f"Fasse das zusammen.\n\n{TEXT}")],
        [("user", f"{TEXT}\n\nFasse das zusammen.")],
        [("user", TEXT), ("assistant", "I see."), ("user", "Boil it down for me.")],
    ],
    ids=["system", "before", "in front", "behind", "later"],
)
def test_a_task_is_found_wherever_it_stands(messages: list[tuple[str, str]]) -> None:
    document = Document.of_messages([{"role": role, "content": text} for role, text in messages])
    assert judge(document).declined.startswith("the task is about the whole text")


def test_of_two_ends_that_ask_the_one_that_needs_more_decides() -> None:
    assert judge(about(f"Summarise the story.\n\n{TEXT}\n\nWho guards the vault that Marta owns?")).declined


#: Last lines of documents, which are full of words that a task for the whole text has too.
DOCUMENT_ENDS = [
    "| `sent` | where the text was sent, in full, and a list of all that was left out |",
    "`make eval` asks questions whose answers are known, with whole prompts and with shortened ones, and\n"
    "writes what smart prefill costs in quality to quality.md, as a table.",
    "To report a security vulnerability, please use the security contact. The maintainers coordinate the\n"
    "fix and its disclosure, and write a report about it.",
    "Everyone is welcome to contribute, and every contribution is of value. Code is not the only way to\n"
    "help. Answering questions, helping others and improving the documentation are just as welcome. Tell\n"
    "others, write about the project, or list it among the tools that were of use to you in your own work.",
    "When a machine forwards a setting, add it to the list of fields in `settings.py`, and describe it in\n"
    "the table of all settings, so that readers find the whole list of them in one place, in alphabetical\n"
    "order.",
]
POINTED = [
    "What does X-Fleet-Exactness say?",
    "Which status does a missing token get?",
    "How long is a kept response stored?",
    "Was sagt X-Fleet-Exactness?",
]
BEHIND = """
Summarise it.
Give me a summary of the above in three sentences.
Please condense all of this to one paragraph.
tl;dr
Your task: rewrite this as a letter to a customer.
I have a meeting in an hour. Give me what matters in five bullets.
Now translate all of the above into French.
And what is it about?
Fasse das zusammen.
Mach daraus eine Tabelle.
Résume ce document.
Haz un resumen de todo esto.
Boil it down for me, please.
""".strip().splitlines()
REFERENCE = (
    "# The HTTP API\n\n"
    + haystack(1)
    + "\n\nThe header `X-Fleet-Exactness` says `exact` or what else holds. "
    "A missing token gets the status 401. A kept response is stored for 3,600 s.\n\n" + haystack(2)
)


@pytest.mark.parametrize("end", DOCUMENT_ENDS, ids=range(len(DOCUMENT_ENDS)))
@pytest.mark.parametrize("question", POINTED)
def test_what_a_document_ends_with_is_no_task_beside_the_question_in_front(question: str, end: str) -> None:
    assert judge(about(f"{question}\n\n{REFERENCE}\n\n{end}")).declined == ""


@pytest.mark.parametrize("task", BEHIND)
def test_a_task_behind_a_document_holds_beside_a_question_in_front(task: str) -> None:
    assert judge(about(f"{POINTED[0]}\n\n{REFERENCE}\n\n{task}")).declined


def test_the_heading_of_a_document_is_no_task_beside_the_question_behind_it() -> None:
    text = f"# Summary of the report\n\n{REFERENCE}"
    assert judge(about(f"{text}\n\n{POINTED[0]}")).declined == ""
    assert judge(about(f"Summary of the report\n\n{REFERENCE}\n\n{POINTED[0]}")).declined


def test_where_nobody_asks_all_is_kept() -> None:
    assert judge(about(TEXT)).declined == "nothing in the prompt asks for anything"


def test_a_wording_that_no_sign_knows_is_declined_as_it_points_nowhere() -> None:
    assert evidence("Zoot it, blimey.", TEXT).by_signs == 0
    assert judge(about(TEXT, "Zoot it, blimey.")).declined.startswith("nothing shows")


def test_the_text_itself_may_say_count() -> None:
    """A sign that the text has too is a word of what is asked about."""
    text = f"{haystack(1)}\n\nThe total on invoice 1734 is 90.\n\n{haystack(2)}"
    assert evidence("What is the total on invoice 1734?", text).signs.own == 1
    assert not judge(about(text, "What is the total on invoice 1734?")).declined
    assert judge(about(haystack(1), "What is the total on invoice 1734?")).declined


@pytest.mark.parametrize(
    "question",
    [
        "Who guards the vault that Marta owns? Answer in one word.",
        "In one sentence: who guards the vault that Marta owns?",
        "Wie lautet der Code des alten Lagers? Antworte in einem Satz.",
    ],
)
def test_how_the_answer_is_to_look_says_nothing_of_the_text(question: str) -> None:
    assert not judge(about(TEXT, question)).declined


# ---- Places ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("question", "sentence"),
    [
        ("vault marta owns", "Marta owns the vault Kestrel."),
        ("wann haftpflicht kündigen", "Die Betriebshaftpflichtversicherung ist jährlich kündbar."),
        ("\u5c4b\u9876\u6f0f\u96e8", "\u4e1c\u5317\u89d2\u7684\u5c4b\u9876\u6f0f\u96e8\u3002"),
        ("version 7.3.1", "Version 7.3.1 was deployed at night."),
    ],
    ids=["words", "inflected and joined", "without spaces", "a number"],
)
def test_a_question_points_at_the_place_that_has_its_words(question: str, sentence: str) -> None:
    text = f"{haystack(1)}\n\n{sentence}\n\n{haystack(2)}"
    assert pointing(question, text).words > 0.5
    assert pointing(question, text).words > 2 * pointing(question, f"{haystack(1)}\n\n{haystack(2)}").words


def test_words_that_stand_everywhere_point_nowhere() -> None:
    assert pointing("river", "The river is wide. " * 400).words < 0.1
    assert pointing("", TEXT) == pointing("river", " ") == pointing("...", TEXT)


def test_runs_of_spaces_take_no_longer() -> None:
    """One pattern that looked for spaces again from each of them would take minutes here."""
    assert not judge(about(TEXT, "\n" * 200_000 + LOOKUPS[0])).declined
    assert judge(about(TEXT, "Please" + " " * 200_000 + "summarise it.")).declined


# ---- Scores ----------------------------------------------------------------------------------------------


def test_spread_attention_and_no_word_in_common_keep_more() -> None:
    even = [1.0 + 0.01 * (i % 3) for i in range(40)]
    assert spread(even) > 0.99
    assert least_share(even, [0.0] * 40) == 0.5
    assert least_share(even, [0.0] * 39 + [2.0]) == 0
    assert least_share([0.001] * 39 + [1.0], [0.0] * 40) == 0


def test_spread_of_nothing_is_even() -> None:
    assert spread([]) == spread([0.0, 0.0]) == spread([3.0]) == 1.0
    assert spread([1.0, 1.0]) == pytest.approx(1.0)
    assert spread([1.0, 0.0]) == 0.0
