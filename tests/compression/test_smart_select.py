from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from smart_texts import brace_code, haystack, kept_text, policy, prose, python_code, records, scores, table

from fleetd.compression import elide
from fleetd.compression.document import Document
from fleetd.compression.history import Aged
from fleetd.compression.pins import pins
from fleetd.compression.policy import SmartPrefillBody, SmartPrefillPolicy, resolve
from fleetd.compression.select import select
from fleetd.compression.text_units import MOST_CHARS
from fleetd.compression.token_scores import SegmentScores, TokenScores, merge
from fleetd.compression.words import estimate_tokens

NEEDLE = "The secret code of the harbour office is 48213."
QUESTION = "What is the secret code of the harbour office?"


def hidden(needle: str = NEEDLE, question: str = QUESTION, seed: int = 1) -> Document:
    return Document.of_text(f"{haystack(seed, 20)}\n\n{needle}\n\n{haystack(seed + 1, 20)}\n\n{question}")


def place(document: Document, needle: str) -> tuple[int, int]:
    at = document.text.index(needle)
    return at, at + len(needle)


# ---- What holds for any prompt -------------------------------------------------------------------------

PIECES = st.sampled_from(
    [prose(1), prose(2, 20), python_code(3), brace_code(3), table(12), records(12), "", "x" * 900]
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant", "tool"]),
            "content": st.lists(PIECES | st.text(max_size=60), max_size=4).map("\n\n".join) | st.none(),
        }
    ),
    max_size=6,
)


@examples(60)
@given(
    MESSAGES,
    st.sampled_from([0.0, 0.05, 0.1, 0.25, 0.5, 0.9]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 50, 400]),
    st.data(),
)
def test_ranges_pins_and_budget(
    messages: list[dict[str, object]],
    ratio: float,
    scored: bool,
    boundaries: bool,
    most: int,
    data: st.DataObject,
) -> None:
    document = Document.of_messages(messages)
    wanted = SmartPrefillBody(
        target_ratio=ratio or None, preserve_boundaries=boundaries, max_keep_tokens=most
    )
    found = resolve(wanted, SmartPrefillPolicy())
    assert found is not None
    size = len(document.text)
    peaks = data.draw(st.lists(st.integers(0, max(0, size - 1)).map(lambda at: (at, at + 40)), max_size=3))
    given_scores = scores(document, peaks) if scored else None
    selection = select(document, given_scores, found)
    assert selection == select(document, given_scores, found)
    assert len(selection.kept) == len(document.blocks)
    for block, ranges in zip(document.blocks, selection.kept, strict=True):
        flat = [edge for span in ranges for edge in span]
        # Sorted, disjoint, not touching, not empty, inside.
        assert all(a < b for a, b in itertools.pairwise(flat))
        assert not flat or (flat[0] >= 0 and flat[-1] <= len(block.text))
    kept = [document.flat(i, span) for i, ranges in enumerate(selection.kept) for span in ranges]
    for start, end in pins(document, 0) if document.questions else []:
        for at in range(start, end):
            inside = any(a <= at < b for a, b in kept)
            assert inside or document.text[at] == "\n", document.text[start:end]
    if selection.declined:
        assert all(selection.whole(document, i) for i in range(len(document.blocks)))
        assert selection.ratio == 1
        return
    # No more than the budget and the pins, each rounded up to units (and units to their frames).
    budget = min(ratio or 0.5, 1) * selection.original_tokens
    pinned = select(document, given_scores, policy(0.0001, preserve_boundaries=boundaries)).kept_tokens
    assert (
        selection.kept_tokens <= max(budget, 1.3 * pinned + 0.05 * selection.original_tokens) + MOST_CHARS / 2
    )


def test_a_ratio_of_one_keeps_everything() -> None:
    document = hidden()
    selection = select(document, scores(document), policy(1.0))
    assert selection.declined == "all of it is to be kept"
    assert elide.texts(document, selection) == [document.text]


@pytest.mark.parametrize("ratio", [0.05, 0.1, 0.2, 0.3, 0.5])
@pytest.mark.parametrize("scored", [True, False])
def test_no_more_than_the_ratio_is_kept(ratio: float, scored: bool) -> None:
    document = hidden()
    found = scores(document, [place(document, NEEDLE)]) if scored else None
    selection = select(document, found, policy(ratio))
    assert selection.kept_tokens <= ratio * selection.original_tokens
    # And the budget is used, not only promised.
    assert selection.kept_tokens > 0.7 * ratio * selection.original_tokens
    assert NEEDLE in kept_text(document, selection.kept)


def test_bounds_in_tokens_go_over_the_ratio() -> None:
    document = hidden()
    total = document.estimated_tokens
    least = select(document, None, policy(0.05, min_keep_tokens=total // 2))
    assert total // 2 <= least.kept_tokens <= total // 2 + MOST_CHARS / 4
    most = select(document, None, policy(0.5, max_keep_tokens=200))
    assert 100 < most.kept_tokens <= 200


def test_a_minimum_is_kept_of_many_short_messages_too() -> None:
    document = Document.of_messages([*talk(100, sentences=3), {"role": "user", "content": QUESTION}])
    selection = select(document, None, policy(0.1, min_keep_tokens=1000))
    assert selection.kept_tokens >= 1000
    assert not selection.declined


def test_a_maximum_holds_for_a_line_that_cannot_be_cut_and_over_turns() -> None:
    line = "the harbour office has " + "x = f(secret, code); " * 2000
    text = f"{haystack(1)}\n\n```c\n{line}\n```\n\n{NEEDLE}\n\n{haystack(2)}\n\n{QUESTION}"
    document = Document.of_text(text)
    found = scores(document, [place(document, "x = f(secret, code)")])
    assert select(document, found, policy(0.5, max_keep_tokens=300)).kept_tokens <= 300
    told, asked = (
        {"role": "tool", "content": f"{haystack(1)} {NEEDLE}\n\n{haystack(2)}"},
        {"role": "user", "content": QUESTION},
    )
    first = select(Document.of_messages([told, asked]), None, policy(0.5, max_keep_tokens=300))
    later = Document.of_messages([told, asked, told, asked])
    second = select(later, None, policy(0.5, max_keep_tokens=300), Aged(first))
    always = estimate_tokens(QUESTION) + MOST_CHARS / 4
    assert second.kept_tokens <= 300 + always


def talk(turns: int, sentences: int = 2) -> list[dict[str, object]]:
    """Turns of made-up prose; the needle is in one of them, far from the beginning."""
    roles = ("user", "assistant")
    said = [prose(i, sentences) for i in range(2 * turns)]
    said[turns] += f" {NEEDLE}"
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]


@pytest.mark.parametrize("ratio", [0.1, 0.25])
@pytest.mark.parametrize("turns", [20, 150])
def test_the_text_form_is_as_long_as_is_said(turns: int, ratio: float) -> None:
    """With its lines for what is missing, of which a talk of many turns has many."""
    messages = [*talk(turns), {"role": "user", "content": QUESTION}]
    document = Document.of_messages(messages)
    selection = select(document, None, policy(ratio))
    text = "\n".join(elide.texts(document, selection))
    assert not selection.declined
    assert estimate_tokens(text) < 0.9 * document.estimated_tokens
    assert selection.text_tokens == pytest.approx(estimate_tokens(text), rel=0.15)


def test_what_is_shorter_than_the_line_that_says_it_is_missing_is_kept() -> None:
    roles, says = ("user", "assistant"), ("Is it fine?", "Yes, it is.")
    short = [{"role": roles[i % 2], "content": says[i % 2]} for i in range(600)]
    short[300] = {"role": "user", "content": NEEDLE}
    document = Document.of_messages([*short, {"role": "user", "content": QUESTION}])
    assert "matter" in select(document, None, policy(0.25)).declined
    # Where nothing is marked, as in the cache, it can go.
    assert not select(document, None, policy(0.25, mode="sparse")).declined


def test_a_talk_in_short_turns_is_no_series_of_examples() -> None:
    document = Document.of_messages([*talk(100), {"role": "user", "content": QUESTION}])
    selection = select(document, None, policy(0.1))
    assert not all(selection.whole(document, i) for i in range(16))


def test_records_on_lines_stay_records() -> None:
    lines = [json.dumps({"id": i, "town": f"Town{i}", "note": prose(i, 2)}) for i in range(40)]
    messages = [
        {"role": "tool", "content": "\n".join(lines)},
        {"role": "user", "content": "What does the note of Town17 say?"},
    ]
    document = Document.of_messages(messages)
    said = elide.texts(document, select(document, None, policy(0.2)))[0]
    found = [json.loads(line) for line in said.splitlines()]
    assert [row for row in found if isinstance(row, dict) and row["id"] == 17]
    assert len(found) < 20


# ---- What is kept --------------------------------------------------------------------------------------


def test_attention_finds_what_no_word_names() -> None:
    needle = "Martha hid it behind the third clock."
    document = hidden(needle, "Whereabouts did she conceal the thing?")
    found = scores(document, [place(document, needle)])
    assert needle in kept_text(document, select(document, found, policy(0.1)).kept)


def test_words_find_what_attention_misses() -> None:
    document = hidden()
    found = scores(document, [(400, 500), (900, 1000)])
    assert NEEDLE in kept_text(document, select(document, found, policy(0.1)).kept)


def test_a_table_at_the_beginning_does_not_take_the_room_of_an_answer_behind_it() -> None:
    """The first token of a text gets most of the attention: it is no reason to keep all rows of its table."""
    rows = "\n".join(f"| visitor {i} | {1000 + i} |" for i in range(60))
    records = ",\n".join(f'{{"person": "person {i}", "locker": {7000 + i}}}' for i in range(60))
    document = Document.of_text(
        f"| Visitor | Locker |\n|---|---|\n{rows}\n\n```json\n[\n{records}\n]\n```\n\n"
        "What is the locker of person 31?"
    )
    # A pair of head and query that finds the record, and one that finds nothing; tokens of four characters.
    count = len(document.text) // 4
    starts = np.arange(count, dtype=np.int32) * 4
    found = np.zeros((2, 2, count), np.float32)
    found[0, :, 0] = 12.0
    found[1, :, document.text.index("person 31") // 4] = 5.0
    attention = merge([SegmentScores.of_logits(starts, starts + 4, found)])
    kept = kept_text(document, select(document, attention, policy(0.2)).kept)
    assert '"person 31", "locker": 7031' in kept


@pytest.mark.parametrize("ratio", [0.05, 0.1, 0.3])
def test_rows_that_share_a_header_do_not_go_before_what_the_question_names(ratio: float) -> None:
    """All rows have their header's attention; there are more of them than a budget holds."""
    rows = "\n".join(f"| visitor {i} | Thornton | {1000 + i} |" for i in range(200))
    records = ",\n".join(f'{{"person": "person {i}", "locker": {7000 + i}}}' for i in range(200))
    text = f"| Visitor | Town | Locker |\n|---|---|---|\n{rows}\n\n```json\n[\n{records}\n]\n```"
    document = Document.of_text(f"{haystack(1, 4)}\n\n{text}\n\nWhat is the locker of person 31?")
    attention = scores(document, [place(document, "| Visitor | Town | Locker |")])
    kept = kept_text(document, select(document, attention, policy(ratio)).kept)
    assert '"person 31", "locker": 7031' in kept


@pytest.mark.parametrize("seed", range(4))
def test_a_larger_share_keeps_what_a_smaller_one_keeps(seed: int) -> None:
    facts = [f"Door {i} of the harbour office has the colour {seed + i}." for i in range(12)]
    text = "\n\n".join(f"{haystack(9 * seed + i + 1, 5)} {fact}" for i, fact in enumerate(facts))
    document = Document.of_text(f"{text}\n\nWhich colours are in use where the ships are?")
    found = scores(document, [place(document, fact) for fact in facts])
    before: set[int] = set()
    for ratio in (0.05, 0.1, 0.2, 0.3, 0.5):
        selection = select(document, found, policy(ratio))
        kept = {at for start, end in selection.kept[0] for at in range(start, end)}
        assert before <= kept
        before = kept
    assert all(fact in kept_text(document, selection.kept) for fact in facts)


def test_a_name_leads_on_whose_words_are_both_frequent() -> None:
    first, second = "The bell tower is looked after by Irene Walnut.", "Irene Walnut has 61862 on the door."
    others = [
        f"{name} Walnut likes the sea. Irene {other} does not."
        for name, other in itertools.product(("Marta", "Lena", "Tomas"), ("Pebble", "Ribbon"))
    ]
    document = Document.of_text(
        "\n\n".join([haystack(1, 10), first, *others, haystack(2, 10), second, haystack(3, 10)])
        + "\n\nWhat is the code of whoever looks after the bell tower?"
    )
    kept = kept_text(document, select(document, None, policy(0.1)).kept)
    assert first in kept
    assert second in kept


def test_a_chain_of_names_is_followed_to_its_end() -> None:
    chain = ["VAR ALPHA = 58250.", "VAR BETA = VAR ALPHA.", "VAR GAMMA = VAR BETA.", "VAR DELTA = VAR GAMMA."]
    others = [f"VAR NAME_{i} = {10_000 + i}.\n\nVAR OTHER_{i} = VAR NAME_{i}." for i in range(8)]
    parts = [f"{haystack(i, 10)}\n\n{said}" for i, said in enumerate([*chain[::-1], *others], 1)]
    document = Document.of_text("\n\n".join(parts) + "\n\nWhich variables have the value 58250?")
    kept = kept_text(document, select(document, None, policy(0.05)).kept)
    assert [said for said in chain if said not in kept] == []


def test_a_chain_is_followed_in_a_text_full_of_the_words_of_its_question() -> None:
    chain = ["VAR ALPHA = 58250.", "VAR BETA = VAR ALPHA.", "VAR GAMMA = VAR BETA."]
    usual = [
        f"{which} variables have the value that {what} has."
        for which, what in itertools.product(("Some", "Most", "All", "Few"), ("a list", "a key", "an item"))
    ]
    parts = [f"{haystack(i, 10)}\n\n{said}" for i, said in enumerate([*usual, *chain[::-1], *usual], 1)]
    document = Document.of_text("\n\n".join(parts) + "\n\nWhich variables have the value 58250?")
    kept = kept_text(document, select(document, None, policy(0.15)).kept)
    assert [said for said in chain if said not in kept] == []


def test_a_word_that_leads_on_is_followed() -> None:
    first, second = "Marta owns the vault called Kestrel.", "The guard of Kestrel is old Tobias."
    document = Document.of_text(
        f"{haystack(1, 15)}\n\n{first}\n\n{haystack(2, 15)}\n\n{second}\n\n{haystack(3, 15)}\n\n"
        "Who guards the vault that Marta owns?"
    )
    kept = kept_text(document, select(document, None, policy(0.1)).kept)
    assert first in kept
    assert second in kept


def test_the_best_units_bring_their_neighbours() -> None:
    around = [
        f"Line {word} stands beside it and goes on a little further than that." for word in ("one", "two")
    ]
    document = hidden(f"{around[0]}\n\n{NEEDLE}\n\n{around[1]}")
    found = scores(document, [place(document, NEEDLE)])
    kept = kept_text(document, select(document, found, policy(0.15)).kept)
    assert around[0] in kept
    assert around[1] in kept


def test_without_a_target_as_much_is_kept_as_the_scores_call_for() -> None:
    adaptive = resolve(True, SmartPrefillPolicy())
    assert adaptive is not None
    document = hidden()
    sharp = select(document, scores(document, [place(document, NEEDLE)], floor=0.0001), adaptive)
    wide = [(at, at + 60) for at in range(500, len(document.text) - 500, 300)]
    broad = select(document, scores(document, wide), adaptive)
    assert NEEDLE in kept_text(document, sharp.kept)
    assert 0.04 <= sharp.ratio < 0.15 < broad.ratio <= 0.5 + 0.05


def test_scores_of_another_length_than_the_text_do_no_harm() -> None:
    document = hidden()
    short = scores(document)
    cut = TokenScores(short.starts[:50], short.ends[:50], short.values[:50])
    assert NEEDLE in kept_text(document, select(document, cut, policy(0.2)).kept)


# ---- Reported corruptions ------------------------------------------------------------------------------


def agent_messages() -> list[dict[str, object]]:
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": {"path": "a.py"}}}
    return [
        {"role": "system", "content": f"You are careful. {prose(7, 8)}"},
        {"role": "user", "content": "Please help me with the service."},
        {"role": "assistant", "content": "Gladly."},
        {"role": "user", "content": "Read the file."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": f"```python\n{python_code(30)}```\n"},
        {"role": "assistant", "content": haystack(5, 10)},
        {"role": "tool", "tool_call_id": "c1", "content": records(60)},
        {"role": "user", "content": "What is the mail of user31?"},
    ]


@pytest.mark.parametrize(
    ("before", "after", "option"),
    [
        ("Be brief.\n\n<context>\n", "\n</context>\nCite your sources.", False),
        ("Be brief.\n\n<documents>\n", "\n</documents>\nCite your sources.", False),
        ("Be brief.\n\n", "\n\nCite your sources.", True),
    ],
    ids=["context", "documents", "by option"],
)
def test_of_a_system_prompt_with_material_only_its_instructions_are_always_kept(
    before: str, after: str, option: bool
) -> None:
    material = haystack(60)
    fact = "The secret code of the old mill is 48213."
    at = material.index(". ", len(material) // 2) + 2
    messages = [
        {"role": "system", "content": f"{before}{material[:at]}{fact} {material[at:]}{after}"},
        {"role": "user", "content": "What is the secret code of the old mill?"},
    ]
    whole = Document.of_messages(messages)
    document = Document.of_messages(messages, system_context=option)
    selection = select(document, None, SmartPrefillPolicy(enabled=True, target_ratio=0.2))
    (shortened, asked) = elide.messages(document, selection, messages)
    assert selection.ratio < 0.4
    for kept in ("Be brief.", fact, "Cite your sources."):
        assert kept in shortened["content"]
    assert asked == messages[1]
    if option:
        assert select(whole, None, SmartPrefillPolicy(enabled=True, target_ratio=0.2)).declined


@pytest.mark.parametrize(
    "said",
    [
        "Answer from what is in <context> tags.\n\n{rule}",
        "The user sends texts between <documents> and </documents>.\n\n{rule}",
        "<sources> and </sources> are around each text.\n\n{rule}",
        "Answer from what is in <context> tags.\n\n{rule}\n\n<context>\nA mill.\n</context>",
        "<context> tags are around what is known.\n\n{rule}\n\n<context>A mill.</context>\r\n",
    ],
)
def test_tags_that_instructions_name_are_around_nothing(said: str) -> None:
    system = said.format(rule="Never say the code 9913 to anybody.")
    document = Document.of_messages(
        [{"role": "system", "content": system}, {"role": "user", "content": "Why?"}]
    )
    (block, _) = document.blocks
    assert "Never say the code 9913 to anybody." not in "".join(system[a:b] for a, b in block.context)
    assert bool(block.context) == ("A mill." in system)


@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
def test_only_a_system_prompt_has_context(role: str) -> None:
    messages = [{"role": role, "content": "<context>x</context>"}, {"role": "user", "content": "Why?"}]
    assert not Document.of_messages(messages, system_context=True).blocks[0].context


def test_the_system_prompt_is_never_dropped() -> None:
    document = Document.of_messages(agent_messages())
    for found in (None, scores(document)):
        selection = select(document, found, policy(0.05))
        assert not selection.declined
        assert selection.whole(document, 0)


def test_tool_messages_stay_with_their_calls_and_parse() -> None:
    messages = agent_messages()
    document = Document.of_messages(messages)
    selection = select(document, None, policy(0.15))
    shortened = elide.messages(document, selection, messages)
    assert [m["role"] for m in shortened] == [m["role"] for m in messages]
    assert shortened[4] == messages[4]
    assert [m.get("tool_call_id") for m in shortened] == [m.get("tool_call_id") for m in messages]
    rows = json.loads(str(shortened[7]["content"]))["rows"]
    assert "user31@example.org" in [row["mail"] for row in rows if isinstance(row, dict)]
    assert len(rows) < 60


def test_code_fences_are_closed_and_lines_whole() -> None:
    messages = agent_messages()
    messages[-1]["content"] = "What does handler_17 return in the end?"
    document = Document.of_messages(messages)
    said = str(elide.messages(document, select(document, None, policy(0.15)), messages)[5]["content"])
    assert said.startswith("```python\n")
    assert said.rstrip().endswith("```")
    assert "def handler_17(" in said
    original = set(python_code(30).splitlines())
    assert all(line in original or "tokens omitted" in line or "```" in line for line in said.splitlines())


def test_a_lost_tail_is_no_one_token_answer() -> None:
    """The last turn, or the end of a text prompt, is what the model goes on from."""
    for document in (hidden(), Document.of_messages(agent_messages())):
        selection = select(document, scores(document, [(300, 400)]), policy(0.05))
        assert selection.kept[-1][-1][1] == len(document.blocks[-1].text)
        assert QUESTION in kept_text(document, selection.kept) or selection.whole(document, 8)


def test_control_tokens_of_a_rendered_template_are_kept() -> None:
    body = f"{haystack(1)}\n\n{NEEDLE}\n\n{haystack(2)}\n\n{QUESTION}"
    text = f"<|im_start|>user\n{body}<|im_end|>\n<|im_start|>assistant\n"
    document = Document.of_text(text)
    kept = kept_text(document, select(document, None, policy(0.1)).kept)
    assert kept.startswith("<|im_start|>user\n")
    assert kept.endswith(f"{QUESTION}<|im_end|>\n<|im_start|>assistant\n")


def test_what_the_user_marked_is_kept() -> None:
    document = Document.of_text(
        f"{haystack(1)}\n\n<fleet:keep>\n{prose(99)}\n</fleet:keep>\n\n{haystack(2)}\n\n{QUESTION}"
    )
    assert prose(99) in kept_text(document, select(document, None, policy(0.2)).kept or ())
    assert "fleet:keep" not in document.text


def test_examples_in_front_are_kept() -> None:
    examples = [
        {"role": role, "content": text}
        for shown in ("cat", "dog", "cow")
        for role, text in (("user", f"Translate {shown}."), ("assistant", f"<{shown}>"))
    ]
    messages = [{"role": "system", "content": "Translate."}, *examples]
    messages += [{"role": "user", "content": f"{haystack(3)}\n\n{NEEDLE}\n\n{haystack(4)}\n\n{QUESTION}"}]
    document = Document.of_messages(messages)
    selection = select(document, None, policy(0.1))
    assert not selection.declined
    assert all(selection.whole(document, i) for i in range(7))
    named = [{"role": "user", "name": "example_user", "content": haystack(9, 4)}, *messages[-1:]]
    assert select(Document.of_messages(named), None, policy(0.05)).kept[0] == ((0, len(haystack(9, 4))),)


def test_long_histories_count_not_only_the_last_message() -> None:
    messages = [{"role": "system", "content": "Be brief."}]
    for turn in range(12):
        messages.append(
            {"role": "user", "content": f"{prose(turn, 12)} {NEEDLE if turn == 2 else ''} Noted?"}
        )
        messages.append({"role": "assistant", "content": prose(100 + turn, 12)})
    messages.append({"role": "user", "content": QUESTION})
    document = Document.of_messages(messages)
    selection = select(document, None, policy(0.2))
    assert selection.ratio <= 0.2
    assert NEEDLE in kept_text(document, selection.kept)


def test_what_is_always_kept_may_be_all_there_is() -> None:
    document = Document.of_messages(
        [{"role": "system", "content": haystack(1)}, {"role": "user", "content": QUESTION}]
    )
    assert "always kept" in select(document, None, policy(0.1)).declined


# ---- Aged blocks ---------------------------------------------------------------------------------------


def test_what_was_decided_stays_as_it_is() -> None:
    first = [{"role": "user", "content": f"{haystack(1)}\n\n{NEEDLE}\n\n{haystack(2)}\n\n{QUESTION}"}]
    before = select(Document.of_messages(first), None, policy(0.1))
    later = [
        *first,
        {"role": "assistant", "content": "48213."},
        {"role": "tool", "content": haystack(6)},
        {"role": "user", "content": "What is said about the orchard?"},
    ]
    document = Document.of_messages(later)
    selection = select(document, None, policy(0.1), Aged(before))
    assert selection.kept[0] == before.kept[0]
    assert selection.whole(document, 3)
    assert 0 < sum(b - a for a, b in selection.kept[2]) < len(later[2]["content"]) / 4
    # The same again: nothing is left to decide.
    again = select(document, None, policy(0.1), Aged(selection))
    assert again == selection
