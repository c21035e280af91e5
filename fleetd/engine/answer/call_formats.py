"""How each family of models writes its calls of tools, by the name of mlx-lm's parser for it. Pure.

A format is where a section of calls begins and ends, what reads one call of it, and what a call begins with
whose section was never opened: models forget the opener and write the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from fleetd import limits
from fleetd.engine.answer.call_reader import CallReader, Outcome, tool_name
from fleetd.engine.answer.dsml import DSML, DSML_END, DSML_START
from fleetd.engine.answer.object_text import ObjectStyle
from fleetd.engine.answer.tagged_calls import (
    ArgFormat,
    ParameterText,
    TaggedFormat,
    arg_call,
    tagged_call,
)
from fleetd.engine.answer.text_feed import BLANKS, Reading, words

LLAMA3_START = "<|python_tag|>"
HARMONY_START = "<|channel|>commentary to=functions."

_ID = re.compile(r"[^\s<>{}\[\]]*")

CallGrammar = Callable[[CallReader], Reading[Outcome]]


class CallLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What a family writes around the arguments of a call, as chat templates show it to models.

    {name} stands for the tool's name, {json} for the name in quotes, {n} for the number of the call, and {lf}
    for a line end that some models leave out.
    """

    #: Before the arguments of a call, behind the section's start.
    head: str
    #: After its arguments, before the section's end.
    tail: str = ""
    #: Between calls.
    between: str = ""
    #: Each call has a section of its own.
    apart: bool = True
    #: Around all calls of a section.
    opens: str = ""
    closes: str = ""


class CallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a family writes calls, and what else of its models is read as calls."""

    #: Around a section of calls. ``end`` is "" if only the end of the answer ends one.
    start: str
    end: str
    #: ``end`` may be the token that ends the answer.
    ends_answer: bool = False
    one: CallGrammar
    #: What a call begins with, whose section may be forgotten.
    begins: tuple[str, ...] = ()
    #: The same, at the beginning of a line only; {name} stands for a tool's name.
    lines: tuple[str, ...] = ()
    #: Such a call counts once its section is closed.
    closed: bool = False
    #: An answer may begin with a call, without a section.
    bare: bool = False
    writes: CallLayout
    #: What models write whose tokenizer has no token ``newer``.
    older: CallLayout | None = None
    newer: str = ""
    #: How the arguments are written: as JSON, in braces with keys without quotes, as Python's keywords, or
    #: each between tags.
    arguments: Literal["json", "braces", "keywords"] | TaggedFormat | ArgFormat = "json"
    #: Markers of calls inside of a section, which may end half a call.
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
    written = call_id.removeprefix("functions.")
    name = tool_name(written.rpartition(":")[0] or written, calls.names)
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
    whole=(f"{_OPEN}json", f"{_CLOSE}json{_SEP}"),
    writes=ParameterText(f'{_OPEN}argument key="{{key}}" type="{{says}}"{_SEP}', f"{_CLOSE}argument{_SEP}"),
)
_QWEN = TaggedFormat(
    call="<function",
    end="</function>",
    param="<parameter",
    closes="</parameter>",
    section_end="</tool_call>",
    trims="line ends",
    writes=ParameterText("<parameter={key}>\n", "\n</parameter>", "\n"),
)
_MINIMAX = TaggedFormat(
    call="<invoke",
    end="</invoke>",
    param="<parameter",
    closes="</parameter>",
    section_end="</minimax:tool_call>",
    writes=ParameterText('<parameter name="{key}">', "</parameter>", "\n"),
)
_MINICPM = TaggedFormat(
    call="<function",
    end="</function>",
    param="<param",
    closes="</param>",
    cdata=True,
    writes=ParameterText('<param name="{key}">', "</param>"),
)
_MUSE = TaggedFormat(
    call="<atem:invoke",
    end="</atem:invoke>",
    param="<atem:parameter",
    closes="</atem:parameter>",
    section_end="</atem:function_calls>",
    trims="nothing",
    writes=ParameterText('<atem:parameter name="{key}">', "</atem:parameter>", "\n"),
)
_DSML = TaggedFormat(
    call=f"<{DSML}invoke",
    end=f"</{DSML}invoke>",
    param=f"<{DSML}parameter",
    closes=f"</{DSML}parameter>",
    section_end=DSML_END,
    trims="nothing",
    says=("string", "true"),
    writes=ParameterText(f'<{DSML}parameter name="{{key}}" string="{{says}}">', f"</{DSML}parameter>", "\n"),
)

_GLM_ARGS = ArgFormat("", "</tool_call>")
_LONGCAT_ARGS = ArgFormat("longcat_", "</longcat_tool_call>")
_GLM = CallFormat(
    start="<tool_call>",
    end="</tool_call>",
    one=_args(_GLM_ARGS),
    lines=("{name}",),
    arguments=_GLM_ARGS,
    writes=CallLayout(head="{name}{lf}", between="\n"),
)

CALL_FORMATS: Mapping[str, CallFormat] = {
    "json_tools": CallFormat(
        start="<tool_call>",
        end="</tool_call>",
        one=_json,
        lines=("{",),
        closed=True,
        writes=CallLayout(head='\n{"name": {json}, "arguments": ', tail="}\n", between="\n"),
    ),
    "llama3": CallFormat(
        start=LLAMA3_START,
        end="",
        one=_json,
        lines=("{",),
        closed=True,
        bare=True,
        writes=CallLayout(head='{"name": {json}, "parameters": ', tail="}", between="; ", apart=False),
    ),
    "mistral": CallFormat(
        start="[TOOL_CALLS]",
        end="",
        one=_mistral,
        lines=("{name}[ARGS]",),
        writes=CallLayout(head="{name}[ARGS]"),
        older=CallLayout(
            opens="[",
            head='{"name": {json}, "arguments": ',
            tail="}",
            between=", ",
            closes="]",
            apart=False,
        ),
        newer="[ARGS]",
    ),
    "kimi_k2": CallFormat(
        start="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
        one=_kimi_k2,
        begins=("<|tool_call_begin|>",),
        writes=CallLayout(
            head="<|tool_call_begin|>functions.{name}:{n}<|tool_call_argument_begin|>",
            tail="<|tool_call_end|>",
            apart=False,
        ),
        inside=("<|tool_call_end|>",),
    ),
    "kimi_k3": CallFormat(
        start=f"{_OPEN}tools{_SEP}",
        end=f"{_CLOSE}tools{_SEP}",
        one=_tagged(_KIMI_K3),
        begins=(_KIMI_K3.call,),
        arguments=_KIMI_K3,
        writes=CallLayout(
            head=f'{_OPEN}call tool={{json}} index="{{n}}"{_SEP}', tail=_KIMI_K3.end, apart=False
        ),
        inside=(_KIMI_K3.whole[1], _KIMI_K3.end),
    ),
    "harmony": CallFormat(
        start=HARMONY_START,
        end="<|call|>",
        ends_answer=True,
        one=_json,
        writes=CallLayout(head="{name} <|constrain|>json<|message|>", between="<|start|>assistant"),
        inside=("<|end|>", "<|start|>assistant"),
    ),
    "gemma4": CallFormat(
        start="<|tool_call>",
        end="<tool_call|>",
        one=_braces,
        lines=("call:{name}{",),
        arguments="braces",
        writes=CallLayout(head="call:{name}{", tail="}"),
        quote='<|"|>',
    ),
    "function_gemma": CallFormat(
        start="<start_function_call>",
        end="<end_function_call>",
        one=_braces,
        lines=("call:{name}{",),
        arguments="braces",
        writes=CallLayout(head="call:{name}{", tail="}"),
        quote="<escape>",
    ),
    "qwen3_coder": CallFormat(
        start="<tool_call>",
        end="</tool_call>",
        one=_tagged(_QWEN),
        begins=("<function=",),
        arguments=_QWEN,
        writes=CallLayout(head="\n<function={name}>\n", tail="</function>\n", between="\n"),
    ),
    "minimax_m2": CallFormat(
        start="<minimax:tool_call>",
        end="</minimax:tool_call>",
        one=_tagged(_MINIMAX),
        begins=("<invoke name=",),
        arguments=_MINIMAX,
        writes=CallLayout(head="<invoke name={json}>\n", tail="</invoke>\n", apart=False, opens="\n"),
    ),
    "minicpm5": CallFormat(
        start="",
        end="",
        one=_tagged(_MINICPM),
        begins=("<function name=",),
        arguments=_MINICPM,
        writes=CallLayout(head="<function name={json}>", tail="</function>"),
    ),
    "muse_spark": CallFormat(
        start="<atem:function_calls>",
        end="</atem:function_calls>",
        one=_tagged(_MUSE),
        begins=("<atem:invoke name=",),
        arguments=_MUSE,
        writes=CallLayout(
            head="<atem:invoke name={json}>\n", tail="</atem:invoke>\n", apart=False, opens="\n"
        ),
    ),
    "deepseek_v32": CallFormat(
        start=DSML_START,
        end=DSML_END,
        one=_tagged(_DSML),
        begins=(f"<{DSML}invoke name=",),
        arguments=_DSML,
        writes=CallLayout(
            head=f"<{DSML}invoke name={{json}}>\n", tail=f"</{DSML}invoke>\n", apart=False, opens="\n"
        ),
    ),
    "glm47": _GLM,
    "laguna": _GLM,
    "longcat": CallFormat(
        start="<longcat_tool_call>",
        end="</longcat_tool_call>",
        one=_args(_LONGCAT_ARGS),
        lines=("{name}",),
        arguments=_LONGCAT_ARGS,
        writes=CallLayout(head="{name}{lf}", between="\n"),
    ),
    "pythonic": CallFormat(
        start="<|tool_call_start|>",
        end="<|tool_call_end|>",
        one=_python,
        lines=("[{name}(",),
        closed=True,
        arguments="keywords",
        writes=CallLayout(head="{name}(", tail=")", between=", ", apart=False, opens="[", closes="]"),
        colon="=",
    ),
}
