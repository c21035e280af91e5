"""The bytes that one token stands for."""

from __future__ import annotations

import codecs
import re
from typing import Any

_SPM_SPACE = "\u2581".encode()
# A byte that no other token of SentencePiece has.
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """The raw bytes of one token; several tokens may make one code point."""
    text = tokenizer.convert_ids_to_tokens(int(token))
    if text is None:
        return b""
    detokenizer = tokenizer.detokenizer
    decode = getattr(detokenizer, "_decode_bytes", None)
    if decode is not None:  # byte-level BPE: every character of the token stands for one byte
        return _byte_level(text)
    known = getattr(detokenizer, "tokenmap", None)
    if isinstance(known, list) and int(token) < len(known) and isinstance(known[int(token)], bytes):
        return bytes(known[int(token)]).replace(_SPM_SPACE, b" ")
    if _BYTE.fullmatch(text):
        return bytes([int(text[3:5], 16)])
    decoded: str = tokenizer.decode([int(token)])
    return decoded.encode()


def all_token_bytes(tokenizer: Any, count: int) -> list[bytes]:
    """The bytes of each id below ``count``, with the space that a token of SentencePiece begins with; b"" for
    an id that is no token."""
    texts = tokenizer.convert_ids_to_tokens(list(range(count)))
    added = {int(number): token for number, token in tokenizer.added_tokens_decoder.items()}
    byte_level = _is_byte_level(tokenizer)
    found = []
    for number, text in enumerate(texts):
        if number in added:
            raw = str(added[number]).encode()
            # Runs of spaces are added tokens of some.
            plain = not byte_level and not getattr(added[number], "special", True)
            found.append(raw.replace(_SPM_SPACE, b" ") if plain else raw)
        elif not text:
            found.append(b"")
        elif isinstance(text, bytes):
            found.append(text)
        elif byte_level:
            found.append(_byte_level(text))
        elif _BYTE.fullmatch(text):
            found.append(bytes([int(text[3:5], 16)]))
        else:
            found.append(text.encode().replace(_SPM_SPACE, b" "))
    return found


def _is_byte_level(tokenizer: Any) -> bool:
    """True if each character of a token's text stands for a byte, as GPT-2 has it."""
    inner = tokenizer._tokenizer
    decoder = getattr(getattr(inner, "backend_tokenizer", None), "decoder", None)
    return (
        getattr(tokenizer.detokenizer, "_decode_bytes", None) is not None
        or "ByteLevel" in str(decoder)
        # A publisher's own class around tiktoken.
        or hasattr(inner, "byte_encoder")
    )


def shown_length(detokenizer: Any) -> int:
    """Characters that the tokens of a detokenizer make up, those that it holds back included; one that is not
    whole is none."""
    held = getattr(detokenizer, "_unflushed", b"")
    if isinstance(held, str):
        held = _byte_level(held)
    return len(detokenizer.text) + len(begun_text(held.replace(_SPM_SPACE, b" ")))


def begun_text(raw: bytes) -> str:
    """The characters of a text's bytes, but for one at the end that is not whole."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(raw)


def _byte_level(text: str) -> bytes:
    """GPT-2's printable alphabet back to bytes; characters outside it (special tokens) are plain UTF-8."""
    table = _byte_table()
    out = bytearray()
    for char in text:
        byte = table.get(char)
        if byte is None:
            out += char.encode()
        else:
            out.append(byte)
    return bytes(out)


_TABLE: dict[str, int] = {}


def _byte_table() -> dict[str, int]:
    if not _TABLE:
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        hidden = [b for b in range(256) if b not in printable]
        _TABLE.update({chr(b): b for b in printable})
        _TABLE.update({chr(256 + i): b for i, b in enumerate(hidden)})
    return _TABLE
