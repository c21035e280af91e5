"""What msgspec raises for bytes that are no message: malformed ones, deep nesting, invalid UTF-8."""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
