"""Tokenizers that write tool calls as a family of models does, from texts that a test chooses."""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from fleetd.engine.answer import dsml
from fleetd.engine.answer.call_formats import CALL_FORMATS, HARMONY_START, LLAMA3_START
from fleetd.engine.answer.output_text import AnswerText
from fleetd.engine.protocol import Delta, ToolCall, ToolCallPiece


@dataclass(frozen=True)
class CallFamily:
    """Where a family's calls begin and end, and mlx-lm's parser of them, if it has one."""

    start: str
    end: str
    parse: Callable[..., Any] | None = None


_OURS = {
    "llama3": CallFamily(LLAMA3_START, ""),
    "harmony": CallFamily(HARMONY_START, "<|call|>"),
    "deepseek_v32": CallFamily(dsml.DSML_START, dsml.DSML_END),
}


def family(parser: str) -> CallFamily:
    """By the parser's name: ours or mlx-lm's."""
    if parser in _OURS:
        return _OURS[parser]
    module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
    return CallFamily(module.tool_call_start, module.tool_call_end, module.parse_tool_call)


class WordDetokenizer:
    """Gives each token a piece of text."""

    def __init__(self, words: list[str]) -> None:
        self.text = ""
        self._words = words
        self._read = 0

    def add_token(self, token: int) -> None:
        self.text += self._words[token]

    def finalize(self) -> None:
        pass

    @property
    def last_segment(self) -> str:
        at, self._read = self._read, len(self.text)
        return self.text[at:]


def spelling(parser: str, words: list[str]) -> Any:
    """A tokenizer whose tokens are given pieces of text, with the format of a family."""
    made = family(parser)
    return SimpleNamespace(
        detokenizer=WordDetokenizer(words),
        init_kwargs={"tool_parser_type": parser},
        has_thinking=False,
        has_tool_calling=True,
        tool_call_start=made.start,
        tool_call_end=made.end,
        structural_markers=[],
        response_initial_state="head" if parser == "harmony" else None,
    )


class SpelledAnswer:
    """One answer in a family's format, whose tokens are given pieces of text, and all that was told of it."""

    def __init__(
        self,
        parser: str,
        words: list[str],
        tools: list[dict[str, Any]],
        *,
        pieces: bool = True,
        cut: bool = False,
        stops: tuple[str, ...] = (),
    ) -> None:
        words = [word for word in words if word]
        made = spelling(parser, words)
        self.state = AnswerText("r", made, list(stops), tools, call_pieces=pieces)
        self.by_word = [self.state.push(token) for token in range(len(words))]
        self.events = events = [*itertools.chain(*self.by_word), *self.state.finish(cut=cut)]
        deltas = [e for e in events if isinstance(e, Delta)]
        self.text = "".join(e.text for e in deltas)
        self.content = "".join(e.text for e in deltas if e.channel == "content")
        self.reasoning = "".join(e.text for e in deltas if e.channel == "reasoning")
        self.calls = [(e.index, e.name, e.arguments) for e in events if isinstance(e, ToolCall)]
        self.pieces = [e for e in events if isinstance(e, ToolCallPiece)]
        self.streamed = "".join(e.text for e in self.pieces)
        self.ids = {e.call_id for e in events if isinstance(e, ToolCall | ToolCallPiece)}
        self.said = (self.content, self.reasoning, self.calls)


def sample_call(parser: str, arguments: dict[str, Any], name: str = "look") -> str:
    """A section with one call, as a family writes it; strings come without quotes where tags stand around."""
    written = json.dumps(arguments, ensure_ascii=False)
    start, end = CALL_FORMATS[parser].start, CALL_FORMATS[parser].end
    plain = {key: v if isinstance(v, str) else json.dumps(v) for key, v in arguments.items()}

    def tags(opens: str, closes: str) -> str:
        return "".join(opens.replace("KEY", key) + text + closes for key, text in plain.items())

    quote = CALL_FORMATS[parser].quote
    braces = ",".join(
        f"{key}:{quote}{v}{quote}" if isinstance(v, str) else f"{key}:{json.dumps(v)}"
        for key, v in arguments.items()
    )
    dsml_tags = "".join(
        f'<{dsml.DSML}parameter name="{key}" string="{str(isinstance(arguments[key], str)).lower()}">{text}'
        f"</{dsml.DSML}parameter>\n"
        for key, text in plain.items()
    )
    types = {key: "string" if isinstance(value, str) else "number" for key, value in arguments.items()}
    k3 = "".join(
        f'<|open|>argument key="{key}" type="{types[key]}"<|sep|>{text}<|close|>argument<|sep|>'
        for key, text in plain.items()
    )
    qwen = tags("<parameter=KEY>\n", "\n</parameter>\n")
    minimax = tags('<parameter name="KEY">', "</parameter>\n")
    minicpm = tags('<param name="KEY">', "</param>")
    muse = tags('<atem:parameter name="KEY">', "</atem:parameter>\n")
    bodies = {
        "json_tools": f'\n{{"name": "{name}", "arguments": {written}}}\n',
        "llama3": f'{{"name": "{name}", "parameters": {written}}}',
        "mistral": f"{name}[ARGS]{written}",
        "kimi_k2": f"<|tool_call_begin|>functions.{name}:0"
        f"<|tool_call_argument_begin|>{written}<|tool_call_end|>",
        "kimi_k3": f'<|open|>call tool="{name}" index="1"<|sep|>{k3}<|close|>call<|sep|>',
        "harmony": f"{name} <|constrain|>json<|message|>{written}",
        "gemma4": f"call:{name}{{{braces}}}",
        "function_gemma": f"call:{name}{{{braces}}}",
        "qwen3_coder": f"\n<function={name}>\n{qwen}</function>\n",
        "minimax_m2": f'\n<invoke name="{name}">\n{minimax}</invoke>\n',
        "minicpm5": f'<function name="{name}">{minicpm}</function>',
        "muse_spark": f'\n<atem:invoke name="{name}">\n{muse}</atem:invoke>\n',
        "deepseek_v32": f'\n<{dsml.DSML}invoke name="{name}">\n{dsml_tags}</{dsml.DSML}invoke>\n',
        "pythonic": f"[{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]",
    }
    tag = "longcat_arg" if parser == "longcat" else "arg"
    args = f"{name}\n" + tags(f"<{tag}_key>KEY</{tag}_key>\n<{tag}_value>", f"</{tag}_value>\n")
    return f"{start}{bodies.get(parser, args)}{end}"
