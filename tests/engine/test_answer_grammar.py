"""What the grammar of an answer allows is read as it was written: its calls, their arguments, its text."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import jsonschema_rs
import pytest
from call_formats import sample_call
from grammar_walks import MARK, THINK, ByteTable, ReadAnswer, Walk, accepts, controls_of, markers_of, matcher

from fleetd.engine.answer.call_formats import CALL_FORMATS
from fleetd.engine.grammar.answer_grammar import AnswerForm
from fleetd.engine.grammar.call_grammars import HeldTool
from fleetd.engine.sampling.constraint import Constraint

every_family = pytest.mark.parametrize("family", CALL_FORMATS)
with_controls = pytest.mark.parametrize("controls", [True, False], ids=["tokens", "spelled"])
# In the quick run calls in parallel are written with control tokens by one family, spelled by the next.
WRITTEN = [
    pytest.param(
        family,
        controls,
        parallel,
        id=f"{family}-{'tokens' if controls else 'spelled'}-{parallel}",
        marks=() if (controls == parallel) is bool(number % 2) else pytest.mark.long,
    )
    for number, family in enumerate(CALL_FORMATS)
    for controls in (True, False)
    for parallel in (True, False)
]
THINKING = [each for each in CALL_FORMATS if markers_of(each).think]
# Calls of one section, which no control token tells apart.
UNCOUNTED = {"llama3", "pythonic"}
COUNTED_BY = {
    "kimi_k2": "<|tool_call_begin|>",
    "kimi_k3": "<|open|>\0call ",
    "harmony": "<|channel|>\0commentary to=",
    "muse_spark": "<atem:invoke name=",
    "minimax_m2": "<invoke name=",
    "minicpm5": "<function name=",
    "deepseek_v32": "<\uff5cDSML\uff5cinvoke name=",
}


def closed(properties: dict[str, Any], required: list[str] | None = None, **fields: Any) -> dict[str, Any]:
    names = list(properties) if required is None else required
    return {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
        **fields,
    }


NODE = {
    "$defs": {"node": closed({"value": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}, ["value"])}
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "no_args": closed({}),
    "look": closed({"city": {"type": "string"}}),
    "write_file": closed(
        {"path": {"type": "string"}, "content": {"type": "string"}, "mode": {"type": "integer"}}, ["path"]
    ),
    "pick": closed(
        {
            "unit": {"enum": ["celsius", "fahr enheit"]},
            "level": {"enum": [1, "b", None, True]},
            "fixed": {"const": "x/y"},
        },
        ["unit"],
    ),
    "nested": closed(
        {
            "at": closed(
                {"x": {"type": "number"}, "y": {"type": "number"}, "tag": {"type": "string"}}, ["x", "y"]
            ),
            "deep": closed({"list": {"type": "array", "items": {"type": "boolean"}}}),
        }
    ),
    "rows": closed(
        {
            "rows": {
                "type": "array",
                "items": closed(
                    {"id": {"type": "integer"}, "names": {"type": "array", "items": {"type": "string"}}},
                    ["id"],
                ),
                "minItems": 1,
                "maxItems": 3,
            }
        }
    ),
    "tree": closed({"node": {"$ref": "#/$defs/node"}}, **NODE),
    "mixed": closed(
        {
            "id": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            "flag": {"type": ["boolean", "null"]},
            "note": {"type": ["string", "null"]},
            "both": {
                "anyOf": [{"type": "array", "items": {"type": "integer"}}, closed({"k": {"type": "string"}})]
            },
        },
        ["id", "both"],
    ),
    "bounded": closed(
        {
            "code": {"type": "string", "pattern": "^[a-z]{2,4}$"},
            "n": {"type": "integer", "minimum": 1, "maximum": 40},
            "s": {"type": "string", "minLength": 2, "maxLength": 5},
        },
        ["code"],
    ),
    "anything": closed({"value": {}, "table": {"type": "object"}}, ["value"]),
    "mcp__x-y.z": closed({"a-b": {"type": "string"}}, []),
}
TOOLS = [HeldTool(name, json.dumps(schema)) for name, schema in SCHEMAS.items()]
VALID = {name: jsonschema_rs.validator_for(schema) for name, schema in SCHEMAS.items()}
# What walks write as often as letters.
ODD = [
    "<", ">", "</", "{", "}", "[", "]", "(", ")", '"', "'", "\\", "\\n", "\n", "\n\n", " ", ", ", ": ",
    ":", "=", ",", "```", "~~~", "\n```\n", "null", "true", "None", "1", "-2.5e3", "é😀", "a", "b",
    "look", "x/y", "celsius", "ab", '{"name": "look", "arguments": {}}',
    '\n{"name": "look", "parameters": {}}', "look(", "\nlook\n", "look {", "look{", "call:look{",
    "\ncall:look{", "functions.look:0", "look[ARGS]{}", "[look(", "<parameter", "</parameter>",
    "</function>", "<arg_key>", "</arg_value>", "]]>", "<![CDATA[", "<escape>", '<|"|>', "to=self",
    "analysis", "final", "commentary",
]  # fmt: skip


@functools.cache
def made(family: str, controls: bool, must_call: bool, parallel: bool, begins: Any) -> Any:
    table = table_of(family, controls)
    form = AnswerForm(None, TOOLS, must_call, parallel, begins)
    return matcher(table, form, markers_of(family))


@functools.cache
def table_of(family: str, controls: bool) -> ByteTable:
    return ByteTable(controls_of(family) if controls else ())


def signs(family: str) -> tuple[list[str], list[str], list[str]]:
    """What walks write of a family's own: what begins parts of an answer, anything, and what ends parts."""
    form, known = CALL_FORMATS[family], markers_of(family)
    writes = getattr(form.arguments, "writes", None)
    heads = known.heads
    begins = [form.start, *form.begins, *THINK, *known.dropped]
    begins += [] if heads is None else [*heads.begins, heads.writes.next, heads.writes.thought]
    ends = [writes.closes, writes.closes.strip()] if writes else []
    ends += [
        form.writes.tail,
        form.end,
        *form.inside,
        form.quote,
        THINK[1],
        *([heads.writes.next] if heads else []),
    ]
    ends += [f"]]>{writes.closes}"] if family == "minicpm5" else []
    closers = [*ends, '"', "}", "]", ")", "\n"]
    begins = list(filter(None, begins))
    return begins, [*filter(None, [*begins, *ends]), *ODD, *ODD], [*filter(None, closers)]


def walked(family: str, controls: bool, seed: int, **form: Any) -> tuple[str, str, ReadAnswer]:
    """An answer's text, the same with marked control tokens, and what is read of it."""
    table = table_of(family, controls)
    begins = form.get("begins", "content")
    walk = Walk(
        table, made(family, controls, form["must_call"], form["parallel"], begins), *signs(family), seed
    )
    text = table.text(walk.tokens)
    read = ReadAnswer(text, markers_of(family), TOOLS, begins, step=1 + seed % 7)
    assert (read.calls, read.content) == (lambda r: (r.calls, r.content))(
        ReadAnswer(text, markers_of(family), TOOLS, begins, step=len(text) + 1)
    )
    return text, table.text(walk.tokens, MARK), read


def check_calls(text: str, read: ReadAnswer) -> None:
    assert read.whole, text
    if re.search(r"[eE][+-]?\d{3}|\d{40}", text):
        return  # a number that Python has not
    for name, arguments in read.calls:
        found = json.loads(arguments)
        assert VALID[name].is_valid(found), (text, name, arguments)


@pytest.mark.parametrize(("family", "controls", "parallel"), WRITTEN)
def test_an_answer_that_must_call_is_calls_with_valid_arguments(
    family: str, controls: bool, parallel: bool
) -> None:
    for seed in range(40):
        begins: Any = "reasoning" if seed % 3 == 0 and family in THINKING else "content"
        text, marked, read = walked(family, controls, seed, must_call=True, parallel=parallel, begins=begins)
        check_calls(text, read)
        assert read.calls, text
        assert not read.content.strip(), text
        if not parallel:
            assert len(read.calls) == 1, text
        elif controls and family not in UNCOUNTED:
            assert len(read.calls) == count(family, marked), text


@pytest.mark.parametrize(("family", "controls", "parallel"), WRITTEN)
def test_a_free_answer_is_its_text_and_its_calls(family: str, controls: bool, parallel: bool) -> None:
    for seed in range(40):
        begins: Any = "reasoning" if seed % 3 == 0 and family in THINKING else "content"
        text, marked, read = walked(family, controls, seed, must_call=False, parallel=parallel, begins=begins)
        check_calls(text, read)
        assert parallel or len(read.calls) <= 1, text
        if controls and family not in UNCOUNTED:
            assert len(read.calls) == count(family, marked), text
        if controls and family in THINKING:
            thought, content = parts(family, marked, begins)
            assert squeezed(read.reasoning) == squeezed(thought), text
            assert squeezed(read.content) == squeezed(content), text


def count(family: str, marked: str) -> int:
    """The calls of a text that control tokens begin."""
    return marked.count(MARK + COUNTED_BY.get(family, CALL_FORMATS[family].start + MARK))


def parts(family: str, marked: str, begins: str) -> tuple[str, str]:
    """The thought and the text around the calls of an answer whose control tokens are marked."""
    form = CALL_FORMATS[family]
    opener, closer = (f"{MARK}{each}{MARK}" for each in THINK)
    thought, rest = "", marked
    if begins == "reasoning" or rest.startswith(opener):
        thought, _, rest = rest.removeprefix(opener).partition(closer)
        if begins == "reasoning":
            thought = thought.removeprefix(THINK[0])  # models may repeat what the prompt has
    if family == "kimi_k3":
        start, end = "\0<|open|>\0tools\0<|sep|>\0", "\0<|close|>\0tools\0<|sep|>\0"
        rest = re.sub(r"\0<\|(open|close)\|>\0(response|message)\0<\|sep\|>\0", "", rest)
    else:
        start, end = (f"{MARK}{each}{MARK}" for each in (form.start or form.begins[0], form.end))
    behind = re.escape(end) if form.end else r"\Z"
    return thought, re.sub(f"(?s){re.escape(start)}.*?{behind}", "", rest)


def squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


# ---- What calls look like --------------------------------------------------------------------------------

ONE = [
    HeldTool("look", json.dumps(closed({"city": {"type": "string"}, "n": {"type": "integer"}}, ["city"]))),
    HeldTool("get_weather", json.dumps(closed({"city": {"type": "string"}}))),
]
PARIS = {"city": "Paris", "n": 3}


def sample(family: str, arguments: dict[str, Any], name: str = "look") -> str:
    """A call as chat templates write it."""
    if family == "muse_spark":
        return f" to={name}<|message|>{sample_call(family, arguments, name)}"
    if family == "llama3":
        return sample_call(family, arguments, name).removeprefix("<|python_tag|>")
    if family == "pythonic":
        return sample_call(family, arguments, name).replace("'", '"')
    return sample_call(family, arguments, name)


def held(family: str, tools: list[HeldTool], *, controls: bool = True, **fields: Any) -> Any:
    form = {"constraint": None, "must_call": False, "parallel": True, "begins": "content", **fields}
    return matcher(table_of(family, controls), AnswerForm(tools=tools, **form), markers_of(family))


@every_family
def test_calls_are_written_as_chat_templates_write_them(family: str) -> None:
    table = table_of(family, True)
    for arguments in (PARIS, {"city": 'a "b" \\ c'}):
        answer = sample(family, arguments)
        if family == "pythonic" and len(arguments) == 1:
            answer = answer.replace('city="a "b" \\\\ c"', 'city="a \\"b\\" \\\\ c"')
        for must_call in (True, False):
            assert accepts(held(family, ONE, must_call=must_call), table.tokens(answer)), answer
        read = ReadAnswer(answer, markers_of(family), ONE, "content", 3)
        assert [(name, json.loads(text)) for name, text in read.calls] == [("look", arguments)]


@every_family
def test_a_call_of_another_tool_or_with_other_arguments_is_not_allowed(family: str) -> None:
    made, table = held(family, ONE, must_call=True), table_of(family, True)
    for arguments in ({"n": 3}, {"city": "Paris", "n": "x"}, {"city": "Paris", "m": 1}):
        assert not accepts(made, table.tokens(sample(family, arguments)))
    assert not accepts(made, table.tokens(sample(family, PARIS, "delete_all")))
    assert not accepts(made, table.tokens("Well."))
    assert not accepts(made, [])


@every_family
def test_several_calls_are_allowed_if_parallel_ones_are(family: str) -> None:
    form, table = CALL_FORMATS[family], table_of(family, True)
    one, two = sample(family, PARIS), sample(family, {"city": "Rome"}, "get_weather")
    behind = two.removeprefix(form.start).removeprefix(form.writes.opens)
    if family == "muse_spark":
        behind = two.partition(form.start + form.writes.opens)[2]
    if form.writes.apart:
        answer = one + form.writes.between + two
    else:
        first = one.removesuffix(form.end).removesuffix(form.writes.closes)
        answer = first + form.writes.between + behind
    for must_call in (True, False):
        made = held(family, ONE, must_call=must_call, parallel=True)
        assert accepts(made, table.tokens(answer)), answer
        assert not accepts(held(family, ONE, must_call=must_call, parallel=False), table.tokens(answer))


# ---- Texts -----------------------------------------------------------------------------------------------

PROSE = """Yes: a < b, and `x["y"]` is {"name": 1}.

```json
{
  "name": "Ann", "arguments": {}
}
```

1. Call it as f(x) -> look at <b>this</b> & that: [1, 2] {3}
   {"id": "n", "type": "function"}
look at this. 😀
"""


def text_of(family: str, text: str) -> str:
    heads = markers_of(family).heads
    return text if heads is None else heads.writes.answer + text


@every_family
@with_controls
def test_text_is_free(family: str, controls: bool) -> None:
    table = table_of(family, controls)
    for tools in (ONE, []):
        made = held(family, tools, controls=controls)
        for text in (PROSE, "", "\n", " x"):
            assert accepts(made, table.tokens(text_of(family, text))), text


@every_family
def test_a_marker_cannot_be_spelled_letter_by_letter(family: str) -> None:
    form, known = CALL_FORMATS[family], markers_of(family)
    made, table = held(family, ONE), table_of(family, True)
    written = known.heads.writes.answer if known.heads else ""
    signs = [form.start, *form.begins] if known.heads is None or form.begins else []
    signs += list(known.dropped) + (list(known.heads.after) if known.heads else [])
    for sign in filter(None, signs):
        for before in ("", "So ", "So:\n"):
            tokens = [*table.tokens(written), *table.spelled(before + sign)]
            made.reset()
            assert made.try_consume_tokens(tokens) == len(tokens) - 1, sign
            if table.is_token(sign):
                # The beginning of a marker is text.
                assert made.is_accepting()


@pytest.mark.parametrize("family", THINKING)
def test_a_thought_neither_spells_its_end_nor_begins_a_call(family: str) -> None:
    form, table = CALL_FORMATS[family], table_of(family, True)
    for begins, before in (("reasoning", []), ("content", table.tokens(THINK[0]))):
        made = held(family, ONE, begins=begins)
        for sign in filter(None, (THINK[1], form.start)):
            tokens = [*before, *table.spelled(f"Hm {sign}")]
            made.reset()
            assert made.try_consume_tokens(tokens) == len(tokens) - 1, sign
        assert accepts(made, [*before, *table.spelled("Hm. <b> {"), *table.tokens(f"{THINK[1]}\n\nYes.")])


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("glm47", "look\n{"),
        ("glm47", "So:\n  look {"),
        ("glm47", "tools.look<arg_key>"),
        ("gemma4", "call:look{"),
        ("mistral", "So:\nlook[ARGS]"),
        ("llama3", 'So:\n{"name": "look"'),
        ("llama3", ' {"type": "function", "function": {"name": "LOOK"'),
        ("json_tools", "{}</tool_call>"),
        ("json_tools", '{"name": "look"'),
        ("pythonic", "So:\n [look("),
    ],
)
def test_a_call_without_its_opener_is_no_text(family: str, text: str) -> None:
    made, table = held(family, ONE), table_of(family, True)
    tokens = table.spelled(text)
    assert made.try_consume_tokens(tokens) == len(tokens) - 1 or not made.is_accepting()


# ---- Constraints -----------------------------------------------------------------------------------------

CONSTRAINTS = [
    ("json_object", "", ['{"a": [1, 2], "b": {}}', "{}"], ["[1]", '{"a":1}', "x"]),
    ("json_schema", json.dumps(closed({"n": {"type": "integer"}})), ['{"n": 12}'], ['{"n": "x"}', "{}"]),
    ("json_schema", '{"type": "array", "items": {"enum": ["<b>"]}}', ['["<b>"]', "[]"], ["{}"]),
    ("regex", r"a/b\d{2}", ["a/b12"], ["a/b1", "a/b123"]),
    ("choice", '["yes", "no \\"way\\""]', ["yes", 'no "way"'], ["maybe", "yesno"]),
    (
        "grammar",
        'start: INT ("," INT)* r0\nr0: T1\nT1: "!"\n%import common.INT\n%import common.WS\n%ignore WS',
        ["1, 2 ,3!", "4!"],
        ["1 2", "x!"],
    ),
    ("grammar", 'root ::= "a" list\nlist ::= ("-" [0-9]+)*', ["a", "a-1-22"], ["b", "a-"]),
]


@every_family
@pytest.mark.parametrize(("kind", "text", "right", "wrong"), CONSTRAINTS)
def test_text_is_held_to_its_constraint(
    family: str, kind: Any, text: str, right: list[str], wrong: list[str]
) -> None:
    table = table_of(family, True)
    constraint = Constraint(kind, text)
    before = [""]
    if family in THINKING:
        before += [f"<think>Hm</think>{gap}" for gap in ("", "\n", "\n\n")]
    if family == "harmony":
        before.append("<|channel|>analysis<|message|>Hm<|end|><|start|>assistant")
    for tools in ([], ONE):
        made = held(family, tools, constraint=constraint)
        for each in before:
            for answer in right:
                assert accepts(made, table.tokens(each + text_of(family, answer))), answer
            for answer in wrong:
                assert not accepts(made, table.tokens(each + text_of(family, answer))), answer
        if (family, kind) != ("llama3", "json_object"):
            assert accepts(made, table.tokens(sample(family, PARIS))) is bool(tools)


def test_a_grammar_that_is_none_is_an_error() -> None:
    with pytest.raises(ValueError, match="GBNF"):
        held("json_tools", [], constraint=Constraint("grammar", "x ::= ("))


# ---- Tools that take a text ------------------------------------------------------------------------------

PATCH = r"""start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF
%import common.LF
"""
PATCHED = (
    '*** Begin Patch\n*** Add File: a.py\n+x = "\\n"\n+\n*** Update File: b é.py\n@@ def f():\n-\ta\n+b\n c\n'
    "*** End Patch"
)
PATCHES = [HeldTool("apply_patch", json.dumps(closed({"input": {"type": "string"}})), PATCH)]


@every_family
def test_the_text_of_a_tool_is_held_to_its_grammar(family: str) -> None:
    made, table = held(family, PATCHES, must_call=True), table_of(family, True)
    answer = sample(family, {"input": PATCHED}, "apply_patch")
    if family == "pythonic":
        written = json.dumps(PATCHED, ensure_ascii=False)
        answer = f"<|tool_call_start|>[apply_patch(input={written})]<|tool_call_end|>"
    assert accepts(made, table.tokens(answer)), answer
    ((name, arguments),) = ReadAnswer(answer, markers_of(family), PATCHES, "content", 5).calls
    assert (name, json.loads(arguments)) == ("apply_patch", {"input": PATCHED})
    assert not accepts(made, table.tokens(answer.replace("*** Add File", "*** Add Fill")))
    assert not accepts(made, table.tokens(answer.replace("*** End Patch", "")))


# ---- What cannot be written ------------------------------------------------------------------------------


@every_family
@pytest.mark.parametrize("name", ["a b", 'a"b', "a<b", "a\\b", ""])
def test_a_name_that_no_family_reads_is_refused(family: str, name: str) -> None:
    with pytest.raises(ValueError, match="named"):
        held(family, [HeldTool(name, "{}")])


@pytest.mark.parametrize("family", ["qwen3_coder", "glm47", "minicpm5", "pythonic"])
def test_a_parameter_that_a_family_cannot_name_is_left_out_unless_it_is_required(family: str) -> None:
    schema = closed({"a <b>": {"type": "string"}}, [])
    assert accepts(
        held(family, [HeldTool("look", json.dumps(schema))], must_call=True),
        table_of(family, True).tokens(sample(family, {})),
    )
    with pytest.raises(ValueError, match="named 'a <b>'"):
        held(family, [HeldTool("look", json.dumps({**schema, "required": ["a <b>"]}))])


def test_a_hundred_tools_are_one_grammar() -> None:
    tools = [HeldTool(f"tool_{at}", json.dumps(SCHEMAS["mixed"])) for at in range(100)]
    for family in CALL_FORMATS:
        assert not held(family, tools).is_error()


# ---- Text that is held, beside calls ---------------------------------------------------------------------


@every_family
def test_an_answer_that_is_text_or_calls_has_no_calls_in_its_text(family: str) -> None:
    known, call = markers_of(family), sample_call(family, {"city": "Paris"})
    if known.heads is not None:
        return  # whose heads tell both apart
    for before in ("", "<think>Hm</think>\n\n"):
        for text in (f"[{call}]", f'"{call}'):
            assert ReadAnswer(before + text, known, ONE, "content", 3, either=True).content == text
        ((name, arguments),) = ReadAnswer(before + call, known, ONE, "content", 3, either=True).calls
        assert (name, json.loads(arguments)) == ("look", {"city": "Paris"})
