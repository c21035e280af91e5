"""Random walks through the grammar of an answer, over single bytes and a family's control tokens."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from fleetd.engine.answer.answer_parts import CallBegun, CallEnded, CallText, Said
from fleetd.engine.answer.answer_reader import AnswerReader, Markers
from fleetd.engine.answer.call_formats import CALL_FORMATS
from fleetd.engine.answer.tool_formats import CHANNEL_HEADS
from fleetd.engine.grammar.answer_grammar import AnswerForm, answer_grammar
from fleetd.engine.grammar.call_grammars import HeldTool

THINK = ("<think>", "</think>")
DROPPED = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
# What a tokenizer of each family has as control tokens, besides what begins and ends a section.
_CONTROLS = {
    "mistral": ["[ARGS]"],
    "kimi_k2": ["<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"],
    "kimi_k3": ["<|open|>", "<|close|>", "<|sep|>"],
    "harmony": [f"<|{name}|>" for name in ("start", "end", "channel", "message", "constrain", "return")],
    "muse_spark": ["<|start|>", "<|message|>", "<|eom|>", "<|eot|>", "<atem:invoke name="],
    "gemma4": ['<|"|>'],
    "function_gemma": ["<escape>"],
    "minimax_m2": ["<invoke name="],
    "minicpm5": ["<function name=", "</function>"],
    "deepseek_v32": ["<\uff5cDSML\uff5cinvoke name="],
}
# Marks of a control token in a text: no text of a walk has this character.
MARK = "\0"


def markers_of(family: str) -> Markers:
    form = CALL_FORMATS[family]
    heads = {"harmony": CHANNEL_HEADS["head"], "muse_spark": CHANNEL_HEADS["header"]}.get(family)
    return Markers(None if heads else THINK, DROPPED if family == "kimi_k3" else (), form, heads)


def controls_of(family: str) -> list[str]:
    form = CALL_FORMATS[family]
    whole = [] if family in ("kimi_k3", "harmony") else [form.start, form.end]
    thoughts = [] if markers_of(family).heads else THINK
    found = [*whole, *thoughts, *_CONTROLS.get(family, []), *(["<|call|>"] if family == "harmony" else [])]
    return list(dict.fromkeys(filter(None, found)))


class ByteTable:
    """Tokens: the end, each byte, and control tokens."""

    END = 0

    def __init__(self, controls: Sequence[str] = ()) -> None:
        self.controls = {text: 257 + at for at, text in enumerate(controls)}
        self._split = re.compile(f"({'|'.join(map(re.escape, self.controls))})") if controls else None
        self.llg = LLTokenizer(TokenizerWrapper(_Tokens(list(controls))), n_vocab=257 + len(controls))

    def is_token(self, text: str) -> bool:
        return text in self.controls

    def lark(self, text: str) -> str:
        parts = self._split.split(text) if self._split else [text]
        return " ".join(
            f"<[{self.controls[p]}]>" if p in self.controls else json.dumps(p) for p in parts if p
        )

    def spelled(self, text: str) -> list[int]:
        return [byte + 1 for byte in text.encode()]

    def tokens(self, text: str) -> list[int]:
        """A text's tokens, with its control tokens as such."""
        parts = self._split.split(text) if self._split else [text]
        found = [[self.controls[p]] if p in self.controls else self.spelled(p) for p in parts]
        return [token for each in found for token in each]

    def text(self, tokens: Iterable[int], mark: str = "") -> str:
        names = {token: f"{mark}{text}{mark}".encode() for text, token in self.controls.items()}
        return b"".join(names[t] if t in names else bytes([t - 1]) for t in tokens).decode()


class _Tokens:
    bos_token_id = None
    eos_token_id = ByteTable.END

    def __init__(self, controls: list[str]) -> None:
        self.tokens = [b"<end>", *(bytes([byte]) for byte in range(256)), *(c.encode() for c in controls)]
        self.special_token_ids = [0, *range(257, 257 + len(controls))]

    def __call__(self, text: str) -> list[int]:
        return [byte + 1 for byte in text.encode()]


def matcher(table: ByteTable, form: AnswerForm, markers: Markers) -> LLMatcher:
    # A walk asks for many texts behind one mask, and all of them cost what one may.
    limits = LLParserLimits(step_lexer_fuel=100_000_000)
    made = LLMatcher(table.llg, answer_grammar(form, markers, table), log_level=0, limits=limits)
    assert not made.is_error(), made.get_error()
    return made


def accepts(made: LLMatcher, tokens: Sequence[int]) -> bool:
    """Whether an answer may be these tokens."""
    made.reset()
    return made.try_consume_tokens(list(tokens)) == len(tokens) and made.is_accepting()


class Walk:
    """One answer that a grammar allows: its tokens, and what is read of it."""

    def __init__(
        self,
        table: ByteTable,
        made: LLMatcher,
        openers: Sequence[str],
        pool: Sequence[str],
        closers: Sequence[str],
        seed: int,
    ) -> None:
        self.tokens: list[int] = []
        self._table = table
        self._made = made
        made.reset()
        rng = random.Random(seed)
        size, most = rng.choice([4, 12, 30, 60]), 4000
        for at in range(most):
            ends = made.is_accepting()
            if made.is_stopped() or (ends and (at > size or rng.random() < 0.05)):
                return
            words = [rng.choice(pool) for _ in range(12)]
            if at > size:
                words = [*rng.sample(closers, len(closers)), *words]
            elif rng.random() < 0.3:
                words = [rng.choice(openers), *words]
            # A closing tag that is spelled in a string of JSON is not told from one that closes.
            self._step(rng, [word for word in words if "<" not in word] if self._in_json() else words)
        raise AssertionError(f"no end: {bytes(t - 1 for t in self.tokens[-300:] if t < 257)!r}")

    def _in_json(self) -> bool:
        """Whether the walk is inside of a string of JSON."""
        # Nowhere else may a backslash come, but not any letter behind it.
        return bool(self._made.validate_tokens(self._table.spelled("\\x")) == 1)

    def _step(self, rng: random.Random, words: Sequence[str]) -> None:
        bits = self._made.compute_bitmask()
        forced = self._made.compute_ff_bytes()
        for word in [*([forced.decode(errors="ignore")] if forced else []), *words]:
            spellings = [self._table.tokens(word), self._table.spelled(word)]
            if rng.random() < 0.3:
                spellings.reverse()
            for tokens in spellings:
                if tokens and self._made.validate_tokens(tokens) == len(tokens):
                    self._take(tokens)
                    return
        allowed = [t for t in range(1, 257 + len(self._table.controls)) if bits[t // 8] >> (t % 8) & 1]
        safe = [t for t in allowed if (33 <= t < 128 and t != ord("<") + 1) or t >= 257]
        self._take([rng.choice(safe or allowed)])

    def _take(self, tokens: list[int]) -> None:
        assert self._made.consume_tokens(tokens), (
            self._made.get_error(),
            self._table.text(self.tokens),
            tokens,
        )
        self.tokens += tokens


class ReadAnswer:
    """What ``AnswerReader`` makes of a text."""

    def __init__(
        self,
        text: str,
        markers: Markers,
        tools: Sequence[HeldTool],
        begins: Any,
        step: int,
        *,
        either: bool = False,
    ) -> None:
        offered = [{"function": {"name": tool.name, "parameters": json.loads(tool.schema)}} for tool in tools]
        reader = AnswerReader(markers, offered, begins, either=either)
        parts = [p for at in range(0, len(text), step) for p in reader.feed(text[at : at + step])]
        parts += reader.end(cut=False)
        self.content = "".join(p.text for p in parts if isinstance(p, Said) and p.channel == "content")
        self.reasoning = "".join(p.text for p in parts if isinstance(p, Said) and p.channel == "reasoning")
        self.whole = all(p.whole for p in parts if isinstance(p, CallEnded))
        self.calls: list[tuple[str, str]] = []
        for part in parts:
            if isinstance(part, CallBegun):
                self.calls.append((part.name, ""))
            elif isinstance(part, CallText):
                name, told = self.calls[-1]
                self.calls[-1] = name, told + part.text
