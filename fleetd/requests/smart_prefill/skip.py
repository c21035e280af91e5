"""Why a prompt is read whole although smart prefill was asked for."""

from __future__ import annotations

from typing import Literal, get_args

# Beside these, an error's own code may be the reason.
Code = Literal[
    "",
    "token_prompt",
    "echo",
    "images",
    "short",
    "cached",
    "no_compressor",
    "measuring",
    "out_of_memory",
    "slower",
    "margin",
    "declined",
    "empty",
    "no_form",
    "timeout",
    "failed",
]
SKIPS = frozenset(get_args(Code)) - {""}


class SkipCompression(Exception):
    """The prompt is read whole; ``code`` is a ``Code``."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
