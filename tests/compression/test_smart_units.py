from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from smart_texts import allman_code, brace_code, prose, python_code, records, table

from fleetd.compression.structure import regions
from fleetd.compression.text_units import MOST_CHARS, units
from fleetd.compression.unit_list import TextUnit

MIXED = [
    prose(1),
    "# Heading\n",
    f"```python\n{python_code(4)}```",
    "~~~\nplain\n~~~",
    python_code(3),
    brace_code(3),
    allman_code(3),
    table(8),
    records(6),
    "a,b,c\n" + "".join(f"{i},{i},{i}\n" for i in range(8)),
    "```json\n" + records(12) + "\n```",
    "```\nnever closed",
    "- one\n- two\n- three",
    "     12\tdef shown(x):\n     13\t    return x\n",
    "[2024-01-01 10:00] started\n[2024-01-01 10:01] stopped",
    "{not json}",
    "\n\n\n",
    "word " * 400,
    "x" * 3000,
    json.dumps({"file": python_code(6), "n": 1}),
]


def text_of(text: str, unit: TextUnit) -> str:
    return text[unit.start : unit.end]


def with_frames(found: list[TextUnit], unit: TextUnit) -> list[TextUnit]:
    return [found[i] for i in sorted({*unit.frames, found.index(unit)})]


@given(
    st.lists(st.sampled_from(MIXED) | st.text(max_size=200), max_size=6),
    st.sampled_from(["\n", "\n\n", ""]),
    st.sampled_from([96, 200, MOST_CHARS]),
    st.booleans(),
)
def test_units_tile_any_text_and_frames_are_closed(
    pieces: list[str], between: str, most: int, boundaries: bool
) -> None:
    text = between.join(pieces)
    found = units(text, most, boundaries=boundaries)
    assert "".join(text_of(text, unit) for unit in found) == text
    assert all(unit.start < unit.end for unit in found)
    assert found == units(text, most, boundaries=boundaries)
    for unit in found:
        assert all(found[frame].is_frame for frame in unit.frames)
        for frame in unit.frames:
            # A frame never comes without those it belongs to.
            assert set(found[frame].frames) <= {*unit.frames, found.index(unit)}
    assert "".join(text[r.start : r.end] for r in regions(text)) == text


@pytest.mark.parametrize("code", [python_code(), brace_code(), f"```\n{brace_code()}\n```\n", MIXED[12] * 30])
def test_no_line_of_code_is_cut(code: str) -> None:
    found = units(code, 120)
    assert len(found) > 4
    ends = {0, len(code), *(i + 1 for i, char in enumerate(code) if char == "\n")}
    assert all(unit.start in ends and unit.end in ends for unit in found)


def test_a_statement_comes_with_the_function_it_stands_in() -> None:
    code = python_code()
    found = units(code, 120)
    inner = next(unit for unit in found if "too many attempts in handler 7" in text_of(code, unit))
    around = "".join(text_of(code, unit) for unit in with_frames(found, inner))
    assert around.startswith("def handler_7(request, retries=7):\n")
    assert "handler_6" not in around


@pytest.mark.parametrize("code", [brace_code(), allman_code()])
def test_braces_stay_balanced_around_any_statement(code: str) -> None:
    found = units(code, 60)
    assert sum(bool(unit.frames) for unit in found) > 12
    for unit in found:
        around = "".join(text_of(code, u) for u in with_frames(found, unit))
        assert around.count("{") == around.count("}"), around


def test_a_statement_of_any_layout_stands_in_its_own_function() -> None:
    code = allman_code()
    found = units(code, 60)
    for said in ("log_to_the_console(r, a, __FILE__, 7)", "return r * 7;", "r += 7;"):
        unit = next(unit for unit in found if said in text_of(code, unit))
        around = "".join(text_of(code, u) for u in with_frames(found, unit))
        assert re.findall(r"int (step_\d+)", around) == ["step_7"]


def test_long_remarks_in_front_do_not_part_a_function_from_its_body() -> None:
    remark = "".join(f"// Remark {i} on what it does, at some length.\n" for i in range(12))
    code = "\n".join(f"{remark}{brace_code(12).split(chr(10) + 'int ')[0]}\n" for _ in range(3))
    found = units(code, 60)
    inner = next(unit for unit in found if "log_to_the_console" in text_of(code, unit))
    around = "".join(text_of(code, unit) for unit in with_frames(found, inner))
    assert around.startswith("int compute_0(int a) {\n")
    assert around.rstrip().endswith("}")


def test_parts_of_a_class_stand_in_it() -> None:
    members = "".join(f"    int member_{i}(int with_a_long_argument_name);\n" for i in range(12))
    code = f"class Thing {{\npublic:\n{members}private:\n{members}}};\n" * 2
    found = units(f"```cpp\n{code}```\n", 60)
    assert all(
        text_of(f"```cpp\n{code}```\n", found[unit.frames[0]]).startswith("```")
        and any("class Thing {" in text_of(f"```cpp\n{code}```\n", found[frame]) for frame in unit.frames)
        for unit in found
        if "member_" in text_of(f"```cpp\n{code}```\n", unit)
    )


def test_keys_that_are_numbers_are_no_line_numbers() -> None:
    rows = "".join(f'        {200 + i}: "the text of code {200 + i}",\n' for i in range(40))
    code = f"```\ndef texts():\n    codes = {{\n{rows}    }}\n    return codes\n```\n"
    found = units(code, 60)
    row = next(unit for unit in found if "code 217" in text_of(code, unit))
    around = "".join(text_of(code, unit) for unit in with_frames(found, row))
    assert around.startswith("```\ndef texts():\n    codes = {\n")
    assert around.endswith("    }\n```\n")


def test_indented_code_is_no_table() -> None:
    go = "\n".join(
        f"func f{i}(x int) int {{\n" + "".join(f"\ty{j} := compute(x, {i * j})\n" for j in range(8)) + "}\n"
        for i in range(6)
    )
    assert {region.kind for region in regions(go)} == {"code"}
    calls = "def run(app):\n" + "".join(f"    app.add('name{i}', 0, 'text')\n" for i in range(8))
    assert {region.kind for region in regions(calls)} == {"code"}


def test_json_may_stand_behind_a_name_or_within_a_tag() -> None:
    for before, after in (("Output: ", ""), ("<result>", "</result>"), ("const x = ", ";"), ("data:", "")):
        text = f"Some words.\n{before}{records(20)}{after}\nMore words."
        assert [region.kind for region in regions(text)] == ["prose", "json", "prose"]
        found = units(text, 200)
        row = next(unit for unit in found if "user7@" in text_of(text, unit))
        around = "".join(text_of(text, unit) for unit in with_frames(found, row))
        assert around.startswith(before + "{")
        assert around.endswith(f"]\n}}{after}\n")
    assert next(region.kind for region in regions(f"He said that {records(4)}\n")) != "json"


def test_fences_in_lists_and_quotations_are_fences() -> None:
    inner = "\n".join(f"    {line}".rstrip() for line in python_code(2).splitlines())
    text = f"1. Do this.\n\n    ```python\n{inner}\n    ```\n\n2. Then that.\n"
    assert [region.kind for region in regions(text)] == ["prose", "fence", "prose"]
    quoted = "".join(f"> {line}\n" for line in ("```", "a = 1", "", "b = 2", "```"))
    assert [region.kind for region in regions(f"He wrote:\n{quoted}So?\n")] == ["prose", "fence", "prose"]


def test_paragraphs_end_whatever_lines_end_with() -> None:
    text = "\n\n".join(prose(i) for i in range(6))
    assert len(units(text)) == len(units(text.replace("\n", "\r\n"))) > 2


@pytest.mark.parametrize(
    "text",
    [
        "1" * 200_000,
        ")" * 100_000 + "x",
        " " * 100_000 + "x\n" + " " * 100_000 + "y",
        "a:" + " " * 50_000 + "!\nb = 1",
        "a | b\n" + " " * 100_000 + "x",
        "\n" * 100_000 + "x",
        "x {" + " a\n}\n" * 20_000,
        "`" * 100_000,
        ">" * 100_000,
        '{"a": ' * 20_000,
        "{ [ " * 20_000,
    ],
    ids=lambda text: text[:6],
)
def test_no_text_takes_its_square(text: str) -> None:
    """One that took the square of its length would take minutes here, and hold up a whole daemon."""
    found = units(text)
    assert "".join(text_of(text, unit) for unit in found) == text
    assert sum(len(unit.frames) for unit in found) < len(text)


def test_a_row_comes_with_its_header() -> None:
    text = "Before.\n\n" + table() + "\nAfter."
    found = units(text)
    row = next(unit for unit in found if "Town7 " in text_of(text, unit))
    assert text_of(text, row) == "| Town7 | 1007 |\n"
    assert [text_of(text, found[i]) for i in row.frames] == ["| town | code |\n|------|-----:|\n"]


def test_comma_separated_lines_are_a_table_and_sentences_with_commas_are_not() -> None:
    csv = "name,age,town\n" + "".join(f"n{i},{i},Rome\n" for i in range(6))
    assert [region.kind for region in regions(csv)] == ["table"]
    sentences = "One, two, three.\n" * 6
    assert [region.kind for region in regions(sentences)] == ["prose"]


def test_values_come_with_what_is_around_them() -> None:
    text = records()
    found = units(text, 200)
    value = next(unit for unit in found if '"user31@' in text_of(text, unit))
    around = "".join(text_of(text, unit) for unit in with_frames(found, value))
    assert around.startswith('{\n "rows": [')
    assert around.rstrip().endswith("]\n}")
    assert "user30@" not in around


def test_lines_of_a_file_inside_json_are_units() -> None:
    text = json.dumps({"path": "a.py", "content": python_code(20)})
    found = units(text)
    part = [unit for unit in found if "handler_9" in text_of(text, unit)]
    assert part
    assert all(len(text_of(text, unit)) <= MOST_CHARS for unit in found)
    assert all(text_of(text, unit).endswith(("\\n", '"')) for unit in part)


def test_a_heading_goes_with_what_it_stands_above() -> None:
    text = f"{prose(1)}\n\n## Opening hours\n\n{prose(2, 2)}"
    found = units(text)
    assert any(
        text_of(text, unit).startswith("## Opening hours\n\n") and len(text_of(text, unit)) > 60
        for unit in found
    )


def test_text_that_only_looks_like_json_takes_no_longer_than_other_text() -> None:
    """A scanner that went back to the end of the text from each line would not come back."""
    text = "[1,\n" * 20_000
    assert "".join(text[r.start : r.end] for r in regions(text)) == text
    deep = "[" * 100_000
    assert [region.kind for region in regions(deep)] == ["prose"]
