"""The body of GET /fleet/v1/usage: tokens and times per day, model and machine. Times are seconds."""

from __future__ import annotations

import msgspec


class UsageTotals(msgspec.Struct, frozen=True):
    """Sums over requests; ``failed`` counts those among ``requests`` that ended in an error.

    ``scored_tokens``: tokens of prompts that the model scored for smart prefill. Scoring a prompt is no
    request, and its time is not in ``prefill_s``.
    ``first_tokens``: requests of which a first token came, after ``first_s`` of waiting in all.
    ``saved_s``: as traces have it; below 0 if other ways than this machine alone took longer.
    """

    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    scored_tokens: int = 0
    first_tokens: int = 0
    first_s: float = 0.0
    saved_s: float = 0.0


class UsageRow(UsageTotals, frozen=True):
    """One day of one model on one node."""

    day: str = ""
    model: str = ""
    node: str = ""


class UsageReport(msgspec.Struct, frozen=True):
    rows: list[UsageRow] = []
    totals: UsageTotals = UsageTotals()
