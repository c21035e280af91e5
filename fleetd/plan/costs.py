"""How long prefill takes a machine, and how long bytes take a link.

A chunk of n tokens behind t others, over a share x of the layers:

    x · (fixed + n · token + context · n · (t + n/2))

The last term is attention: every token attends to all before it, on average to half of its own chunk. Its sum
over several chunks equals that of one chunk, so only ``fixed`` depends on how a prompt is cut.
(Arithmetic bounds prefill and grows with n, attention with n·t: KV-Runahead, arXiv 2405.05329, section 3.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from fleetd.control.model_facts import MeasuredSpeed, ModelShape
from fleetd.plan import chip_speeds

# The chunk that a measured ``prefill_tok_s`` belongs to: calibration's largest.
MEASURED_TOKENS = 256
# Fixed costs and attention take at most this share of a measured chunk, whatever a card claims.
_EXPLAINED = 0.75
# Prices stay finite whatever speed a card claims.
SLOWEST_TOK_S = 1e-3
# By how much one machine's speed against another's is usually misjudged, either way.
MISJUDGED = 0.1


class PrefillSpeed(msgspec.Struct, frozen=True):
    """Seconds over all layers: per chunk, per token, and per pair of a token and one before it."""

    token_s: float
    context_s: float = 0.0
    fixed_s: float = 0.0

    @classmethod
    def measured(cls, prefill_tok_s: float, context_s: float = 0.0, fixed_s: float = 0.0) -> PrefillSpeed:
        """The speed by calibration: the rate on an empty context, and two parts of it measured apart."""
        chunk_s = MEASURED_TOKENS / max(SLOWEST_TOK_S, prefill_tok_s)
        fixed_s = min(max(0.0, fixed_s), _EXPLAINED * chunk_s)
        known_s = fixed_s + max(0.0, context_s) * MEASURED_TOKENS**2 / 2
        token_s = (chunk_s - min(known_s, _EXPLAINED * chunk_s)) / MEASURED_TOKENS
        return cls(token_s, max(0.0, context_s), fixed_s)

    @classmethod
    def of(cls, speed: MeasuredSpeed) -> PrefillSpeed:
        """The speed that a machine has told."""
        return cls.measured(speed.prefill_tok_s, speed.prefill_context_s, speed.prefill_fixed_s)

    def times(self, factor: float) -> PrefillSpeed:
        """The same machine, ``factor`` times slower."""
        return PrefillSpeed(self.token_s * factor, self.context_s * factor, self.fixed_s * factor)

    def seconds(self, share: float, start: int, count: int) -> float:
        """Time for one chunk: ``count`` tokens behind ``start`` others, over a share of the layers."""
        if count <= 0:
            return 0.0
        return share * (self.fixed_s + self._work_s(start, count))

    def total(self, share: float, tokens: range, chunk: int) -> float:
        """Time for all of ``tokens`` in chunks of one size, one after another."""
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


def cautious(speeds: Sequence[PrefillSpeed], tokens: range, chunk: int) -> list[PrefillSpeed]:
    """The speeds that make cuts between machines last: each is moved away from the mean of all.

    A wrong speed costs more on one side. Work that a slow machine should not have had delays everything by
    all of the difference, work that a fast one has too much of by a small part. Of two machines, let the slow
    one have the share x of the work. If its speed is overestimated by e, the end is late by e, and if it is
    underestimated, by e · x / (1 - x), since that work is then the other's. For errors that are spread evenly
    the mean delay is least if the speed is taken too low, by 1 - 2x of their bound.
    """
    rates = [1 / speed.total(1.0, tokens, chunk) for speed in speeds]
    mean = sum(rates) / len(rates)
    return [
        speed.times(1 + MISJUDGED * (mean - rate) / sum(rates))
        for speed, rate in zip(speeds, rates, strict=True)
    ]


def modelled(chip: chip_speeds.Hardware, shape: ModelShape) -> PrefillSpeed:
    """The speed of a machine that never ran the model, from its chip's published figures."""
    context_s = chip.prefill_context_s(shape.layers, shape.hidden_width)
    return PrefillSpeed.measured(chip.prefill_tok_s(shape.weights_bytes), context_s)


class LinkSpeed(msgspec.Struct, frozen=True):
    """The link between two machines, by the rate that it sustains; 0 counts as 1 byte per second."""

    bytes_per_s: float
    rtt_s: float = 0.0

    def seconds(self, n_bytes: float) -> float:
        """How long the bytes occupy the link."""
        return n_bytes / max(1.0, self.bytes_per_s)

    @property
    def one_way_s(self) -> float:
        return self.rtt_s / 2

    def and_(self, other: LinkSpeed) -> LinkSpeed:
        """The link between the far ends of two links: not measured, so the worse of both figures."""
        return LinkSpeed(min(self.bytes_per_s, other.bytes_per_s), max(self.rtt_s, other.rtt_s))
