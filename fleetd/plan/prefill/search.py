"""Where to cut a prompt between machines in a given order: the cuts and the chunk size that end first.

Balanced machines finish together, so that is where the search begins; from there one cut at a time moves by a
layer, or by a chunk, while that helps. With one helper that finds the best cut: the end is the longest of
paths whose lengths are linear in the layers, which has no second valley.

Speeds are known to a tenth or so, and a wrong one costs more on one side: work that a slow machine should not
have had delays everything by all of the difference, work that a fast one has too much of by a small part. So
cuts are searched for as if slow machines were a little slower, and fast ones faster, than they are known to
be; what is found is priced by the speeds as they are known.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from fleetd.plan.costs import MEASURED_TOKENS, LinkSpeed
from fleetd.plan.prefill.options import HelperSpec
from fleetd.plan.prefill.schedule import Chain, PrefillSize, Timeline
from fleetd.plan.prefill.split import Part, SplitKind

# Chunk sizes to try. Larger ones than the measured size do not always cost less per token.
CHUNKS = (MEASURED_TOKENS // 2, MEASURED_TOKENS)
# Sizes whose price is within this factor of the best one may win after their cuts have moved.
_CLOSE = 1.02
# If home would get no more layers than this, a chain of helpers may take all of them.
_HARDLY = 2.0
# Steps by which the size of chunks is fitted to a cut, as shares of it.
_FINER = (24, 120)
# At most this many steps of each size: a cut moves by a part of a chunk.
_MOVES = 5
# Prompts of at least this many chunks skip the fitting: less than one chunk makes no difference.
_MANY = 64
# Halvings in the search for the time that balanced machines take; cuts are whole chunks anyway.
_HALVINGS = 16

# How long a machine should compute one chunk, unless a chunk takes longer alone: meanwhile its other requests
# wait for their turns.
STEP_S, BUSY_STEP_S = 1.0, 0.25

# By how much one machine's speed against another's is usually misjudged, either way.
MISJUDGED = 0.1

Cuts = tuple[int, ...]


class Found(msgspec.Struct, frozen=True):
    cuts: Cuts
    chunk: int
    timeline: Timeline

    @property
    def total_s(self) -> float:
        return self.timeline.total_s


def cut_bounds(layers: int, held: Sequence[Part | None], *, whole: bool = False) -> list[Part] | None:
    """The layers between which each helper's last cut may lie: every helper must have the layers it computes.

    Args:
        held: the layers that each helper of a chain has; None if it has all.
        whole: home computes nothing.

    None if machines with these layers, in this order, cannot form a chain.
    """
    parts = [part or (0, layers) for part in held]
    firsts = [first for first, _ in parts]
    lows, highs = [0], [layers if whole else layers - 1]
    for first in (*firsts[1:], layers if whole else 0):
        lows.append(max(lows[-1] + 1, first))
    for _, last in reversed(parts):
        highs[0] = min(highs[0], last)
        highs.insert(0, highs[0] - 1)
    bounds = list(zip(lows, highs, strict=True))[1:]
    return bounds if firsts[0] == 0 and all(low <= high for low, high in bounds) else None


class Search:
    """The search for one prompt and one chain of helpers."""

    def __init__(
        self,
        prompt: PrefillSize,
        helpers: Sequence[HelperSpec],
        home: HelperSpec,
    ) -> None:
        self._prompt = prompt
        *self._helpers, cautious_home = _cautious(prompt, [*helpers, home])
        self._home = cautious_home.speed
        start = max(prompt.cached, prompt.tokens - prompt.chunk)
        alone_s = home.speed.seconds(1.0, start, prompt.chunk)
        self._steps = [
            (machine.speed, BUSY_STEP_S if machine.running > 0 else max(STEP_S, alone_s))
            for machine in (*helpers, home)
        ]
        # Which cuts are better, and what the best ones are expected to take.
        self._chain, self._known = (
            Chain(prompt, self._helpers, self._home),
            Chain(prompt, helpers, home.speed),
        )
        links = [helper.link for helper in helpers]
        self._onward: list[LinkSpeed | None] = [a.and_(b) for a, b in itertools.pairwise(links)]
        self._onward.append(None)

    def found(self) -> list[tuple[SplitKind, Found]]:
        """The best cuts of each kind, and the best with which home computes nothing."""
        found: list[tuple[SplitKind, Found]] = []
        if (tokens := self.tokens()) is not None:
            timeline = self._known.tokens(tokens.cuts, tokens.chunk)
            found.append(("tokens", replace(tokens, timeline=timeline)))
        for whole in (False, True):
            if (layers := self.layers(whole=whole)) is not None:
                timeline = self._known.layers(layers.cuts, layers.chunk)
                found.append(("layers", replace(layers, timeline=timeline)))
        return found

    def layers(self, *, whole: bool = False) -> Found | None:
        """The best pipeline of chunks by layers; ``whole``: home computes nothing. None without room.

        Several helpers take the whole prompt only if home could hardly take a layer.
        """
        if whole and len(self._helpers) > 1 and self._home_layers() > _HARDLY:
            return None
        bounds = cut_bounds(self._prompt.shape.layers, [helper.held for helper in self._helpers], whole=whole)
        if bounds is None:
            return None
        starts = [
            (chunk, cuts)
            for chunk in self._sizes()
            if (cuts := self._even_layers(chunk, bounds, whole=whole))
        ]
        quick = [start for start in starts if self._steps_fit(*start)] or starts[:1]
        moved = range(1, len(self._helpers) + (0 if whole else 1))
        least = 0 if whole else 1

        def price(cuts: Cuts, chunk: int) -> Timeline | None:
            fits = _apart(cuts, least) and self._layers_fit(cuts, chunk)
            return self._chain.layers(cuts, chunk) if fits else None

        return self._best(quick, price, moved, lambda chunk: 1)

    def tokens(self) -> Found | None:
        """Layer after layer, each machine on tokens of its own.

        None if the helpers lack room, the prompt is too short, or a helper does not have all layers.
        """
        if any(helper.held is not None for helper in self._helpers):
            return None
        ends = self._even_tokens()
        starts = [(chunk, cuts) for chunk in self._sizes() if (cuts := self._rounded(ends, chunk))]

        def price(cuts: Cuts, chunk: int) -> Timeline | None:
            return self._chain.tokens(cuts, chunk) if _apart(cuts, 1) and self._tokens_fit(cuts) else None

        moved = range(1, len(self._helpers) + 1)
        # With one helper each size has its own best cut; with several, the best size is enough.
        groups = [[start] for start in starts] if len(moved) == 1 else [starts]
        best = [found for group in groups if (found := self._best(group, price, moved, lambda chunk: chunk))]
        if not self._prompt.exact_chunks and len(self._prompt.new) < _MANY * CHUNKS[-1]:
            best = [self._fitted(found, price) for found in best]
        return min(best, key=lambda found: found.total_s, default=None)

    def _fitted(self, found: Found, price: Callable[[Cuts, int], Timeline | None]) -> Found:
        """The same numbers of chunks, of nearly the same size, so that each cut moves by less than a chunk.

        The cut that balances the machines is seldom a whole number of the usual chunks.
        """
        cached, *ends, tokens = found.cuts
        most = max(found.chunk, CHUNKS[-1])

        def sized(counts: Sequence[int], chunk: int) -> Found | None:
            cuts = (cached, *(cached + count * chunk for count in counts), tokens)
            if not 0 < chunk <= most or cuts[-2] >= tokens:
                return None
            timeline = price(cuts, chunk)
            return Found(cuts, chunk, timeline) if timeline is not None else None

        def fitted(counts: Sequence[int], at: Found) -> Found:
            for step in (max(1, found.chunk // parts) * way for parts in _FINER for way in (1, -1)):
                for _ in range(_MOVES):
                    moved = sized(counts, at.chunk + step)
                    if moved is None or moved.total_s >= at.total_s:
                        break
                    at = moved
            return at

        counts = [(end - cached) // found.chunk for end in ends]
        best = fitted(counts, found)
        if best.chunk + found.chunk // _FINER[-1] < most:
            return best
        # The best size is at its bound: try one more chunk for the first helper, more for the others too.
        more = [count + count // counts[0] for count in counts]
        begun = sized(more, found.chunk * counts[0] // more[0])
        return best if begun is None else min(best, fitted(more, begun), key=lambda one: one.total_s)

    def _sizes(self) -> list[int]:
        """Chunk sizes to try, ascending; none is longer than the prompt.

        Alone, a busy machine uses smaller chunks to let its other requests have their turns. Shared with
        helpers, the fixed cost of each chunk would outweigh that.
        """
        own, new = self._prompt.chunk, len(self._prompt.new)
        if self._prompt.exact_chunks:
            return [own]
        sizes = sorted({*CHUNKS, max(own, CHUNKS[0])})
        return [size for size in sizes if size <= new] or sizes[:1]

    # ---- Search -------------------------------------------------------------------------------------------

    def _best(
        self,
        starts: Sequence[tuple[int, Cuts]],
        price: Callable[[Cuts, int], Timeline | None],
        moved: Sequence[int],
        unit: Callable[[int], int],
    ) -> Found | None:
        def at(chunk: int, cuts: Cuts) -> Found | None:
            found = price(cuts, chunk)
            return Found(cuts, chunk, found) if found is not None else None

        def climbed(found: Found) -> Found:
            for index, way in _moves(moved):
                while better := at(found.chunk, _shifted(found.cuts, index, way * unit(found.chunk))):
                    if better.total_s >= found.total_s:
                        break
                    found = better
            return found

        begun = _descended(len(starts), lambda index: at(*starts[index]))
        if not begun:
            return None
        begun.sort(key=lambda found: found.total_s)
        close = [found for found in begun if found.total_s <= _CLOSE * begun[0].total_s]
        # With several helpers, the best cuts of one size are good for the others too.
        return min(map(climbed, close if len(moved) <= 1 else close[:1]), key=lambda found: found.total_s)

    # ---- Balanced cuts ------------------------------------------------------------------------------------

    def _home_layers(self) -> float:
        """Home's number of layers if all machines computed for the same time."""
        prompt = self._prompt
        speeds = [helper.speed for helper in self._helpers]
        rates = [1 / speed.total(1.0, prompt.new, prompt.chunk) for speed in (*speeds, self._home)]
        return prompt.shape.layers * rates[-1] / sum(rates)

    def _even_layers(self, chunk: int, bounds: Sequence[Part], *, whole: bool) -> Cuts | None:
        """Layers in proportion to the rate of each machine, or of its link if that is slower."""
        prompt, layers = self._prompt, self._prompt.shape.layers
        sent = prompt.shape.sizes.token_bytes * len(prompt.new) + prompt.whole_bytes
        rates, rooms = [], []
        for helper in self._helpers:
            busy_s = max(helper.speed.total(1.0, prompt.new, chunk), helper.link.seconds(sent))
            rates.append(1 / busy_s)
            rooms.append(self._layers_room(helper, chunk))
        if not whole:
            rates.append(1 / self._home.total(1.0, prompt.new, chunk))
        cuts = [0]
        for at, (room, (low, high)) in enumerate(zip(rooms, bounds, strict=True)):
            share = round((layers - cuts[-1]) * rates[at] / sum(rates[at:]))
            cut = max(low, cuts[-1] + 1, min(high, cuts[-1] + min(share, room)))
            if cut > min(high, cuts[-1] + room):
                return None
            cuts.append(cut)
        return (*cuts, layers)

    def _even_tokens(self) -> list[float]:
        """Where each helper's tokens end if all machines take the same time."""
        prompt = self._prompt
        low_s, high_s = 0.0, self._home.total(1.0, prompt.new, prompt.chunk)
        ends = self._filled(high_s)
        for _ in range(_HALVINGS):
            middle_s = (low_s + high_s) / 2
            tried = self._filled(middle_s)
            if self._home.fitting(tried[-1], middle_s, prompt.chunk) >= prompt.tokens - tried[-1]:
                high_s, ends = middle_s, tried
            else:
                low_s = middle_s
        return ends

    def _rounded(self, ends: Sequence[float], chunk: int) -> Cuts | None:
        """The nearest cuts between chunks; None if there are too few chunks for all machines."""
        prompt = self._prompt
        last = math.ceil(len(prompt.new) / chunk) - 1  # one chunk is left for home
        cuts, before = [prompt.cached], 0
        for i, end in enumerate(ends):
            unit = min(round((end - prompt.cached) / chunk), last - (len(ends) - 1 - i))
            before = max(before + 1, unit)
            cuts.append(prompt.cached + before * chunk)
        return (*cuts, prompt.tokens) if cuts[-1] < prompt.tokens else None

    def _filled(self, seconds: float) -> list[float]:
        """Where each helper's tokens end if it and each of its links are busy for at most ``seconds``."""
        prompt, chunk = self._prompt, self._prompt.chunk
        kv, hidden = max(1, prompt.shape.sizes.token_bytes), prompt.shape.hidden_bytes
        ends, at = [], float(prompt.cached)
        for helper, onward in zip(self._helpers, self._onward, strict=True):
            link = helper.link
            room = helper.room_bytes - self._weights_bytes(helper) - prompt.whole_bytes
            end = at + helper.speed.fitting(at, seconds, chunk)
            end = min(end, at + seconds * max(1.0, link.bytes_per_s) / kv)
            if onward is not None:
                end = min(end, prompt.cached + seconds * max(1.0, onward.bytes_per_s) / kv)
            end = min(end, (room + at * hidden) / (kv + hidden), prompt.tokens)
            at = max(at, end)
            ends.append(at)
        return ends

    # ---- Bounds -------------------------------------------------------------------------------------------

    def _layers_room(self, helper: HelperSpec, chunk: int) -> int:
        """How many layers it has room for: their rows, and their weights if they are not loaded."""
        prompt, shape = self._prompt, self._prompt.shape
        room, per_layer = helper.room_bytes - 2 * chunk * shape.hidden_bytes, 0.0
        if not helper.loaded:
            # A part has the embedding or the head; which of them is not known yet, so both are counted.
            room -= shape.outside_bytes
            per_layer = max(0, shape.most_weights_bytes - shape.outside_bytes) / shape.layers
        per_layer += shape.sizes.of(prompt.tokens) / shape.layers
        if room == math.inf or room >= per_layer * shape.layers:
            return shape.layers
        return max(0, math.floor(room / per_layer))

    def _layers_fit(self, cuts: Cuts, chunk: int) -> bool:
        parts = itertools.pairwise(cuts)
        return all(
            b - a <= self._layers_room(helper, chunk)
            and (helper.held is None or helper.held[0] <= a <= b <= helper.held[1])
            for helper, (a, b) in zip(self._helpers, parts, strict=False)
        )

    def _tokens_fit(self, cuts: Cuts) -> bool:
        """Helpers have room for the rows of all tokens up to their last, and their own hidden states."""
        prompt = self._prompt
        return all(
            self._weights_bytes(helper) + prompt.shape.sizes.of(b) + (b - a) * prompt.shape.hidden_bytes
            <= helper.room_bytes
            for helper, (a, b) in zip(self._helpers, itertools.pairwise(cuts), strict=False)
        )

    def _weights_bytes(self, helper: HelperSpec) -> int:
        return 0 if helper.loaded else self._prompt.shape.most_weights_bytes

    def _steps_fit(self, chunk: int, cuts: Cuts) -> bool:
        """True if no machine's last chunk takes longer than one step of it should."""
        prompt = self._prompt
        start = max(prompt.cached, prompt.tokens - chunk)
        return all(
            speed.seconds((b - a) / prompt.shape.layers, start, chunk) <= step_s
            for (speed, step_s), (a, b) in zip(self._steps, itertools.pairwise(cuts), strict=True)
        )


def _cautious(prompt: PrefillSize, machines: Sequence[HelperSpec]) -> list[HelperSpec]:
    """The machines with the speeds that make cuts last: each is moved away from the mean of all.

    Of two machines, let the slow one have the share x of the work. If its speed is overestimated by e, the
    end is late by e, and if it is underestimated, by e · x / (1 - x), since that work is then the other's.
    For errors that are spread evenly the mean is least where the speed is taken too low, by 1 - 2x of their
    bound.
    """
    rates = [1 / machine.speed.total(1.0, prompt.new, prompt.chunk) for machine in machines]
    mean = sum(rates) / len(rates)
    return [
        replace(machine, speed=machine.speed.times(1 + MISJUDGED * (mean - rate) / sum(rates)))
        for machine, rate in zip(machines, rates, strict=True)
    ]


def _apart(cuts: Cuts, least_last: int) -> bool:
    """True if every helper has a part, and the last machine at least ``least_last``."""
    return all(a < b for a, b in itertools.pairwise(cuts[:-1])) and cuts[-1] - cuts[-2] >= least_last


def _moves(moved: Sequence[int]) -> list[tuple[int, int]]:
    return [(index, way) for index in moved for way in (1, -1)]


def _shifted(cuts: Cuts, index: int, by: int) -> Cuts:
    return (*cuts[:index], cuts[index] + by, *cuts[index + 1 :])


def _descended(count: int, at_index: Callable[[int], Found | None]) -> list[Found]:
    """The results from the middle in the direction in which prices fall, until they rise."""
    found: dict[int, Found] = {}

    def seen(index: int) -> float:
        if index not in found and 0 <= index < count and (made := at_index(index)) is not None:
            found[index] = made
        return found[index].total_s if index in found else math.inf

    at = count // 2
    way = -1 if seen(at - 1) < seen(at) else 1
    while seen(at + way) <= seen(at) < math.inf:
        at += way
    if not found:  # a prompt that does not fit in chunks of middle size may fit in smaller ones
        for at in range(count):
            seen(at)
    return list(found.values())
