"""Calls whose arguments are not JSON: told while they are written, and what the format's parser reads."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import chain_model
import pytest
from call_formats import SpelledAnswer, family
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.utils import load_model
from speculating import GREEDY, Run

from fleetd.engine.dsml import DSML
from fleetd.engine.prompt_encoding import PreparedPrompt
from fleetd.engine.protocol import Delta, Generate, TokenPrompt, ToolCall, ToolCallPiece
from fleetd.engine.tagged_arguments import TAGGED_FORMATS, escaped

PARSERS = [*TAGGED_FORMATS, "gemma4"]
LONG = "def f():\n\n    return \"</p\" < b'\\\\n' # é😀\n" * 3


def tagged(parser: str, values: dict[str, str]) -> str:
    """The text of one call of write_file, without the section's markers."""
    if parser == "qwen3_coder":
        parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        return f"\n<function=write_file>\n{parameters}</function>\n"
    if parser == "minimax_m2":
        parameters = "".join(f'<parameter name="{k}">{value}</parameter>\n' for k, value in values.items())
        return f'\n<invoke name="write_file">\n{parameters}</invoke>\n'
    if parser == "deepseek_v32":
        parameters = "".join(
            f'<{DSML}parameter name="{key}" string="{_is_string(value)}">{value}</{DSML}parameter>\n'
            for key, value in values.items()
        )
        return f'\n<{DSML}invoke name="write_file">\n{parameters}</{DSML}invoke>\n'
    if parser == "gemma4":
        return "call:write_file{" + ",".join(f"{key}:{value}" for key, value in values.items()) + "}"
    tag = "longcat_arg" if parser == "longcat" else "arg"
    return "write_file\n" + "".join(
        f"<{tag}_key>{key}</{tag}_key>\n<{tag}_value>{value}</{tag}_value>\n" for key, value in values.items()
    )


def _is_string(value: str) -> str:
    """What the model says of a value: of one that JSON has besides strings, that it is none."""
    try:
        return str(isinstance(json.loads(value), str)).lower()
    except ValueError:
        return "true"


def closing(parser: str) -> tuple[str, ...]:
    """Texts that end a value, and so stand in none."""
    made = family(parser)
    if parser == "gemma4":
        return ('<|"|>', made.end, "\0")
    tagged = TAGGED_FORMATS[parser]
    return (tagged.closes, made.start, made.end, tagged.end or tagged.closes)


def tools_of(properties: dict[str, Any]) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": properties}
    return [{"type": "function", "function": {"name": "write_file", "parameters": parameters}}]


def answer(parser: str, *calls: str) -> str:
    made = family(parser)
    return "\n".join(f"{made.start}{call}{made.end}" for call in calls)


def reference(parser: str, call: str, tools: list[dict[str, Any]]) -> str | None:
    """What the format's parser makes of a whole call; None where it makes none."""
    try:
        found = family(parser).parse(call, tools)
        found = found[0] if isinstance(found, list) else found
        return json.dumps(found["arguments"], ensure_ascii=False, allow_nan=False)
    except Exception:
        return None


def string(parser: str, text: str) -> str:
    return f'<|"|>{text}<|"|>' if parser == "gemma4" else text


# ---- The same arguments ----------------------------------------------------------------------------------

SCHEMAS = st.sampled_from(
    [
        {"type": "string"},
        {"type": ["string", "null"]},
        {"type": "string", "enum": ["a", "b"]},
        {"type": "integer"},
        {"type": "number"},
        {"type": "boolean"},
        {"type": "array"},
        {"type": "object"},
        {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        {"description": "of no type"},
        {},
        None,
    ]
)
FRAGMENTS = st.sampled_from(
    [
        *("<", "</", "</par", "</parameter", "</arg_val", "<parameter=x>", "</function", '<|"', "<|", ">"),
        *("\n", "\n\n", " ", "\t", '"', "'", "\\", "\\n", "{", "}", "[", "]", ",", ":", "\u2028", "é", "😀"),
        *("null", "None", "nu", "NULL", "nil", "true", "1", "1.50", "-2e3", "def f(): pass", "\x01"),
    ]
)
TEXTS = st.one_of(
    st.lists(FRAGMENTS, max_size=8).map("".join),
    st.text(max_size=12),
    st.sampled_from(
        ['{"a": [1, {"b": "c"}]}', "[1, 2]", "null", " null ", "null\n", "Null!", "1e999", "NaN", LONG]
    ),
)
GEMMA = st.recursive(
    st.one_of(
        TEXTS.map(lambda text: f'<|"|>{text}<|"|>'),
        st.sampled_from(["1", "-2.50", "true", "null", "1e3", '"plain"']),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda found: f"[{','.join(found)}]"),
        st.dictionaries(st.sampled_from(["x", "y_1", "é"]), inner, max_size=3).map(
            lambda found: "{" + ",".join(f"{key}:{value}" for key, value in found.items()) + "}"
        ),
    ),
    max_leaves=5,
)


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, str, list[dict[str, Any]]]:
    """A parser, the text of a call in its format, and tools."""
    parser = draw(st.sampled_from(PARSERS))
    keys = draw(st.lists(st.sampled_from(["path", "content", "n", "a-b"]), unique=True, max_size=4))
    if parser == "gemma4":
        keys = [key.replace("-", "_") for key in keys]
    values = GEMMA if parser == "gemma4" else TEXTS
    properties = {key: schema for key in keys if (schema := draw(SCHEMAS)) is not None}
    texts = {key: draw(values) for key in keys}
    wrong = [end for end in closing(parser) if end not in ('<|"|>',)]
    texts = {key: text for key, text in texts.items() if not any(end in text for end in wrong)}
    if parser == "longcat" and not texts:  # its parser reads no call without parameters
        texts = {"path": "a.py"}
    return parser, tagged(parser, texts), tools_of(properties)


@examples(200)
@given(call=calls(), data=st.data())
def test_the_fragments_make_up_what_the_parser_reads_of_the_whole_call(
    call: tuple[str, str, list[dict[str, Any]]], data: st.DataObject
) -> None:
    parser, text, tools = call
    expected = reference(parser, text, tools)
    whole = answer(parser, text)
    cuts = data.draw(
        st.one_of(st.just(range(1, len(whole))), st.sets(st.integers(1, len(whole)), max_size=9))
    )
    at = [0, *sorted(cuts), len(whole)]
    words = [whole[a:b] for a, b in itertools.pairwise(at)]
    seen = SpelledAnswer(parser, words, tools)
    assert len(seen.calls) == 1
    index, name, arguments = seen.calls[0]
    assert (index, name, seen.text) == (0, "write_file", "")
    assert isinstance(json.loads(arguments), dict)
    if expected is not None:
        assert arguments == expected
    assert not seen.pieces or seen.streamed == arguments
    assert SpelledAnswer(parser, words, tools, pieces=False).calls == seen.calls


# ---- As they are written ---------------------------------------------------------------------------------

STRINGS = tools_of({"path": {"type": "string"}, "content": {"type": "string"}, "n": {"type": "integer"}})


def file_call(parser: str) -> str:
    values = {"path": string(parser, "a.py"), "n": "7", "content": string(parser, LONG)}
    return tagged(parser, values)


@pytest.mark.parametrize("parser", PARSERS)
def test_a_long_string_is_told_while_it_is_written(parser: str) -> None:
    whole = answer(parser, file_call(parser))
    seen = SpelledAnswer(parser, list(whole), STRINGS)
    value = reading(parser, LONG)
    assert json.loads(seen.streamed) == {"path": "a.py", "n": 7, "content": value}
    begin, begun = whole.index(value), seen.streamed.index(escaped(value))
    told = list(itertools.accumulate(len(text_of(events)) for events in seen.by_word))
    for letters in range(len(value)):
        # Blanks and what may begin the tag that ends the value wait for the next letter.
        certain = value[: max(0, letters - 8)]
        assert told[begin + letters] >= (begun + len(escaped(certain)) if certain else 0)


def text_of(events: Iterable[Any]) -> str:
    return "".join(e.text for e in events if isinstance(e, ToolCallPiece))


def reading(parser: str, text: str) -> str:
    return text if parser in ("gemma4", "qwen3_coder", "deepseek_v32") else text.strip()


@pytest.mark.parametrize("parser", PARSERS)
def test_the_name_is_told_before_the_first_value(parser: str) -> None:
    whole = answer(parser, file_call(parser))
    seen = SpelledAnswer(parser, list(whole), STRINGS)
    first = next(
        i for i, events in enumerate(seen.by_word) if any(isinstance(e, ToolCallPiece) for e in events)
    )
    assert seen.pieces[0].name == "write_file"
    assert first < whole.index("a.py")


@pytest.mark.parametrize("parser", PARSERS)
def test_half_a_call_is_never_text(parser: str) -> None:
    whole = answer(parser, file_call(parser))
    arguments = reference(parser, file_call(parser), STRINGS)
    assert arguments is not None
    for end in range(whole.index("write_file") + 12, whole.rindex(LONG.strip()) + len(LONG.strip()), 3):
        seen = SpelledAnswer(parser, list(whole[:end]), STRINGS, cut=True)
        assert (seen.text, seen.calls) == ("", [])
        assert arguments.startswith(seen.streamed)
        assert seen.state.cut_call


@pytest.mark.parametrize("parser", PARSERS)
def test_an_answer_that_ends_inside_of_a_value_has_half_a_call(parser: str) -> None:
    """The model stops, or a stop string is met."""
    whole = answer(parser, file_call(parser))
    half = whole[: whole.index("return")]
    for seen in (
        SpelledAnswer(parser, list(half), STRINGS),
        SpelledAnswer(parser, list(whole), STRINGS, stops=("return",)),
    ):
        assert (seen.text, seen.calls, seen.state.cut_call) == ("", [], True)
    assert SpelledAnswer(parser, list(whole), STRINGS, stops=("return",)).state.stopped_by == "return"


@pytest.mark.parametrize("parser", PARSERS)
def test_a_section_that_ends_inside_of_a_value_gives_the_arguments_as_far_as_they_came(parser: str) -> None:
    """As for models that write JSON: whoever runs the tool tells the model that this is none."""
    whole = answer(parser, file_call(parser))
    end = family(parser).end
    seen = SpelledAnswer(parser, list(whole[: whole.index("return")] + end + "Done."), STRINGS)
    ((_, name, arguments),) = seen.calls
    assert (name, arguments, seen.text) == ("write_file", seen.streamed, "Done.")
    with pytest.raises(json.JSONDecodeError):
        json.loads(arguments)


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("together", [True, False])
def test_each_of_several_calls_is_whole_before_the_next_begins(parser: str, together: bool) -> None:
    texts = [tagged(parser, {"path": string(parser, path)}) for path in ("a", "b")]
    sections = [answer(parser, *texts)]
    if parser in ("minimax_m2", "gemma4", "qwen3_coder"):
        sections.append(answer(parser, "".join(texts)))  # both in one section
    for whole in sections:
        seen = SpelledAnswer(parser, [whole] if together else list(whole), STRINGS)
        assert seen.calls == [(i, "write_file", f'{{"path": "{path}"}}') for i, path in enumerate("ab")]
        assert seen.streamed == "".join(arguments for _, _, arguments in seen.calls)
        assert (seen.text, [piece.index for piece in seen.pieces]) == (
            "",
            sorted(p.index for p in seen.pieces),
        )


def test_a_call_whose_end_tag_is_left_out_ends_with_its_section() -> None:
    text = tagged("qwen3_coder", {"path": "a.py"}).replace("</function>", "")
    assert SpelledAnswer("qwen3_coder", list(answer("qwen3_coder", text)), STRINGS).calls == [
        (0, "write_file", '{"path": "a.py"}')
    ]


def test_the_tag_that_ends_a_call_may_stand_in_a_value() -> None:
    """mlx-lm's parser of MiniMax loses such a value, which is out by then."""
    for parser in ("minimax_m2", "qwen3_coder"):
        value = f"a {TAGGED_FORMATS[parser].end} b"
        seen = SpelledAnswer(parser, list(answer(parser, tagged(parser, {"content": value}))), STRINGS)
        assert seen.calls == [(0, "write_file", json.dumps({"content": value}))]


@pytest.mark.parametrize("parser", ["qwen3_coder", "gemma4"])
def test_a_value_that_its_type_does_not_have_is_given_as_the_string_that_was_written(parser: str) -> None:
    text = tagged(parser, {"n": "seven", "path": string(parser, "a")})
    seen = SpelledAnswer(parser, list(answer(parser, text)), STRINGS)
    assert seen.calls == [(0, "write_file", '{"n": "seven", "path": "a"}')]


def test_what_is_no_call_is_left_to_the_parser() -> None:
    json_call = '{"name": "write_file", "arguments": {"path": "a"}}'
    assert SpelledAnswer("glm47", list(answer("glm47", json_call)), STRINGS).calls == [
        (0, "write_file", '{"path": "a"}')
    ]
    assert SpelledAnswer("qwen3_coder", list(answer("qwen3_coder", "Hm.")), STRINGS).text == "Hm."


# ---- In a worker -----------------------------------------------------------------------------------------

WRITES = [
    *("<tool_call>", "\n<function=", "write_file", ">\n<parameter=", "content", ">\n", "one\n", "two</par"),
    *("three\n", "</parameter>\n", "</function>\n", "</tool_call>", chain_model.EOS),
]


@pytest.mark.usefixtures("cpu_installed")
@pytest.mark.parametrize("most", [40, 8, None])
def test_a_model_writes_a_file(most: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_model, "CHAINS", {"<write>": WRITES, "<count>": chain_model.CHAINS["<count>"]})
    folder = chain_model.build(tmp_path)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tool_parser_type": "qwen3_coder"}))
    tokenizer = load_tokenizer(folder)
    tokens = list(tokenizer.encode("<write>"))
    run = Run(load_model(folder)[0], tokenizer)
    request = Generate("r", TokenPrompt(tokens), GREEDY, max_tokens=most, call_pieces=True)
    run.scheduler.inbox.put(PreparedPrompt(request, tokens, tools=STRINGS))
    run.finish()
    written = "".join(e.text for e in run.events if isinstance(e, ToolCallPiece))
    calls = [e.arguments for e in run.events if isinstance(e, ToolCall)]
    if most == 8:  # cut in the middle of the value
        assert (written, calls) == ('{"content": "one\\ntwo', [])
        assert run.finished("r").reason == "length"
    else:
        assert calls == [written] == ['{"content": "one\\ntwo</parthree"}']
        assert run.finished("r").reason == "tool_calls"
    assert not any(e.text for e in run.events if isinstance(e, Delta))
