"""A tokenizer's tokens as llguidance knows them: the bytes of each, and which are control tokens.

Control tokens are outside of all text: a grammar names them one by one, so no answer that is held to one
has a control token inside a string. Markers of thoughts and of calls count as such, whatever the tokenizer
calls them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from functools import cached_property
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper

from fleetd.engine.answer.token_bytes import all_token_bytes
from fleetd.errors import EngineError

# What stands before a text whose tokens are asked for, where a tokenizer would put a space before it.
_BEFORE = "\n"
# A text whose tokens must have its bytes.
_PROBE = '{"a": "b c", "d": [1, 2]}'


class TokenTable:
    """The table of one model, made once: it takes some tenths of a second.

    Args:
        tokenizer: of mlx-lm.
        vocab_size: tokens that the model has logits for.
        markers: tokens that stand in these texts are control tokens, if they were added to the vocabulary.

    Raises:
        EngineError: no answer of this model can be held to a grammar.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, markers: Collection[str]) -> None:
        added = {int(number): token for number, token in tokenizer.added_tokens_decoder.items()}
        # Ids that the vocabulary has no text for have no bytes, and no mask allows them.
        known = max(tokenizer.get_vocab().values(), default=0)
        self._bytes = all_token_bytes(tokenizer, min(max([known, *added]) + 1, vocab_size))
        self._tokenizer = tokenizer
        self._controls = {
            str(token): number
            for number, token in added.items()
            if number < len(self._bytes) and (getattr(token, "special", True) or _in(markers, str(token)))
        }
        texts = sorted(self._controls, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, texts))})") if texts else None
        ends = sorted(int(end) for end in tokenizer.eos_token_ids if int(end) < len(self._bytes))
        if not ends:
            raise EngineError("This model has no token that ends an answer, so none can be held to a form.")
        if not self._encode(_PROBE):
            raise EngineError(
                "What the tokens of this model spell is not known, so no answer can be held to a form."
            )
        self.llg = LLTokenizer(
            TokenizerWrapper(_Tokens(self._bytes, ends, sorted(self._controls.values()), self._encode)),
            n_vocab=len(self._bytes),
            eos_token=ends,
        )

    def __len__(self) -> int:
        """Tokens that masks tell of, from id 0 on."""
        return len(self._bytes)

    def is_token(self, marker: str) -> bool:
        """True if a marker is one control token."""
        return marker in self._controls

    def unspelled(self, text: str) -> str:
        """The first character of a text that no tokens spell; "" if they spell all of it."""
        known = self._spelled
        for char in dict.fromkeys(text):
            raw = char.encode()
            if raw not in known and not known.issuperset(raw[at : at + 1] for at in range(len(raw))):
                return char
        return ""

    @cached_property
    def _spelled(self) -> frozenset[bytes]:
        controls = frozenset(self._controls.values())
        return frozenset(raw for number, raw in enumerate(self._bytes) if number not in controls)

    def lark(self, marker: str) -> str:
        """A marker in Lark's notation: control tokens by their ids, the text between them in quotes."""
        return " ".join(self._parts(marker)) or '""'

    def _parts(self, marker: str) -> Iterator[str]:
        for part in self._split.split(marker) if self._split is not None else [marker]:
            if part in self._controls:
                yield f"<[{self._controls[part]}]>"
            elif part:
                yield json.dumps(part)

    def _encode(self, text: str) -> list[int]:
        """The tokens that the tokenizer has for a text in the middle of another one."""
        wanted = text.encode()
        for before in ("", _BEFORE):
            tokens = list(self._tokenizer.encode(before + text, add_special_tokens=False))
            told = b""
            for at, token in enumerate(tokens):
                if told.removeprefix(b" ") == before.encode():
                    rest = [int(each) for each in tokens[at:]]
                    if b"".join(self._of(each) for each in rest) == wanted:
                        return rest
                told += self._of(token)
        # No guess at the tokens that come: nothing is drafted of them.
        return []

    def _of(self, token: int) -> bytes:
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""


def _in(markers: Collection[str], token: str) -> bool:
    """True if a token is a marker, or a part of one and no word."""
    return token in markers or (not token.isalnum() and any(token in each for each in markers))


class _Tokens:
    """What ``TokenizerWrapper`` reads."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], ends: list[int], special: list[int], encode: Any) -> None:
        self.tokens = tokens
        self.eos_token_id = ends[0]
        self.special_token_ids = special
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("texts are given as str")
        try:
            found: list[int] = self._encode(text)
        except Exception:
            # Publishers' code. What the text's tokens are is wanted for drafts only.
            return []
        return found
