"""Makes what holds answers of one model to their form: the token table once, a matcher for each answer."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from fleetd.engine.answer.answer_reader import Markers
from fleetd.engine.answer.tool_formats import markers
from fleetd.engine.grammar.answer_grammar import AnswerForm, answer_grammar
from fleetd.engine.grammar.call_grammars import HeldTool
from fleetd.engine.grammar.client_grammars import bounded
from fleetd.engine.grammar.compiling import validated
from fleetd.engine.grammar.matcher import AnswerMatcher
from fleetd.engine.grammar.schemas import enforceable, lenient
from fleetd.engine.grammar.token_table import TokenTable
from fleetd.errors import InvalidValue


def held_tool(function: Mapping[str, Any], strict: Mapping[str, str]) -> HeldTool:
    """A tool whose calls are held to a form: to the whole of its schema if it is strict, else to as much of
    it as a grammar can enforce.

    Args:
        function: with its name and its parameters, as templates know it.
        strict: by name, the strict tools (``ChatPrompt.strict_tools``).
    """
    name, parameters = function["name"], function.get("parameters") or {"type": "object"}
    if name in strict:
        where = f"tools: {name}"
        return HeldTool(name, enforceable(parameters, where), bounded(strict[name], where))
    return HeldTool(name, lenient(parameters))


class Grammars:
    """Any thread may use it but the one that computes: a table takes some tenths of a second, a schema may
    take one.

    Args:
        vocab_size: tokens that the model has logits for.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()

    def matcher(self, form: AnswerForm, *, chat: bool) -> AnswerMatcher:
        """A matcher at the beginning of an answer of this form.

        Args:
            chat: the answer has a model's markers in it, and is not plain text.

        Raises:
            InvalidValue, UnsupportedParameter: a form that cannot be held, or only at too high a cost.
            EngineError: no answer of this model can be held to any.
        """
        with self._lock:
            table = self.table
        where = "tools" if form.constraint is None else form.constraint.where
        written = [] if form.constraint is None else [form.constraint.text]
        for text in (*written, *(tool.schema for tool in form.tools)):
            if missing := table.unspelled(text):
                raise InvalidValue(f"{where}: this model has no tokens that spell {missing!r}.", param=where)
        try:
            lark = answer_grammar(form, markers(self._tokenizer) if chat else Markers(), table)
        except ValueError as error:
            raise InvalidValue(f"{where}: {error}.", param=where) from error
        return AnswerMatcher(validated(lark, table.llg, where), len(table))

    @cached_property
    def table(self) -> TokenTable:
        """The model's tokens. Made when it is first asked for."""
        return TokenTable(self._tokenizer, self._vocab_size, markers(self._tokenizer).texts)
