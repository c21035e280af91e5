"""The spot check: this machine computes a few of a helper's tokens too, and compares.

While the home worker waits for its helpers, it runs the first few tokens of each helper's slice
through the layers itself, on copies of what comes before them, and compares the keys, values and hidden
states with those that arrive. It finds a helper with other weights, another model or another
accelerator than it claims, and one that sends garbage.

Once all has arrived, it draws a few later tokens and does the same with these: no helper can know before
which they will be. A helper that is wrong about a share of its tokens is found at least in that share of
prompts, and more often where the drawn tokens attend to wrong ones. Where windows slide, these tokens are
drawn from the last ones of a helper, whose windows are still here: what its earlier tokens left in the layers
with a row per token shows in what the drawn ones made of it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar

import mlx.core as mx

from fleetd import limits
from fleetd.engine.layers.layer_calls import PassInputs
from fleetd.engine.layers.stage import Stage
from fleetd.engine.sequence_state import row_memory
from fleetd.engine.sequence_state.agreement import alike, same
from fleetd.engine.sequence_state.kinds import kind_of
from fleetd.engine.sequence_state.parts import assembled, parts
from fleetd.engine.shared_prefill import passes
from fleetd.errors import PeerWrong

# Keys and values (1, heads, count, width) of some tokens, for each cache of a layer; None where it has no row
# for each of them. Or the arrays of a running state.
Rows = list[tuple[mx.array, ...] | None]
_Drawn = TypeVar("_Drawn")
_FIRST = limits.SHARE_SPOT_TOKENS
WHAT_TO_SUSPECT = "Its model, its accelerator or its memory is not what it says."


class ReceivedRows(Protocol):
    """What has arrived for the probe of helper ``rank``; layers are counted from the model's first."""

    def owner(self, rank: int, layer: int) -> int:
        """The helper that computes the layer."""

    def context(self, rank: int, layer: int) -> list[Any] | None:
        """A layer's caches, to be added to, of what comes before the probe's tokens; None if they are not yet
        there."""

    def arrived(self, rank: int, layer: int) -> bool:
        """True if ``compare`` can be called for the layer."""

    def compared(self, rank: int, layer: int, count: int) -> Rows:
        """The rows of the probe's tokens, as they were sent."""

    def hidden(self, rank: int, layer: int, count: int) -> mx.array | None:
        """What was sent of them on the way into ``layer``, (1, count, width); None if nothing was."""


class HomeRows(Protocol):
    """The caches that a shared prefill fills: ``home_part``."""

    def owner(self, rank: int, layer: int) -> int:
        """The same as in ``ReceivedRows``."""

    def kept(self, rank: int, layer: int) -> list[Any]:
        """A layer's caches after the tokens of helper ``rank``, or after more where a token is a row."""

    def before(self, rank: int, layer: int, tokens: int) -> list[Any]:
        """The same of the first ``tokens``, to be added to."""

    def rows(self, caches: Sequence[Any], start: int, count: int) -> Rows:
        """Keys and values of these tokens."""


@dataclass
class Probe:
    """A few tokens of one helper's slice through the single layers ``parts``; ``hidden`` is (1, n, D)."""

    rank: int
    parts: Sequence[Stage]
    hidden: mx.array
    count: int
    inputs: PassInputs | None = None
    rows: list[Rows] = field(default_factory=list)
    # Layers that are compared.
    settled: int = 0

    @classmethod
    def of(cls, rank: int, parts: Sequence[Stage], prompt: mx.array, first: range) -> Self:
        tokens = prompt[:, first.start : first.stop]
        hidden, inputs = parts[0].embed(tokens), parts[0].inputs(tokens, first.start)
        return cls(rank, parts, hidden, len(first), inputs)

    def made(self, cache: Any) -> tuple[mx.array, ...] | None:
        """What is compared of one of a layer's caches; None for nothing."""
        return _newest(cache, self.count)

    @property
    def tokens(self) -> int:
        """Tokens that it computes, each layer on its own."""
        return self.count * len(self.parts)

    @property
    def computed(self) -> bool:
        return len(self.rows) == len(self.parts)

    @property
    def done(self) -> bool:
        return self.settled == len(self.parts)

    def step(self, caches: Sequence[Any]) -> None:
        """The next layer, after the tokens that its ``caches`` hold."""
        part = self.parts[len(self.rows)]
        cache = assembled(part.empty[0], caches)
        out = passes.run(part, self.hidden, [cache], self.inputs)
        rows = [self.made(one) for one in caches]
        mx.eval([x for x in rows if x is not None], [] if out is None else out)
        self.rows.append(rows)
        if out is not None:
            self.hidden = out


def _newest(cache: Any, count: int) -> tuple[mx.array, mx.array] | None:
    """Keys and values of the last ``count`` tokens; None for a running state."""
    if not kind_of(cache).attention:
        return None
    end = kind_of(cache).end(cache)
    return row_memory.copied(cache, end - count, end)


def drawn(tokens: range, count: int, draw: random.Random) -> range:
    """``count`` tokens in a row, or fewer if there are no more; not the first ones where there are others."""
    count = min(count, len(tokens))
    start = draw.randint(min(tokens.start + count, tokens.stop - count), tokens.stop - count)
    return range(start, start + count)


def one_of(found: Sequence[_Drawn], draw: random.Random) -> _Drawn:
    """One of several; where there is one, nothing is drawn."""
    return draw.choice(found) if len(found) > 1 else found[0]


class LaterRows:
    """``ReceivedRows`` of tokens that are all here, with all before them."""

    def __init__(self, work: HomeRows, tokens: range) -> None:
        self._work, self._tokens = work, tokens

    def owner(self, rank: int, layer: int) -> int:
        return self._work.owner(rank, layer)

    def context(self, rank: int, layer: int) -> list[Any]:
        return self._work.before(rank, layer, self._tokens.start)

    def arrived(self, rank: int, layer: int) -> bool:
        return True

    def compared(self, rank: int, layer: int, count: int) -> Rows:
        return self._work.rows(self._work.kept(rank, layer), self._tokens.start, count)

    def hidden(self, rank: int, layer: int, count: int) -> mx.array | None:
        return None


class SpotCheck:
    """All probes of one shared prefill. ``exact``: bytes must be equal, else rows must be alike."""

    def __init__(self, probes: Sequence[Probe], received: ReceivedRows, *, exact: bool) -> None:
        self._probes = probes
        self._received = received
        self._exact = exact

    @property
    def passed(self) -> bool:
        return all(probe.done for probe in self._probes)

    @property
    def ready(self) -> bool:
        """True if ``step`` has something to compute."""
        return self._next() is not None

    def _next(self) -> tuple[Probe, list[Any]] | None:
        for probe in self._probes:
            if not probe.computed:
                context = self._received.context(probe.rank, len(probe.rows))
                if context is not None:
                    return probe, context
        return None

    @property
    def tokens(self) -> int:
        """The sum of all ``Probe.tokens``."""
        return sum(probe.tokens for probe in self._probes)

    def step_layer(self) -> None:
        """Compute one layer of one probe, if its context is here."""
        if (found := self._next()) is not None:
            found[0].step(found[1])

    def step(self) -> None:
        """Compute what can be computed of one probe."""
        found = self._next()
        while found is not None:
            probe, context = found
            probe.step(context)
            found = self._next()
            if found is not None and found[0] is not probe:
                return

    def settle(self) -> None:
        """Compare what is there of both. Raises PeerWrong."""
        for probe in self._probes:
            while probe.settled < len(probe.rows) and self._received.arrived(probe.rank, probe.settled):
                self._compare(probe, probe.settled)
                probe.settled += 1

    def _compare(self, probe: Probe, layer: int) -> None:
        owner = self._received.owner(probe.rank, layer)
        theirs = self._received.compared(probe.rank, layer, probe.count)
        empty = parts(probe.parts[layer].empty[0])
        for cache, mine, sent in zip(empty, probe.rows[layer], theirs, strict=True):
            if mine is not None and sent is not None:
                kind = kind_of(cache)
                rows = kind.attention
                names = ("keys", "values") if rows else ("running states",) * len(mine)
                pairs = zip(names, kind.numbers(cache, mine), kind.numbers(cache, sent), strict=True)
                for name, ours, other in pairs:
                    self._check(ours, other, owner, f"{name} of layer {layer}")
                    if rows and probe.count > _FIRST:
                        # What was sent of earlier tokens shows in the first ones; later ones may forget it.
                        self._check(
                            ours[..., :_FIRST, :], other[..., :_FIRST, :], owner, f"{name} of layer {layer}"
                        )
        after = self._received.hidden(probe.rank, layer + 1, probe.count)
        if after is not None and probe.computed:
            # Each on its own: beside a large one nothing is seen of a small one.
            for ours, other in zip(*map(probe.parts[0].apart, (probe.hidden, after)), strict=True):
                self._check(ours, other, owner, f"hidden states before layer {layer + 1}")

    def _check(self, ours: mx.array, theirs: mx.array, owner: int, what: str) -> None:
        if not (same(ours, theirs) if self._exact else alike(ours, theirs)):
            raise PeerWrong(
                f"helper{owner}: it computes other {what} than this machine does.",
                hint=WHAT_TO_SUSPECT,
            )
