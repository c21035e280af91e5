"""The body of the answer of POST /v1/compress: a prompt or messages with less in them, and what was kept."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from fleetd.control.smart_prefill_result import ScoredBy


class KeptSpan(msgspec.Struct, frozen=True):
    """What is kept of one message (of a prompt: index 0): character ranges [start, end) of its text.

    The text is counted without the marks of what is to be kept; content in parts is their texts, joined.
    """

    index: int = 0
    spans: list[tuple[int, int]] = []


class CompressUsage(msgspec.Struct, frozen=True):
    """Tokens, counted by the compressor; ``compressed_tokens`` includes the lines that mark gaps.

    ``total_tokens``: read by the compressor for this answer; 0 if the scores were known already.
    """

    original_tokens: int = 0
    compressed_tokens: int = 0
    total_tokens: int = 0


class CompressTimings(msgspec.Struct, frozen=True):
    score_ms: float = 0.0
    select_ms: float = 0.0


class Compression(msgspec.Struct, frozen=True, kw_only=True):
    """``prompt`` or ``messages``, whichever was sent; whole where ``declined`` says why.

    ``scored``: by what the text was scored; "" if nothing was.
    """

    id: str = ""
    object: Literal["compression"] = "compression"
    created: int = 0
    model: str = ""
    prompt: str | UnsetType = UNSET
    messages: list[dict[str, Any]] | UnsetType = UNSET
    kept: list[KeptSpan] = []
    declined: str = ""
    scored: ScoredBy = ""
    nodes: list[str] = []
    usage: CompressUsage = CompressUsage()
    timings: CompressTimings = CompressTimings()
