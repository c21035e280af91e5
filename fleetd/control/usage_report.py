"""The body of GET /fleet/v1/usage: tokens and times per day or hour, model and machine. Times are seconds."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

Span = Literal["day", "hour"]
SPANS: tuple[Span, ...] = get_args(Span)


class UsageTotals(msgspec.Struct, frozen=True):
    """Sums over requests. Scoring a prompt for smart prefill is no request, and its time is not in
    ``prefill_s``."""

    requests: int = 0
    # Those of ``requests`` that ended in an error.
    failed: int = 0
    prompt_tokens: int = 0
    # Of these, tokens that were not computed again.
    cached_tokens: int = 0
    completion_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    # Tokens of prompts that the model scored for smart prefill.
    scored_tokens: int = 0
    # Requests of which a first token came, and the seconds that their clients waited for it in all.
    first_tokens: int = 0
    first_s: float = 0.0
    # As traces have it; below 0 if other ways than this machine alone took longer.
    saved_s: float = 0.0
    # Of ``saved_s``, what drafts and smart prefill saved; the rest is other machines' help.
    drafts_s: float = 0.0
    smart_s: float = 0.0
    # Requests whose prompt several machines read together.
    shared: int = 0


class UsageRow(UsageTotals, frozen=True):
    """One day or hour of one model on one node."""

    # By this machine's clock: "2026-01-31", or "2026-01-31 14:00" for an hour.
    day: str = ""
    model: str = ""
    node: str = ""


class FirstTokenTimes(msgspec.Struct, frozen=True):
    """Seconds to the first token over all requests of one day or hour: the median, and what 9 of 10 met."""

    day: str = ""
    p50_s: float = 0.0
    p90_s: float = 0.0


class UsageReport(msgspec.Struct, frozen=True):
    """Newest first."""

    rows: list[UsageRow] = []
    totals: UsageTotals = UsageTotals()
    first_token: list[FirstTokenTimes] = []
