"""What prefill costs a machine, and what bytes cost a link.

A chunk of n tokens behind t others, over a share x of the layers:

    x · (fixed + n · token + context · n · (t + n/2))

The last term is attention: every token looks at all before it, the chunk's own on average at half of them.
Over several chunks it adds up to the same as in one, so only ``fixed`` depends on how a prompt is cut.
(Arithmetic bounds prefill and grows with n, attention with n·t: KV-Runahead, arXiv 2405.05329, section 3.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fleetd.plan import chip_speeds

# The chunk that a measured ``prefill_tok_s`` belongs to: calibration's largest.
MEASURED_TOKENS = 256
# Fixed costs and attention explain at most this share of a measured chunk, whatever a card claims.
_EXPLAINED = 0.75
# Whatever a card claims, prices stay finite.
SLOWEST_TOK_S = 1e-3


@dataclass(frozen=True, slots=True)
class PrefillSpeed:
    """Seconds over all layers: per chunk, per token, and per token and token before it."""

    token_s: float
    context_s: float = 0.0
    fixed_s: float = 0.0

    @classmethod
    def measured(cls, prefill_tok_s: float, context_s: float = 0.0, fixed_s: float = 0.0) -> PrefillSpeed:
        """From what calibration tells: a rate on an empty context and its two parts that are known apart."""
        chunk_s = MEASURED_TOKENS / max(SLOWEST_TOK_S, prefill_tok_s)
        fixed_s = min(max(0.0, fixed_s), _EXPLAINED * chunk_s)
        known_s = fixed_s + max(0.0, context_s) * MEASURED_TOKENS**2 / 2
        token_s = (chunk_s - min(known_s, _EXPLAINED * chunk_s)) / MEASURED_TOKENS
        return cls(token_s, max(0.0, context_s), fixed_s)

    def times(self, factor: float) -> PrefillSpeed:
        """The same machine, ``factor`` times slower."""
        return PrefillSpeed(self.token_s * factor, self.context_s * factor, self.fixed_s * factor)

    def seconds(self, share: float, start: int, count: int) -> float:
        """One chunk: ``count`` tokens behind ``start`` others, over a share of the layers."""
        if count <= 0:
            return 0.0
        return share * (self.fixed_s + self._work_s(start, count))

    def total(self, share: float, tokens: range, chunk: int) -> float:
        """All of ``tokens`` in chunks of one size, one after another."""
        count = len(tokens)
        return share * (math.ceil(count / chunk) * self.fixed_s + self._work_s(tokens.start, count))

    def fitting(self, start: float, seconds: float, chunk: int) -> float:
        """How many tokens behind ``start`` others take ``seconds`` over all layers; the inverse of total."""
        per_token_s = self.token_s + self.fixed_s / chunk + self.context_s * start
        if self.context_s <= 0:
            return seconds / per_token_s
        # The positive root of context/2 · n² + per_token · n = seconds, in the form that cancels nothing.
        return 2 * seconds / (per_token_s + math.sqrt(per_token_s**2 + 2 * self.context_s * seconds))

    def _work_s(self, start: int, count: int) -> float:
        return count * (self.token_s + self.context_s * (start + count / 2))


def modelled(chip: chip_speeds.Hardware, weights_bytes: int, layers: int, hidden_bytes: int) -> PrefillSpeed:
    """What a machine should do that never ran the model, from its maker's figures."""
    context_s = chip.prefill_context_s(layers, hidden_bytes)
    return PrefillSpeed.measured(chip.prefill_tok_s(weights_bytes), context_s)


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """The way between two machines, as it may be relied on. One that carries nothing is a very slow one."""

    bytes_per_s: float
    rtt_s: float = 0.0

    def seconds(self, n_bytes: float) -> float:
        """How long bytes occupy it."""
        return n_bytes / max(1.0, self.bytes_per_s)

    @property
    def one_way_s(self) -> float:
        return self.rtt_s / 2

    def and_(self, other: LinkSpeed) -> LinkSpeed:
        """Between the far ends of two links: nobody measured it, so the worse of both."""
        return LinkSpeed(min(self.bytes_per_s, other.bytes_per_s), max(self.rtt_s, other.rtt_s))
