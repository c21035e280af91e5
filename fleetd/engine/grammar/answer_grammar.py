"""The grammar of a whole answer: a thought, and then text, calls of tools, or both. Pure.

    [thought] text                   without tools; the text may be held to a constraint
    [thought] (text call)* text      tools may be called
    [thought] call+                  a tool must be called
    [thought] (constrained | call+)  tools may be called, and the text is held to a constraint

What ``AnswerReader`` would take for something else than text cannot be written as text, neither by its
control token nor letter by letter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from fleetd import limits
from fleetd.engine.answer.answer_parts import Channel
from fleetd.engine.answer.answer_reader import Heads, Markers
from fleetd.engine.answer.call_formats import CallFormat
from fleetd.engine.answer.tagged_calls import ArgFormat
from fleetd.engine.grammar.call_grammars import CallGrammar, HeldTool
from fleetd.engine.grammar.client_grammars import bounded, short
from fleetd.engine.grammar.lark_rules import ANY, LarkRules, Spelling, choice, quoted
from fleetd.engine.grammar.schemas import enforceable, lenient
from fleetd.engine.sampling.constraint import Constraint

# What may follow the name of a tool that is written on.
_NAME_GOES_ON = r"/[A-Za-z0-9_.:\/-]*[ \t\r\n]*/"
_FENCES = ("```", "~~~")


class AnswerForm(msgspec.Struct, frozen=True):
    """What an answer has to be."""

    #: Of its text; a schema in it has been checked.
    constraint: Constraint | None
    #: All tools that may be called.
    tools: Sequence[HeldTool]
    #: The answer is one or more calls, and no text.
    must_call: bool
    #: Several calls in one answer are allowed.
    parallel: bool
    #: "reasoning" if the prompt has opened a thought.
    begins: Channel
    #: The answer may open a thought itself.
    may_think: bool = True


def answer_grammar(form: AnswerForm, markers: Markers, spelling: Spelling) -> str:
    """The grammar of an answer, as llguidance reads it.

    Raises ValueError for what this model cannot write, and for a constraint's grammar that is none.
    """
    return _AnswerGrammar(form, markers, spelling).whole()


class _AnswerGrammar:
    def __init__(self, form: AnswerForm, markers: Markers, spelling: Spelling) -> None:
        self._form = form
        self._markers = markers
        self._rules = rules = LarkRules(spelling)
        self._format: CallFormat | None = markers.calls if form.tools else None
        if form.tools and markers.calls is None:
            raise ValueError("this model has no format for tool calls")
        # A text that is JSON and a call without a marker begin alike.
        whole = form.constraint is not None and self._format is not None and self._format.bare
        self._calls = CallGrammar(rules, self._format, form.tools, whole_json=whole) if self._format else None

    def whole(self) -> str:
        if self._markers.heads is not None:
            return self._rules.grammar(self._headed(self._markers.heads))
        content = self._content()
        if self._markers.think is None:
            return self._rules.grammar(content)
        opener, closer = self._markers.think
        thought = self._rules.until(self._thought(), closer)
        gap = self._gap()
        if self._form.begins == "reasoning":
            return self._rules.grammar(f"{thought} {gap} {content}")
        if not self._form.may_think:
            return self._rules.grammar(content)
        return self._rules.grammar(f"({self._rules.marker(opener)} {thought} {gap})? {content}")

    def _headed(self, heads: Heads) -> str:
        rules, writes = self._rules, heads.writes
        text = self._text()
        thought = f"{rules.marker(writes.thought)} {rules.until(text, writes.next)}"
        note = f"{rules.marker(writes.note)} {rules.until(text, writes.next)}"
        answer = f"{rules.marker(writes.answer)} {self._constrained() or text}"
        if self._calls is None:
            return f"({thought})* {answer}"
        calls = f"{rules.marker(writes.calls)} {self._calls.all(parallel=self._form.parallel)}"
        if self._form.must_call:
            return f"({thought})* {calls}"
        before = thought if self._form.constraint else choice([thought, note])
        return f"({before})* {choice([answer, calls])}"

    # ---- Content -----------------------------------------------------------------------------------------

    def _content(self) -> str:
        constrained = self._constrained()
        if self._calls is None:
            return self._with_dropped(constrained or self._text())
        calls = self._calls.all(parallel=self._form.parallel)
        if self._form.must_call:
            return self._with_dropped(calls)
        return self._with_dropped(choice([constrained, calls]) if constrained else self._free())

    def _free(self) -> str:
        """Text in which calls may stand."""
        calls, form, rules = self._calls, self._format, self._rules
        assert calls is not None  # noqa: S101  it is asked for if there are tools
        assert form is not None  # noqa: S101
        parallel, text = self._form.parallel, self._text()
        before = text if form.start else self._text(outside_code=True)
        dropped = f" ({self._dropped()})? " if self._dropped() else ""
        to_call = f"{before}{dropped}{rules.marker(calls.opener)}"
        if not dropped:
            to_call = rules.until(before, calls.opener)
        if not form.end:  # nothing but calls comes behind a call
            alone = f"{to_call} {calls.behind_opener(parallel=parallel)}"
            # A call without a marker, at the beginning of the answer.
            bare = [calls.all(parallel=parallel)] if form.bare else []
            return choice([alone, text, *bare])
        one = rules.rule(f"{to_call} {calls.section(parallel=parallel)}")
        return f"({one}){'*' if parallel else '?'} {text}"

    def _constrained(self) -> str:
        """Text that is held to the constraint; "" if there is none."""
        constraint = self._form.constraint
        if constraint is None:
            return ""
        match constraint.kind:
            case "json_object":
                return self._rules.json({"type": "object"})
            case "json_schema":
                schema = json.loads(constraint.text)
                known = lenient(schema) if constraint.lenient else enforceable(schema, constraint.where)
                return self._rules.json(json.loads(known))
            case "choice":
                texts = json.loads(constraint.text)
                if any(len(each) > limits.GRAMMAR_REPEATS for each in texts):
                    raise ValueError(f"a text to choose has more than {limits.GRAMMAR_REPEATS} characters")
                return choice(map(quoted, texts))
            case "regex":
                whole = json.loads(LLMatcher.grammar_from_regex(short(constraint.text, constraint.where)))
                return self._rules.nested(whole["grammars"][0]["lark_grammar"])
            case "grammar":
                return self._rules.nested(bounded(_lark(constraint.text), constraint.where))

    # ---- Texts -------------------------------------------------------------------------------------------

    def _thought(self) -> str:
        """The terminal of a thought: without its end, and without what would begin a call in it."""
        closer = self._markers.think[1] if self._markers.think else ""
        start = self._format.start if self._format else ""
        return self._rules.text([closer, start, *self._markers.dropped])

    def _text(self, *, outside_code: bool = False) -> str:
        """The terminal of free text.

        Args:
            outside_code: the text does not end inside of a block of code.
        """
        rules, form, heads = self._rules, self._format, self._markers.heads
        without = [*self._markers.dropped, *(heads.after if heads else ())]
        lines: list[str] = []
        if form is not None and (heads is None or form.begins):
            without += [form.start, *form.begins, form.end if form.closed else ""]
            if isinstance(form.arguments, ArgFormat):  # a name is a call if one of these follows it
                without += [form.end, form.arguments.writes.before.partition("{key}")[0]]
            lines = list(self._call_lines(form))
        also = [f"~({each} {ANY})" for each in self._thought_signs()]
        if outside_code:
            also.append(_closed_code(rules))
        return rules.text(without, lines=lines, also=also)

    def _thought_signs(self) -> Iterator[str]:
        """What a text does not begin with, or it would be read as a thought."""
        if self._markers.think is None:
            return
        opener, closer = self._markers.think
        yield f"/\\s*/ {quoted(opener)}"
        if self._form.begins == "reasoning":
            yield f"/[^<\\n]*/ {quoted(closer)}"

    def _call_lines(self, form: CallFormat) -> Iterator[str]:
        """What a line of text does not begin with, or it would be read as a call without its opener."""
        names = [tool.name for tool in self._form.tools]
        for line in form.lines:
            if line == "{":
                yield _json_head(names)
            elif line == "{name}":
                yield f'{_any_of(names)} {_NAME_GOES_ON} "{{"'
            else:
                yield _any_of(line.replace("{name}", name) for name in names)

    # ---- Markers -----------------------------------------------------------------------------------------

    def _gap(self) -> str:
        """Line ends between a thought and what follows it."""
        return self._rules.terminal(r"/\n{1,2}/") + "?"

    def _dropped(self) -> str:
        """Markers that say nothing; "" if there are none that are control tokens."""
        rules = self._rules
        found = [rules.marker(each) for each in self._markers.dropped]
        return choice(found) if found and all(each.startswith("<[") for each in found) else ""

    def _with_dropped(self, content: str) -> str:
        dropped = self._dropped()
        return f"({dropped})? ({content}) ({dropped}){{0,2}}" if dropped else f"({content})"


def _lark(text: str) -> str:
    """A client's grammar in Lark's notation. Raises ValueError for one that is in GBNF's and is none."""
    try:
        return str(any_to_lark(text))
    except Exception as error:  # the converter raises whatever it meets
        raise ValueError(f"a grammar that is neither Lark nor GBNF: {error}") from None


def _any_of(texts: Iterable[str]) -> str:
    return f"({' | '.join(map(quoted, texts))})"


def _json_head(names: Sequence[str]) -> str:
    """The beginning of a call that is JSON, up to its tool's name. Some models write its type or id first."""
    spelled = "|".join(re.sub(r"([^\w])", r"\\\1", name) for name in names)
    blanks = r"[ \t\r\n]*"
    first = rf'(?:"(?:type|id)"{blanks}:{blanks}"[^"\n]*"{blanks},{blanks})*'
    key = rf'"(?:name|function|tool|tool_name)"{blanks}:{blanks}'
    return rf'/\{{{blanks}{first}(?:{key}\{{{blanks})?{key}"(?i:{spelled})"/'


def _closed_code(rules: LarkRules) -> str:
    """The terminal of a text that does not end inside of a block of code."""
    line = "/[^\\n]*/"
    blocks = []
    for fence in _FENCES:
        inside = f"({line} & ~(/[ \\t]*{fence}/ {ANY}))"
        blocks.append(f"/[ \\t]*{fence}[^\\n]*\\n/ ({inside} /\\n/)* /[ \\t]*{fence}[^\\n]*/")
    plain = rules.terminal(f"{line} & ~(/[ \\t]*({'|'.join(_FENCES)})/ {ANY})")
    return rules.terminal(f"(({' | '.join([plain, *blocks])}) /\\n/)* {plain}")
