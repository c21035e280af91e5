"""Where each token of an echoed prompt is in its text."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import pytest

from fleetd.engine.answer.logprobs import Logprobs, PromptLogprobs
from fleetd.engine.answer.token_bytes import _byte_table

LETTERS = {byte: letter for letter, byte in _byte_table().items()}


def tokenizer(pieces: list[bytes]) -> SimpleNamespace:
    """A byte-level one, whose tokens are these bytes."""
    words = ["".join(LETTERS[byte] for byte in piece) for piece in pieces]
    return SimpleNamespace(
        convert_ids_to_tokens=words.__getitem__, detokenizer=SimpleNamespace(_decode_bytes=bytes)
    )


@pytest.mark.parametrize(
    ("pieces", "offsets"),
    [
        ([b"\xe6", b"\x97", b"\xa5", b"\xe6\x9c", b"\xac", b"!"], [0, 0, 0, 1, 1, 2]),
        (["日本".encode(), b" a"], [0, 2]),
        ([b"a\xe6", b"\x97\xa5b", "😀".encode()[:2], "😀".encode()[2:], b"c"], [0, 1, 3, 3, 4]),
        ([b"\xff", b"a"], [0, 1]),
    ],
)
def test_a_token_is_where_its_character_begins(pieces: list[bytes], offsets: list[int]) -> None:
    made = PromptLogprobs(Logprobs(tokenizer(pieces), 0), list(range(len(pieces))))
    made.add(mx.zeros((len(pieces) - 1, len(pieces))))
    assert [entry.text_offset for entry in made.entries] == offsets
    text = b"".join(pieces).decode("utf-8", "replace")
    whole = [entry for entry in made.entries if "\ufffd" not in entry.token]
    assert all(text[entry.text_offset :].startswith(entry.token) for entry in whole)
