"""Whether two models mean the same by a token id, which is all that a drafter and a verifier must share."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

_ENTRY = struct.Struct("<iI")


def vocabulary_of(tokenizer: Any) -> str:
    """A short hash of every id and its text, special tokens included."""
    state = hashlib.sha256()
    for text, number in sorted(tokenizer.get_vocab().items(), key=lambda entry: (entry[1], entry[0])):
        data = text.encode(errors="surrogatepass")
        state.update(_ENTRY.pack(number, len(data)) + data)
    return state.hexdigest()[:32]
