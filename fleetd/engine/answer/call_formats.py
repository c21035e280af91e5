"""How each family of models writes its calls of tools, by the name of mlx-lm's parser for it. Pure.

A format is where a section of calls begins and ends, what reads one call of it, and what a call begins with
whose section was never opened: models forget the opener and write the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import msgspec

from fleetd import limits
from fleetd.engine.answer.call_reader import CallReader, Outcome, tool_name
from fleetd.engine.answer.dsml import DSML, DSML_END, DSML_START
from fleetd.engine.answer.object_text import ObjectStyle
from fleetd.engine.answer.tagged_calls import ArgFormat, TaggedFormat, arg_call, tagged_call
from fleetd.engine.answer.text_feed import BLANKS, Reading, words

LLAMA3_START = "<|python_tag|>"
HARMONY_START = "<|channel|>commentary to=functions."

_ID = re.compile(r"[^\s<>{}\[\]]*")

CallGrammar = Callable[[CallReader], Reading[Outcome]]


class CallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """``start`` and ``end``: of a section. ``end`` is "" where only the end of the answer ends one.

    ``begins``: what a call begins with, whose section may be forgotten. ``lines``: the same, at the beginning
    of a line only; ``{name}`` in it stands for a tool's. ``closed``: such a call counts once its section is
    closed. ``bare``: an answer may begin with a call, without a section.
    ``primes``: what follows ``start`` in a call of one tool that must be made; ``{name}`` stands for it.
    ``inside``: markers of calls inside of a section, which may end half a call.
    """

    start: str
    end: str
    one: CallGrammar
    begins: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    closed: bool = False
    bare: bool = False
    primes: str
    inside: tuple[str, ...] = ()
    colon: str = ":"
    quote: str = ""

    @property
    def style(self) -> ObjectStyle:
        return ObjectStyle(tuple(filter(None, (*self.inside, self.end))), self.colon, self.quote)


def _json(calls: CallReader) -> Reading[Outcome]:
    yield from calls.feed.skip(words("["))
    yield from calls.feed.span(BLANKS)
    return (yield from calls.json_call())


def _tagged(form: TaggedFormat) -> CallGrammar:
    def one(calls: CallReader) -> Reading[Outcome]:
        if (yield from calls.feed.peek()) == "{":
            return (yield from calls.json_call())
        return (yield from tagged_call(calls, form))

    return one


def _args(form: ArgFormat) -> CallGrammar:
    def one(calls: CallReader) -> Reading[Outcome]:
        if (yield from calls.feed.peek()) == "{":
            return (yield from calls.json_call())
        return (yield from arg_call(calls, form))

    return one


def _mistral(calls: CallReader) -> Reading[Outcome]:
    """``NAME[ARGS]{…}``, or a list of calls as JSON."""
    feed = calls.feed
    yield from feed.skip(words("[TOOL_CALLS]"))
    yield from feed.span(BLANKS)
    if (yield from feed.skip(words("["))):
        yield from feed.span(BLANKS)
    if (yield from feed.peek()) == "{":
        return (yield from calls.json_call())
    name, call_id = (yield from calls.name()), ""
    yield from feed.span(BLANKS)
    if name and (yield from feed.skip(words("[CALL_ID]"))):
        call_id = yield from feed.span(_ID, limits.TOOL_NAME_CHARS)
    if name is None or not (yield from feed.skip(words("[ARGS]"))):
        return "none"
    return (yield from calls.arguments(name, call_id))


def _kimi_k2(calls: CallReader) -> Reading[Outcome]:
    """``functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>``"""
    feed = calls.feed
    yield from feed.skip(words("<|tool_call_begin|>"))
    yield from feed.span(BLANKS)
    call_id = yield from feed.span(_ID, limits.TOOL_NAME_CHARS)
    name = tool_name(call_id.rpartition(":")[0] or call_id, calls.names)
    yield from feed.span(BLANKS)
    if name is None or not (yield from feed.skip(words("<|tool_call_argument_begin|>"))):
        return "none"
    outcome = yield from calls.arguments(name, call_id, may_lack=True)
    if outcome == "whole":
        yield from feed.span(BLANKS)
        yield from feed.skip(words("<|tool_call_end|>"))
    return outcome


def _braces(calls: CallReader) -> Reading[Outcome]:
    """``call:NAME{…}``"""
    if not (yield from calls.feed.skip(words("call:"))):
        return "none"
    name = yield from calls.name()
    if name is None or (yield from calls.feed.peek()) != "{":
        return "none"
    return (yield from calls.arguments(name))


def _python(calls: CallReader) -> Reading[Outcome]:
    """``[NAME(KEY=VALUE, …), …]``"""
    feed = calls.feed
    yield from feed.skip(words("["))
    yield from feed.span(BLANKS)
    if (yield from feed.peek()) == "{":
        return (yield from calls.json_call())
    name = yield from calls.name()
    if name is None or (yield from feed.peek()) != "(":
        return "none"
    calls.begin(name)
    return (yield from calls.object())


_OPEN, _CLOSE, _SEP = "<|open|>", "<|close|>", "<|sep|>"
_KIMI_K3 = TaggedFormat(
    call=f"{_OPEN}call",
    end=f"{_CLOSE}call{_SEP}",
    param=f"{_OPEN}argument",
    closes=f"{_CLOSE}argument{_SEP}",
    section_end=f"{_CLOSE}tools{_SEP}",
    sep=_SEP,
    trims="nothing",
    says=("type", "string"),
    whole=f"{_OPEN}json",
)
_QWEN = TaggedFormat(
    call="<function",
    end="</function>",
    param="<parameter",
    closes="</parameter>",
    section_end="</tool_call>",
    trims="line ends",
)
_MINIMAX = TaggedFormat(
    call="<invoke",
    end="</invoke>",
    param="<parameter",
    closes="</parameter>",
    section_end="</minimax:tool_call>",
)
_MINICPM = TaggedFormat(call="<function", end="</function>", param="<param", closes="</param>", cdata=True)
_MUSE = TaggedFormat(
    call="<atem:invoke",
    end="</atem:invoke>",
    param="<atem:parameter",
    closes="</atem:parameter>",
    section_end="</atem:function_calls>",
)
_DSML = TaggedFormat(
    call=f"<{DSML}invoke",
    end=f"</{DSML}invoke>",
    param=f"<{DSML}parameter",
    closes=f"</{DSML}parameter>",
    section_end=DSML_END,
    trims="nothing",
    says=("string", "true"),
)

_GLM = CallFormat(
    start="<tool_call>",
    end="</tool_call>",
    one=_args(ArgFormat("", "</tool_call>")),
    lines=("{name}",),
    primes="{name}\n",
)

CALL_FORMATS: Mapping[str, CallFormat] = {
    "json_tools": CallFormat(
        start="<tool_call>",
        end="</tool_call>",
        one=_json,
        lines=("{",),
        closed=True,
        primes='\n{"name": {json}, "arguments": ',
    ),
    "llama3": CallFormat(
        start=LLAMA3_START,
        end="",
        one=_json,
        lines=("{",),
        closed=True,
        bare=True,
        primes='{"name": {json}, "parameters": ',
    ),
    "mistral": CallFormat(
        start="[TOOL_CALLS]", end="", one=_mistral, lines=("{name}[ARGS]",), primes="{name}[ARGS]"
    ),
    "kimi_k2": CallFormat(
        start="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
        one=_kimi_k2,
        begins=("<|tool_call_begin|>",),
        primes="<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>",
        inside=("<|tool_call_end|>",),
    ),
    "kimi_k3": CallFormat(
        start=f"{_OPEN}tools{_SEP}",
        end=f"{_CLOSE}tools{_SEP}",
        one=_tagged(_KIMI_K3),
        begins=(_KIMI_K3.call,),
        primes=f'{_OPEN}call tool={{json}} index="1"{_SEP}',
        inside=(_KIMI_K3.end,),
    ),
    "harmony": CallFormat(
        start=HARMONY_START,
        end="<|call|>",
        one=_json,
        primes="{name} <|constrain|>json<|message|>",
        inside=("<|end|>", "<|start|>assistant"),
    ),
    "gemma4": CallFormat(
        start="<|tool_call>",
        end="<tool_call|>",
        one=_braces,
        lines=("call:{name}{",),
        primes="call:{name}{",
        quote='<|"|>',
    ),
    "function_gemma": CallFormat(
        start="<start_function_call>",
        end="<end_function_call>",
        one=_braces,
        lines=("call:{name}{",),
        primes="call:{name}{",
        quote="<escape>",
    ),
    "qwen3_coder": CallFormat(
        start="<tool_call>",
        end="</tool_call>",
        one=_tagged(_QWEN),
        begins=("<function=",),
        primes="\n<function={name}>\n",
    ),
    "minimax_m2": CallFormat(
        start="<minimax:tool_call>",
        end="</minimax:tool_call>",
        one=_tagged(_MINIMAX),
        begins=("<invoke name=",),
        primes="\n<invoke name={json}>\n",
    ),
    "minicpm5": CallFormat(
        start="",
        end="",
        one=_tagged(_MINICPM),
        begins=("<function name=",),
        primes="<function name={json}>",
    ),
    "muse_spark": CallFormat(
        start="<atem:function_calls>",
        end="</atem:function_calls>",
        one=_tagged(_MUSE),
        begins=("<atem:invoke name=",),
        primes="\n<atem:invoke name={json}>\n",
    ),
    "deepseek_v32": CallFormat(
        start=DSML_START,
        end=DSML_END,
        one=_tagged(_DSML),
        begins=(f"<{DSML}invoke name=",),
        primes=f"\n<{DSML}invoke name={{json}}>\n",
    ),
    "glm47": _GLM,
    "laguna": _GLM,
    "longcat": CallFormat(
        start="<longcat_tool_call>",
        end="</longcat_tool_call>",
        one=_args(ArgFormat("longcat_", "</longcat_tool_call>")),
        lines=("{name}",),
        primes="{name}\n",
    ),
    "pythonic": CallFormat(
        start="<|tool_call_start|>",
        end="<|tool_call_end|>",
        one=_python,
        lines=("[{name}(",),
        closed=True,
        primes="[{name}(",
        colon="=",
    ),
}
