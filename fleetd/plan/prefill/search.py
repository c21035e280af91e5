"""Where to cut a prompt between machines in a given order: the cuts and the chunk size that end first.

Balanced machines finish together. The longer they may take, the more each of them can do, so bisection finds
the time in which they do everything. The exact schedule prices these cuts in chunks of a few sizes, and each
cut of the best ones moves by a layer, or by a chunk, while that helps. The search is by cautious speeds; the
known ones price what it finds.
"""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from fleetd.plan.costs import MEASURED_TOKENS, cautious
from fleetd.plan.prefill.options import HelperSpec
from fleetd.plan.prefill.schedule import Chain, PrefillSize, Timeline
from fleetd.plan.prefill.split import Part, SplitKind, cut_bounds

# Chunk sizes to try. Larger ones than the measured size do not always cost less per token.
CHUNKS = (MEASURED_TOKENS // 2, MEASURED_TOKENS)
# A chain of several helpers takes all layers only if home would get no more than this.
_HARDLY = 2
# A prompt of at least this many chunks is cut between chunks of those sizes: a part of one hardly matters.
_MANY = 64
# The chunks of other prompts are fitted to a cut in steps of these shares of their size.
_FINER = (24, 120)
# At most this many of the balanced cuts are improved, if their prices are within this factor.
_FIRST, _CLOSE = 2, 1.02
# The bisection tells this many times apart, up to that in which the last machine does everything.
_TIMES = 1 << 10
# How long a machine should compute one chunk, unless a chunk takes longer alone: meanwhile its other requests
# wait for their turns.
STEP_S, BUSY_STEP_S = 1.0, 0.25

# A chunk size, then where each part but the last ends: after so many layers, or chunks.
_Ends = tuple[int, ...]


class Found(msgspec.Struct, frozen=True):
    cuts: tuple[int, ...]
    chunk: int
    timeline: Timeline


class Search:
    """The search for one prompt and one chain of helpers."""

    def __init__(self, prompt: PrefillSize, helpers: Sequence[HelperSpec], home: HelperSpec) -> None:
        self._prompt, self._helpers, self._home = prompt, helpers, home
        known = [machine.speed for machine in (*helpers, home)]
        *speeds, home_speed = self._speeds = cautious(known, prompt.new, prompt.chunk)
        slower = [replace(one, speed=speed) for one, speed in zip(helpers, speeds, strict=True)]
        # Which cuts are better, and what the best ones are expected to take.
        self._chain, self._known = Chain(prompt, slower, home_speed), Chain(prompt, helpers, home.speed)
        # Alone, a busy machine uses smaller chunks to let its other requests have their turns. Shared with
        # helpers, the fixed cost of each chunk would outweigh that.
        sizes = [prompt.chunk] if prompt.exact_chunks else sorted({*CHUNKS, max(prompt.chunk, CHUNKS[0])})
        self._sizes = [size for size in sizes if size <= len(prompt.new)] or sizes[:1]
        self._usual = self._sizes[len(self._sizes) // 2]

    def found(self) -> list[tuple[SplitKind, Found]]:
        """The best cuts of each kind, and the best with which home computes nothing."""
        tokens, layers, whole = self._tokens(), self._layers(whole=False), None
        if layers is None or len(self._helpers) == 1 or layers.cuts[-1] - layers.cuts[-2] <= _HARDLY:
            whole = self._layers(whole=True)
        kinds: tuple[SplitKind, ...] = ("tokens", "layers", "layers")
        best = zip(kinds, (tokens, layers, whole), strict=True)
        return [(kind, found) for kind, found in best if found is not None]

    def _layers(self, *, whole: bool) -> Found | None:
        """The best pipeline of chunks by layers; ``whole``: home computes nothing. None without room."""
        prompt, layers = self._prompt, self._prompt.shape.layers
        bounds = cut_bounds(layers, [helper.held for helper in self._helpers], whole=whole)
        if bounds is None:
            return None
        rooms = [self._layers_room(helper) for helper in self._helpers]
        all_s = [speed.total(1.0, prompt.new, self._usual) for speed in self._speeds]
        row_bytes = prompt.sent_bytes * len(prompt.new) + prompt.whole_bytes
        sent_s = [helper.link.seconds(row_bytes) for helper in self._helpers]
        each_s = [max(pair) / layers for pair in itertools.zip_longest(all_s, sent_s, fillvalue=0.0)]
        moved = bounds[:-1] if whole else bounds

        def reach(i: int, at: float, seconds: float) -> float:
            to = at + seconds / each_s[i]
            return max(moved[i][0], min(to, at + rooms[i], moved[i][1])) if i < len(moved) else to

        def cuts(chunk: int, *ends: int) -> tuple[int, ...] | None:
            made = (0, *ends, layers)
            parts = zip(itertools.pairwise(made), rooms, bounds, strict=False)
            if not all(0 < b - a <= room and low <= b <= high for (a, b), room, (low, high) in parts):
                return None
            return (*made, layers) if whole else made

        ends = _nearest(_balanced(range(layers), len(moved), each_s[len(moved)] * layers, reach), moved)
        sizes = [size for size in self._sizes if self._steps_fit(size, cuts(size, *ends))]
        starts = [(size, *ends) for size in sizes or self._sizes[:1]]
        return _best(starts, cuts, self._chain.layers, self._known.layers)

    def _tokens(self) -> Found | None:
        """The best parts of the tokens, which all machines take layer after layer.

        None if the helpers lack room, the prompt is too short, or a helper does not have all layers.
        """
        if any(helper.held is not None for helper in self._helpers):
            return None
        prompt, cached, count = self._prompt, self._prompt.cached, len(self._helpers)
        shape, sizes = prompt.shape, prompt.shape.sizes
        rows = replace(sizes, token_bytes=sizes.token_bytes + shape.hidden_bytes)
        rooms = [one.room_bytes - (0 if one.loaded else shape.most_weights_bytes) for one in self._helpers]
        sent_s = [one.link.seconds(max(1, prompt.sent_bytes)) for one in self._helpers]

        def room(i: int, at: float) -> int:
            return rows.fitting(rooms[i] + int(at) * shape.hidden_bytes)

        def reach(i: int, at: float, seconds: float) -> float:
            to = at + self._speeds[i].fitting(at, seconds, self._usual)
            return max(at, min(to, at + seconds / sent_s[i], room(i, at), prompt.tokens)) if i < count else to

        def cuts(chunk: int, *counts: int) -> tuple[int, ...] | None:
            made = (cached, *(cached + count * chunk for count in counts), prompt.tokens)
            fits = 0 < chunk <= max(self._sizes[-1], CHUNKS[-1]) and made[-2] < made[-1]
            parts = enumerate(itertools.pairwise(made[:-1]))
            return made if fits and all(a < b <= room(i, a) for i, (a, b) in parts) else None

        ends = _balanced(prompt.new, count, self._speeds[-1].total(1.0, prompt.new, self._usual), reach)
        own, fine = ends[0] - cached, not prompt.exact_chunks and len(prompt.new) < _MANY * CHUNKS[-1]
        chunks, starts = list(self._sizes), []
        if fine and own >= CHUNKS[0] / 4 and ends[-1] - cached >= CHUNKS[0]:
            # In chunks of nearly the same size, the first helper's part ends where it should.
            chunks += [math.ceil(own / math.ceil(own / size)) for size in self._sizes]
        for chunk in chunks:
            last = math.ceil(len(prompt.new) / chunk) - count
            bounds = [(1 + i, last + i) for i in range(count)]
            starts.append((chunk, *_nearest([(end - cached) / chunk for end in ends], bounds)))
        return _best(starts, cuts, self._chain.tokens, self._known.tokens, _FINER if fine else ())

    def _layers_room(self, helper: HelperSpec) -> int:
        """The number of layers whose rows, and weights if they are not loaded, the helper has room for."""
        shape = self._prompt.shape
        room = helper.room_bytes - 2 * self._sizes[-1] * shape.hidden_bytes
        layer_bytes = shape.sizes.of(self._prompt.tokens) / shape.layers
        if not helper.loaded:
            # A part has the embedding or the head; which of them is not known yet, so both are counted.
            room -= shape.outside_bytes
            layer_bytes += max(0, shape.most_weights_bytes - shape.outside_bytes) / shape.layers
        return math.floor(min(shape.layers, max(0, room) / max(1.0, layer_bytes)))

    def _steps_fit(self, chunk: int, cuts: Sequence[int] | None) -> bool:
        """True if no machine's last chunk takes longer than one step of it should."""
        prompt, own = self._prompt, self._prompt.chunk
        alone_s = self._home.speed.seconds(1.0, max(prompt.cached, prompt.tokens - own), own)
        start = max(prompt.cached, prompt.tokens - chunk)
        return cuts is not None and all(
            machine.speed.seconds((b - a) / prompt.shape.layers, start, chunk)
            <= (BUSY_STEP_S if machine.running > 0 else max(STEP_S, alone_s))
            for machine, (a, b) in zip((*self._helpers, self._home), itertools.pairwise(cuts), strict=True)
        )


def _balanced(
    units: range, moved: int, most_s: float, reach: Callable[[int, float, float], float]
) -> list[float]:
    """Where the first ``moved`` parts end if all machines, one more, are busy for the same time.

    ``reach(i, at, seconds)``: the unit to which machine i comes from unit ``at``. The last machine comes from
    the first unit to the last in ``most_s``.
    """

    def filled(time: int) -> list[float]:
        at, ends = float(units.start), []
        for i in range(moved + 1):
            at = reach(i, at, most_s * time / _TIMES)
            ends.append(at)
        return ends

    return filled(bisect_left(range(_TIMES), True, key=lambda time: filled(time)[-1] >= units.stop))[:-1]


def _nearest(ends: Sequence[float], bounds: Sequence[Part]) -> list[int]:
    """The nearest whole numbers within ``bounds``, each above the one before."""
    found, before = [], 0
    for end, (low, high) in zip(ends, bounds, strict=True):
        before = min(high, max(low, before + 1, round(end)))
        found.append(before)
    return found


def _best(
    starts: Sequence[_Ends],
    cuts: Callable[..., tuple[int, ...] | None],
    price: Callable[[Sequence[int], int], Timeline],
    known: Callable[[Sequence[int], int], Timeline],
    finer: Sequence[int] = (),
) -> Found | None:
    """The best cuts and chunk size near ``starts``; None if nothing there is possible.

    Each end moves by 1 while that lowers the price, then the chunk size by each share of it in ``finer``. Of
    what the best starts lead to, the least by ``known`` wins.
    """

    @functools.cache
    def total_s(ends: _Ends) -> float:
        made = cuts(*ends)
        return math.inf if made is None else price(made, ends[0]).total_s

    def improved(best: _Ends) -> _Ends:
        steps = [(i, 1) for i in range(1, len(best))] + [(0, max(1, best[0] // share)) for share in finer]
        for i, step in steps:
            for by in (step, -step):
                while total_s(moved := (*best[:i], best[i] + by, *best[i + 1 :])) < total_s(best):
                    best = moved
        return best

    # One cut has its own best place for each size; of several cuts, those of the best size are good enough.
    first = sorted(starts, key=total_s)[: _FIRST if finer or len(starts[0]) == 2 else 1]
    close = [improved(one) for one in first if total_s(one) <= _CLOSE * total_s(first[0])]
    found = [Found(made, one[0], known(made, one[0])) for one in close if (made := cuts(*one)) is not None]
    return min(found, key=lambda one: one.timeline.total_s, default=None)
