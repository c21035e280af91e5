"""How long a split prefill takes, from the agreement to the beginning of decoding.

Every machine and every link is a stage that takes pieces in order, one at a time. So the end is the longest
path through (stage, piece). It is computed without simulating the schedule: the cost of chunks grows linearly
with the context, so the path can pass from one stage to the next at few pieces only.

    layers   pieces are chunks    helper 0 ---- hidden states --- helper 1 ---- hidden states --- home
                                      `------------ rows -------------`------------ rows ----------'
    tokens   pieces are layers    helper 0 -------- rows -------- helper 1 -------- rows -------- home
                                      `------------------------- rows ----------------------------'

If layers are split, the rows of a chunk are sent when its machine has computed it. Hidden states share the
link with rows and get half of it. For S equal stages and links that cost nothing this is (m + S - 1)·tau, as
in GPipe (arXiv 1811.06965, section 2.3).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from fleetd import limits
from fleetd.control.model_facts import ModelShape, WireBits
from fleetd.plan.costs import LinkSpeed, PrefillSpeed
from fleetd.plan.prefill.options import HelperSpec
from fleetd.plan.prefill.split import TOKEN_BYTES, Split, SplitKind, WarmRows

# Round trips before anything is computed: question and offer, Go, a connection, its first sealed frame.
SETUP_ROUND_TRIPS = 4
# Time that the daemons and workers at both ends need for them.
SETUP_S = 0.02
# Of a layer's time, what the model's last one takes in a prefill: only its keys and values are needed, whose
# products are 6 % of a layer's weights in SmolLM2-135M; norm and positions come on top.
LAST_LAYER = 0.1


def share_of(layers: range, total: int, last_layer: float = LAST_LAYER) -> float:
    """The share of a prefill's time that some of ``total`` layers take; ``last_layer`` as in PrefillSize."""
    last = total - 1
    return (len(layers) - (1 - last_layer) * (last in layers)) / (last + last_layer)


class PrefillSize(msgspec.Struct, frozen=True):
    """What is to be prefilled, of which model."""

    shape: ModelShape
    # The prompt without its last token, as in ``Split``.
    tokens: int
    # How many of them are in the prefix cache.
    cached: int
    # Tokens of one chunk without helpers.
    chunk: int
    # No other size of chunk may be used.
    exact_chunks: bool = False
    # The time of the last layer, as a share of another layer's (``LAST_LAYER``).
    last_layer: float = 1.0
    # As in ``Split``.
    places: tuple[int, ...] = ()
    # At so many of the last ``places`` what the model keeps whole is sent too, besides at the end.
    states: int = 0
    # By node id, rows of the cached tokens that helpers still have.
    warm: tuple[tuple[str, WarmRows], ...] = ()
    # In how many bits helpers send keys and values; 0 is as they are held.
    sent_bits: WireBits = 0

    @property
    def sent_bytes(self) -> int:
        """Bytes of a token's keys and values from a helper to another machine, over all layers."""
        return self.shape.wire_token_bytes if self.sent_bits else self.shape.sizes.token_bytes

    @property
    def whole_bytes(self) -> int:
        """Bytes of the states and windows behind the prompt, which have no row for each token."""
        return self.shape.sizes.whole(self.tokens)

    @property
    def sent_places(self) -> tuple[int, ...]:
        """The places that ``states`` counts."""
        return self.places[len(self.places) - self.states :]

    @property
    def new(self) -> range:
        return range(self.cached, self.tokens)

    def share(self, layers: range) -> float:
        """The share of a prefill's time that these layers take."""
        return share_of(layers, self.shape.layers, self.last_layer)


class Timeline(msgspec.Struct, frozen=True):
    """Seconds of each step as the machine that answers sees them, one after another."""

    agreed_s: float
    prefix_s: float
    waited_s: float
    computed_s: float
    exposed_s: float

    @property
    def total_s(self) -> float:
        return self.agreed_s + self.prefix_s + self.waited_s + self.computed_s + self.exposed_s


def timeline(
    prompt: PrefillSize, split: Split, helpers: Sequence[HelperSpec], home: PrefillSpeed
) -> Timeline:
    """The timeline of a valid split, with one helper per part but the last."""
    return _PRICED[split.kind](Chain(prompt, helpers, home), split.cuts, split.chunk)


class Chain:
    """Machines in a fixed order, with all figures that do not depend on the cuts."""

    def __init__(self, prompt: PrefillSize, helpers: Sequence[HelperSpec], home: PrefillSpeed) -> None:
        self._prompt, self._helpers, self._home = prompt, helpers, home
        self._new = prompt.new
        self._whole_bytes, self._sent_places = prompt.whole_bytes, prompt.sent_places
        self._prompt_bytes = TOKEN_BYTES * prompt.tokens
        self._cached_bytes = prompt.shape.sizes.of(prompt.cached) if prompt.cached else 0
        warm = dict(prompt.warm)
        self._warm = [warm.get(helper.node_id) for helper in helpers]
        links = [helper.link for helper in helpers]
        self._between = [a.and_(b) for a, b in itertools.pairwise(links)]
        # All that helpers send to home or get from it passes home's one port.
        self._port = max(links, key=lambda link: link.bytes_per_s)
        self._agreed_s = SETUP_S + SETUP_ROUND_TRIPS * max(link.rtt_s for link in links)
        # Home first computes some of the helpers' work itself, to compare the results.
        spot_s = home.seconds(1.0, prompt.cached, min(limits.SHARE_SPOT_TOKENS, len(self._new)))
        self._home_free_s = self._agreed_s + spot_s

    def layers(self, cuts: Sequence[int], chunk: int) -> Timeline:
        """The timeline of a split by layers. ``cuts`` as in ``Split``; home's part may be empty."""
        prompt, new = self._prompt, self._new
        parts = [range(a, b) for a, b in itertools.pairwise(cuts)]
        *shares, home_share = [prompt.share(part) for part in parts]
        kept = [len(part) / prompt.shape.layers for part in parts[:-1]]
        begun_s = self._agreed_s + self._prefix_s(kept, parts[:-1])
        pipe = _PipeTimeline(*divmod(len(new), chunk))
        rows: list[tuple[int, _StageTimeline]] = []
        for i, (helper, share) in enumerate(zip(self._helpers, shares, strict=True)):
            pipe.stages.append(self._computing(helper.speed, share, chunk, begun_s))
            to_home = prompt.sent_bytes * kept[i]
            onward = self._between[i] if i < len(self._between) else helper.link
            if onward is helper.link and home_share:
                to_home += prompt.shape.hidden_bytes
            carrying = self._carrying(helper.link, to_home, chunk)
            # States of the last chunk's places and of its end travel behind the rows of the one before.
            late = 1 + sum(prompt.tokens - at <= chunk for at in self._sent_places)
            carrying.late_s += helper.link.seconds(self._whole_bytes * late * kept[i])
            rows.append((len(pipe.stages), carrying))
            if onward is not helper.link or home_share:
                pipe.stages.append(self._carrying(onward, 2 * prompt.shape.hidden_bytes, chunk))
        if home_share:
            pipe.stages.append(self._computing(self._home, home_share, chunk, self._home_free_s))
        computed_end_s, rows_end_s = pipe.ends(rows)
        states = self._states(new, chunk)
        port_s = self._port.seconds(sum(kept) * (prompt.sent_bytes * len(new) + states))
        rows_end_s = max(rows_end_s, begun_s + port_s, self._home_free_s)
        computed_s = self._home.total(home_share, new, chunk)
        return Timeline(
            agreed_s=self._agreed_s,
            prefix_s=begun_s - self._agreed_s,
            waited_s=max(0.0, computed_end_s - computed_s - begun_s),
            computed_s=computed_s,
            exposed_s=max(0.0, rows_end_s - computed_end_s),
        )

    def tokens(self, cuts: Sequence[int], chunk: int) -> Timeline:
        """The timeline of a split by tokens. ``cuts`` as in ``Split``.

        No hand-off is exposed: home needs a layer's rows before it computes that layer.
        """
        prompt, layers = self._prompt, self._prompt.shape.layers
        one, last = prompt.share(range(1)), prompt.share(range(layers - 1, layers))
        *parts, home_part = [range(a, b) for a, b in itertools.pairwise(cuts)]
        begun_s = self._agreed_s + self._prefix_s([1.0] * len(parts), [range(layers)] * len(parts))
        row_bytes, state_bytes = prompt.sent_bytes / layers, self._whole_bytes / layers
        home_s = self._home.total(1.0, home_part, chunk)
        port_s = self._port.seconds(
            prompt.sent_bytes * (home_part.start - prompt.cached)
            + sum(self._states(part, chunk) for part in parts)
        )
        end_s = max(self._home_free_s + home_s, begun_s + port_s + home_s * last)
        # The chain up to this helper: each stage's seconds for one layer and for the last one, and the delay
        # of the links.
        path: list[tuple[float, float]] = []
        late_s = 0.0
        for i, (helper, part) in enumerate(zip(self._helpers, parts, strict=True)):
            work_s = helper.speed.total(1.0, part, chunk)
            path.append((work_s * one, work_s * last))
            rows_s = helper.link.seconds(row_bytes * len(part) + self._states(part, chunk) / layers)
            stages = [*path, (rows_s, rows_s), (home_s * one, home_s * last)]
            lead_s = begun_s + late_s + helper.link.one_way_s
            end_s = max(end_s, lead_s + _layer_after_layer(stages, layers))
            if i < len(self._between):
                onward_s = self._between[i].seconds(row_bytes * (part.stop - prompt.cached) + state_bytes)
                path.append((onward_s, onward_s))
                late_s += self._between[i].one_way_s
        return Timeline(
            self._agreed_s, begun_s - self._agreed_s, max(0.0, end_s - home_s - begun_s), home_s, 0.0
        )

    def _states(self, tokens: range, chunk: int) -> int:
        """Bytes of the states that a helper sends home with ``tokens``, of all layers.

        It sends all states after the tokens and at places among them. If it computes several chunks, it sends
        running states before the last one, too.
        """
        if not self._whole_bytes:
            return 0
        times = 1 + sum(tokens.start < at < tokens.stop for at in self._sent_places)
        return self._whole_bytes * times + self._prompt.shape.sizes.state_bytes * (len(tokens) > chunk)

    def _prefix_s(self, shares: Sequence[float], layers: Sequence[range]) -> float:
        """Time to send the tokens, and the rows of cached tokens that they lack, to all helpers at once.

        Args:
            shares: of the cached rows that are each helper's; ``layers``: which layers these are of.
        """
        sent = [
            self._prompt_bytes + self._cached_bytes * share - self._there_bytes(warm, its)
            for share, warm, its in zip(shares, self._warm, layers, strict=True)
        ]
        arrived_s = [
            helper.link.seconds(n_bytes) + helper.link.one_way_s
            for helper, n_bytes in zip(self._helpers, sent, strict=True)
        ]
        return max(*arrived_s, self._port.seconds(sum(sent)))

    def _there_bytes(self, warm: WarmRows | None, layers: range) -> float:
        """Bytes of cached rows of these layers that a helper still has."""
        if warm is None:
            return 0.0
        shape = self._prompt.shape
        rows = min(warm.tokens, self._prompt.cached) * warm.layers_among(layers)
        return shape.sizes.token_bytes / shape.layers * rows

    def _computing(self, speed: PrefillSpeed, share: float, chunk: int, free_s: float) -> _StageTimeline:
        prompt, rest = self._prompt, len(self._new) % chunk
        return _StageTimeline(
            first_s=speed.seconds(share, prompt.cached, chunk),
            growth_s=share * speed.context_s * chunk * chunk,
            rest_s=speed.seconds(share, prompt.tokens - rest, rest),
            free_s=free_s,
        )

    def _carrying(self, link: LinkSpeed, token_bytes: float, chunk: int) -> _StageTimeline:
        rest = len(self._new) % chunk
        return _StageTimeline(
            first_s=link.seconds(token_bytes * chunk),
            growth_s=0.0,
            rest_s=link.seconds(token_bytes * rest),
            late_s=link.one_way_s,
        )


def _layer_after_layer(stages: Sequence[tuple[float, float]], layers: int) -> float:
    """Seconds for all layers through ``stages``. Each stage has the seconds of a layer and of the last one.

    The longest path stays with the slowest stage that it meets before it goes on to the last layer.
    """
    if layers == 1:
        return sum(last_s for _, last_s in stages)
    longest_s = until_s = slowest_s = 0.0
    after_s = sum(last_s for _, last_s in stages)
    for one_s, last_s in stages:
        until_s += one_s
        slowest_s = max(slowest_s, one_s)
        longest_s = max(longest_s, until_s + (layers - 2) * slowest_s + after_s)
        after_s -= last_s
    return longest_s


_PRICED: dict[SplitKind, Callable[[Chain, Sequence[int], int], Timeline]] = {
    "layers": Chain.layers,
    "tokens": Chain.tokens,
}


@dataclass(slots=True)
class _StageTimeline:
    """A machine or a link: ``first_s + c · growth_s`` for whole chunk c, ``rest_s`` for a shorter last one.

    It begins no sooner than ``free_s``, and its results arrive ``late_s`` after it has computed them.
    """

    first_s: float
    growth_s: float
    rest_s: float
    free_s: float = 0.0
    late_s: float = 0.0


@dataclass(slots=True)
class _StageDone:
    """The times at which a stage's results arrive, of the chunks in ``turns`` and of the last chunk."""

    turns_s: list[float]
    end_s: float


class _PipeTimeline:
    """Stages in order that compute ``chunks`` whole chunks and, if ``rest``, a shorter one."""

    def __init__(self, chunks: int, rest: int) -> None:
        self.stages: list[_StageTimeline] = []
        self._chunks, self._rest = chunks, rest

    def ends(self, branches: Sequence[tuple[int, _StageTimeline]]) -> tuple[float, float]:
        """The times at which the last stage and the last branch end.

        Args:
            branches: of each, the number of stages before it, and the branch as a stage.
        """
        turns = self._turns()
        done = [_StageDone([0.0] * len(turns), 0.0)]
        for stage in self.stages:
            done.append(self._through(stage, turns, done[-1]))
        return done[-1].end_s, max(self._through(stage, turns, done[at]).end_s for at, stage in branches)

    def _through(self, stage: _StageTimeline, turns: Sequence[int], before: _StageDone) -> _StageDone:
        # A path enters the stage with some chunk, or at the start, and stays until a later chunk.
        first_s, growth_s = stage.first_s, stage.growth_s
        lead_s = finished_s = stage.free_s
        turns_s = []
        for c, before_s in zip(turns, before.turns_s, strict=True):
            until_s = c * (first_s + growth_s * (c - 1) / 2)  # of all whole chunks before this one
            if before_s - until_s > lead_s:
                lead_s = before_s - until_s
            finished_s = lead_s + until_s + first_s + growth_s * c
            turns_s.append(finished_s + stage.late_s)
        if self._rest:
            finished_s = max(finished_s, before.end_s) + stage.rest_s
        return _StageDone(turns_s, finished_s + stage.late_s)

    def _turns(self) -> list[int]:
        """The whole chunks with which the longest path may pass from one stage to a later one.

        Passing one chunk later adds a chunk's time on the earlier stage and saves one on the later stage. If
        the later stage's chunks grow faster, this gains up to one point; otherwise the path passes with the
        first or the last chunk.
        """
        if not self._chunks:
            return []
        last = self._chunks - 1
        turns = {0, last}
        for i, early in enumerate(self.stages):
            between_s = 0.0  # stages between the two take longer for the next chunk
            for late in self.stages[i + 1 :]:
                if late.growth_s > early.growth_s:
                    gain_s = early.first_s + early.growth_s + between_s - late.first_s
                    at = gain_s / (late.growth_s - early.growth_s)
                    if 0 < at < last:
                        turns.add(math.ceil(at))
                between_s += late.growth_s
        return sorted(turns)
