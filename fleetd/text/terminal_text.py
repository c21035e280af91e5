"""Text from models and other machines, made safe to show on a terminal. Pure."""

from __future__ import annotations

import json
import re
from typing import Any

# C0 but tab and newline, DEL and C1: escape sequences would retitle the window, rewrite the screen or answer
# to the shell. Then the categories Cf, Zl and Zp: they change the direction of what follows, break lines or
# show nothing, so that a name or a command looks like another. A scan of all Unicode would take 0.1 s.
_UNSAFE = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\xad\\u0600-\\u0605\\u061c\\u06dd\\u070f\\u0890\\u0891\\u08e2\\u180e"
    "\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb\\U000110bd\\U000110cd"
    "\\U00013430-\\U0001343f\\U0001bca0-\\U0001bca3\\U0001d173-\\U0001d17a\\U000e0001\\U000e0020-\\U000e007f]"
)


def printable(text: str) -> str:
    """The text with unsafe characters escaped as in Python's strings, and without carriage returns."""
    return _UNSAFE.sub(_escaped, text.replace("\r", ""))


def json_text(value: Any, indent: int | None = None) -> str:
    """The value as JSON: letters of all alphabets as they are, unsafe characters escaped."""
    return _UNSAFE.sub(_escaped_in_json, json.dumps(value, indent=indent, ensure_ascii=False))


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _escaped_in_json(found: re.Match[str]) -> str:
    # In pairs of surrogates above U+FFFF.
    return json.dumps(found[0])[1:-1] if ord(found[0]) > 0x7F else f"\\u{ord(found[0]):04x}"
