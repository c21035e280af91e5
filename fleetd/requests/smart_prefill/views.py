"""What smart prefill made of one prompt, as everybody is told: headers, bodies, traces."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

# "" where the prompt is read whole.
Form = Literal["", "text", "sparse"]
# Why a prompt is read whole although smart prefill was asked for; an error's code stands for itself.
Code = Literal[
    "",
    "token_prompt",
    "echo",
    "short",
    "cached",
    "no_compressor",
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


class SmartPrefillResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """``form`` "" says that the prompt is read whole: then ``code`` and ``reason`` say why.

    Tokens are counted by the compressor; a sparse prompt's by the engine, once it has them. ``nodes``: the
    machines that scored, "this" is the one asked. ``score_s``: from the request to the selection.
    ``scored_tokens``: what compressors read, with what is put around segments.
    """

    form: Form = ""
    compressor: str = ""
    nodes: tuple[str, ...] = ()
    original_tokens: int = 0
    compressed_tokens: int = 0
    scored_tokens: int = 0
    score_s: float = 0.0
    code: str = ""
    reason: str = ""

    @property
    def used(self) -> bool:
        return bool(self.form)

    @property
    def dropped_tokens(self) -> int:
        return max(0, self.original_tokens - self.compressed_tokens) if self.used else 0

    @property
    def skipped(self) -> str:
        """One line for a header; "" where something was dropped."""
        return "" if self.used else f"{self.code}: {self.reason}"
