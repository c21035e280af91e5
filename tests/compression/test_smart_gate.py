from __future__ import annotations

import pytest

from fleetd.compression.anchors import relevance
from fleetd.compression.gate import intent, judge, spread

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
}


@pytest.mark.parametrize("question", LOOKUPS)
def test_a_question_about_a_part_is_let_through(question: str) -> None:
    assert intent(question) == ""


@pytest.mark.parametrize(
    ("kind", "question"), [(kind, q) for kind, text in WHOLE.items() for q in text.strip().splitlines()]
)
def test_a_task_that_needs_all_of_the_text_is_declined(kind: str, question: str) -> None:
    assert intent(question), kind
    assert judge(question, [1.0, 0.0], [1.0, 0.0]).declined


def test_the_text_itself_may_say_count() -> None:
    verdict = judge(
        LOOKUPS[0], [0.9, 0.1], relevance(LOOKUPS[0], ["Count all the errors.", "The harbour office."])
    )
    assert not verdict.declined


def test_runs_of_spaces_take_no_longer() -> None:
    """One pattern that looked for spaces again from each of them would take minutes here."""
    assert intent("\n" * 200_000 + LOOKUPS[0]) == ""
    assert intent("Please" + " " * 200_000 + "summarise it.") == "summarise"


def test_spread_attention_and_no_word_in_common_keep_more() -> None:
    even = [1.0 + 0.01 * (i % 3) for i in range(40)]
    assert spread(even) > 0.99
    assert judge("Whereabouts?", even, [0.0] * 40).at_least == 0.5
    assert judge("Whereabouts?", even, [0.0] * 39 + [2.0]).at_least == 0
    assert judge("Whereabouts?", [0.001] * 39 + [1.0], [0.0] * 40).at_least == 0


def test_without_scores_and_words_nothing_is_known() -> None:
    assert judge("Whereabouts?", None, [0.0] * 4).declined
    assert not judge("Whereabouts?", None, [0.0, 0.5]).declined


def test_spread_of_nothing_is_even() -> None:
    assert spread([]) == spread([0.0, 0.0]) == spread([3.0]) == 1.0
    assert spread([1.0, 1.0]) == pytest.approx(1.0)
    assert spread([1.0, 0.0]) == 0.0
