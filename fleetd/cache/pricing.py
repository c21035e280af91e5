"""What blocks are worth, and whether reading them beats computing them again. Pure."""

from __future__ import annotations

import msgspec

from fleetd import limits


class PrefillCost(msgspec.Struct, frozen=True):
    """Seconds that a model's prefill takes: for each token, and for each token of context before it."""

    token_s: float
    context_s: float = 0.0

    @classmethod
    def of(cls, tok_s: float, context_s: float) -> PrefillCost:
        """The cost by measured speeds; 0 tokens per second is not measured, and taken for slow."""
        return cls(1 / tok_s if tok_s > 0 else limits.CACHE_TOKEN_S, max(0.0, context_s))

    def seconds(self, first: int, last: int) -> float:
        """Seconds of prefill for tokens [first, last)."""
        return (last - first) * (self.token_s + self.context_s * (first + last) / 2)

    def check_s(self, last: int, n_bytes: int, *, states: bool) -> float:
        """Seconds to check what another machine sent of the first ``last`` tokens, ``n_bytes`` of rows."""
        tokens = min(last, checked_tokens(states=states))
        return self.seconds(last - tokens, last) + look_s(n_bytes)


def checked_tokens(*, states: bool) -> int:
    """The most tokens that are computed to check what another machine sent; ``states``: if the
    model keeps something that cannot be cut at a token."""
    return limits.FETCH_CHECK_BLOCKS * limits.CACHE_BLOCK_TOKENS if states else 2 * limits.FETCH_SPOT_TOKENS


def look_s(n_bytes: int) -> float:
    """What looking at every number takes that another machine sent."""
    return n_bytes / limits.FETCH_LOOK_BYTES_PER_S


def worth_per_gib(cost_s: float, n_bytes: int) -> float:
    """Seconds that a GiB of these blocks saves at its next use."""
    return cost_s / max(1, n_bytes) * limits.GIB


def restore_s(n_bytes: int, bytes_per_s: float) -> float:
    """How long reading so much takes, at a measured speed or, if it is 0, an assumed one."""
    return limits.CACHE_RESTORE_FIXED_S + n_bytes / (bytes_per_s or limits.CACHE_READ_BYTES_PER_S)
