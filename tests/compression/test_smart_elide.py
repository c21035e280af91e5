from __future__ import annotations

import json
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from smart_texts import brace_code, haystack, prose, python_code, records, table

from fleetd.compression.elide import elided, marker
from fleetd.compression.text_units import units
from fleetd.compression.words import merged

MARK = re.compile(r"\[\.\.\. \d+ tokens omitted \.\.\.\]")


def some(text: str, seed: int, share: float, most: int = 160) -> list[tuple[int, int]]:
    """Ranges of randomly chosen units with their frames, as a selection has them."""
    found = units(text, most)
    chance = random.Random(seed)
    kept = {i for i in range(len(found)) if chance.random() < share}
    kept |= {frame for i in kept for frame in found[i].frames}
    return merged([(found[i].start, found[i].end) for i in kept])


def test_gaps_are_lines_of_their_own_and_the_rest_is_in_order() -> None:
    text = "One.\n\nTwo is dropped.\n\nThree. Four is dropped too. Five."
    kept = [(0, 6), (23, 30), (51, 56)]
    assert elided(text, kept) == f"One.\n\n{marker(4)}\nThree. \n{marker(5)}\nFive."


def test_nothing_kept_is_one_marker_and_everything_kept_is_the_text() -> None:
    text = haystack(1, 3) + "\n\n" + python_code(2)
    assert MARK.fullmatch(elided(text, []).strip())
    assert elided(text, [(0, len(text))]) == text


def test_a_gap_in_code_is_indented_as_the_code() -> None:
    code = f"```python\n{python_code(3)}```\n"
    start = code.index("    for attempt")
    end = code.index("    return total")
    said = elided(code, [(0, start), (end, len(code))])
    assert said.splitlines()[3].startswith("    [... ")


@given(st.integers(0, 10_000), st.sampled_from([0.05, 0.2, 0.5, 0.9]))
def test_elided_json_can_be_parsed(seed: int, share: float) -> None:
    chance = random.Random(seed)
    text = records(
        chance.randint(5, 60), note=prose(seed), file=python_code(8), nested={"a": [1, 2, [3, {}]], "b": None}
    )
    original = json.loads(text)
    kept = some(text, seed, share)
    if not kept:
        return
    again = json.loads(elided(text, kept))
    rows = [row for row in again.get("rows", ()) if isinstance(row, dict)]
    assert all(any(_is_part(row, whole) for whole in original["rows"]) for row in rows)
    assert "file" not in again or set(again["file"].split("\n")) - set(original["file"].split("\n")) <= {
        line for line in again["file"].split("\n") if MARK.fullmatch(line)
    }


def _is_part(row: dict[str, object], original: dict[str, object]) -> bool:
    return all(MARK.search(key) or key == "tags" or original.get(key) == value for key, value in row.items())


@given(st.integers(0, 10_000), st.sampled_from([0.05, 0.3, 0.7]))
def test_fences_tables_and_lines_survive_any_selection(seed: int, share: float) -> None:
    text = "\n\n".join(
        [
            prose(seed),
            f"```c\n{brace_code(4)}\n```",
            table(10),
            prose(seed + 1),
            f"~~~\n{python_code(3)}~~~",
            prose(seed + 2),
        ]
    )
    said = elided(text, some(text, seed, share))
    assert said.count("```") % 2 == 0
    assert said.count("~~~") % 2 == 0
    rows = [line for line in said.splitlines() if line.startswith("| Town")]
    assert not rows or "| town | code |\n|------|-----:|\n" in said
    lines = set(text.splitlines())
    inside = False
    for line in said.splitlines():
        if line.startswith(("```", "~~~")):
            inside = not inside
        elif inside:
            assert line in lines or MARK.fullmatch(line.strip())
    fenced = said.partition("```c\n")[2].partition("```")[0]
    assert fenced.count("{") == fenced.count("}")


@given(st.integers(0, 10_000), st.sampled_from([0.1, 0.5]))
def test_what_is_said_besides_markers_stands_in_the_text_in_this_order(seed: int, share: float) -> None:
    text = haystack(seed, 6) + "\n\n" + python_code(3)
    at = 0
    for piece in MARK.split(elided(text, some(text, seed, share))):
        stripped = piece.strip()
        at = text.index(stripped, at) + len(stripped)


@pytest.mark.parametrize("text", ["", "\n", "x", "[... 3 tokens omitted ...]"])
def test_short_and_odd_texts(text: str) -> None:
    assert elided(text, [(0, len(text))] if text else []) == text
