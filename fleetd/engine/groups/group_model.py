"""A model of which this machine has the first layers, the embedding and the head, and others have the rest.

    tokens ─► embedding, own layers ─► member ─► member ─► norm, head ─► logits

Members send hidden states to each other if they have streams for that, else through this machine.

For all that calls it, it is one of mlx-lm's models. A chunk of a prompt is sent on and not waited for, so
that every machine computes a chunk of its own. Nor need a block of an answer be: ``begin`` sends it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from fleetd import limits
from fleetd.control.prefill_trace import GroupStage
from fleetd.engine.groups.flight import Flight, GroupStages
from fleetd.engine.groups.messages import ALL
from fleetd.engine.groups.remote_rows import KeptThere, divided
from fleetd.engine.groups.remote_stage import RemoteStage
from fleetd.engine.groups.step_times import StepTimes
from fleetd.engine.layers.hidden_states import NO_TAPS, Taps, noted_states
from fleetd.engine.layers.layer_calls import PassInputs
from fleetd.engine.layers.stage import Stage
from fleetd.errors import ModelUnsupported


class GroupModel(nn.Module):  # type: ignore[misc]
    """Layers [0, ``first``) of a whole model and both of its ends; ``join`` gives it the rest.

    ``dtype``: of hidden states.

    Raises ModelUnsupported for a model that cannot be run in parts, or not in these.
    """

    def __init__(self, whole: Stage, first: int, dtype: mx.Dtype) -> None:
        super().__init__()
        self._sources = whole.sources
        self._check_cut(first)
        self._front = whole.with_ends(first)
        self.weights = self._front.weights
        self.dtype = dtype
        self.takes_tokens, self.width = whole.takes_tokens, whole.width
        self._empty = whole.empty
        self._members = GroupStages()
        self._times = StepTimes("", 0, first)
        # What ``noting`` yields, while it does.
        self._noting: tuple[Taps, dict[int, list[mx.array]]] = (NO_TAPS, {})

    @classmethod
    def front_of(cls, model: Any, first: int, *, on_cpu: bool) -> GroupModel:
        """The first layers of one of mlx-lm's models, of which nothing is read yet."""
        whole = Stage.of(model)
        # A CPU computes in f32; elsewhere the embedding decides it.
        return cls(whole, first, mx.float32 if on_cpu else whole.embed(mx.array([[0]])).dtype)

    def join(self, members: Sequence[RemoteStage]) -> None:
        """Have the layers behind this machine's run by ``members``, in this order.

        Raises ValueError if these are not all of them, ModelUnsupported if it cannot be cut so.
        """
        ends = [self._front.last, *(member.last for member in members)]
        if [member.first for member in members] != ends[:-1] or ends[-1] != self._front.total:
            raise ValueError(f"layers {ends} of {self._front.total} are in this group")
        for member in members:
            self._check_cut(member.first)
        self._members = GroupStages(tuple(members))

    def _check_cut(self, first: int) -> None:
        """Raises ModelUnsupported if layers from ``first`` on read what layers before it keep."""
        if any(source < first for source in self._sources[first:]):
            last = min(source for index, source in enumerate(self._sources) if source != index)
            raise ModelUnsupported(
                f"The last layers of this model read what layers from {last} on keep: "
                f"it cannot be cut before layer {first}.",
                hint="Name other machines, of which the last has room for those layers (--on).",
            )

    @property
    def machines(self) -> int:
        """Machines that can each compute another block at the same time."""
        return 1 + len(self._members.stages)

    def far(self, layers: Collection[int]) -> tuple[int, ...]:
        """Those of ``layers`` whose hidden states have to travel for what drafts from them: they are other
        machines', and not what comes out of the last layer."""
        return tuple(each for each in layers if self._front.last <= each < self._front.total - 1)

    @property
    def stage_times(self) -> list[GroupStage]:
        """What plain steps took lately in the layers of each machine, in their order."""
        return [each.median for each in (self._times, *(stage.times for stage in self._members.stages))]

    def kept_by(self, first: int, last: int) -> KeptThere:
        """What layers [first, last) keep of sequences."""
        return KeptThere.of(self._empty[first:last])

    @property
    def layers(self) -> list[Any]:
        """One entry for each layer of the whole model; None for those of other machines."""
        own = list(self._front.weights.layers)
        return own + [None] * (self._front.total - len(own))

    @property
    def members(self) -> GroupStages:
        return self._members

    @property
    def front(self) -> Stage:
        """This machine's layers."""
        return self._front

    @property
    def empty(self) -> list[Any]:
        """What all layers keep, of this machine and of others, as caches in which nothing is."""
        return [cache for cache in self._empty if cache is not None]

    def make_cache(self) -> list[Any]:
        """What this machine's layers keep, then an entry for each other machine."""
        own = [cache for cache in self._front.make_caches() if cache is not None]
        return own + [member.rows() for member in self._members.stages]

    def __call__(self, tokens: mx.array, cache: list[Any] | None = None) -> mx.array:  # (B, T) -> (B, T, V)
        taps, noted = self._noting
        flight = self.begin(tokens, cache or self.make_cache(), taps=taps)
        logits = flight.logits()
        if taps.layers:
            for layer, states in flight.states().items():
                noted.setdefault(layer, []).append(states)
        return logits

    @contextmanager
    def noting(self, layers: Collection[int]) -> Iterator[dict[int, list[mx.array]]]:
        """``noted_states`` of this model: of layers of any machine. What comes out of the last one is here
        anyway; others' states travel."""
        noted: dict[int, list[mx.array]] = {}
        self._noting = (Taps(tuple(layers)), noted)
        try:
            yield noted
        finally:
            self._noting = (NO_TAPS, {})

    def begin(
        self,
        tokens: mx.array,
        cache: list[Any],
        *,
        wanted: bool = True,
        room: int = 0,
        taps: Taps = NO_TAPS,
        hash_from: int = ALL,
    ) -> Flight:
        """Run this machine's layers on a block (B, T) and send it on; others may follow before it comes back.

        ``wanted``: what comes out of the last layer is sent back. ``room``: so many tokens follow, with
        these. ``taps``: hidden states that ``Flight.states`` gives. ``hash_from``: as of ``RunStage``.
        """
        stages = self._members.stages
        self._members.pass_on()
        own, rest = divided(cache, len(stages))
        # In a batch each row has a position of its own, which its caches know.
        start = rest[0].tokens if tokens.shape[0] == 1 else 0
        inputs = self._front.inputs(tokens, start) if self.takes_tokens else PassInputs(start)
        begun = time.monotonic()
        here = [layer for layer in taps.layers if layer < self._front.last]
        with noted_states(self._front.weights, here) as noted:
            hidden = self._front.run(self._front.embed(tokens), self._front.spread(own), inputs)
        states = {layer: each[0][:, -taps.rows :] for layer, each in noted.items() if each}
        # No wait for another machine may lie within what a device computes.
        mx.eval(hidden, states)
        if wanted:
            self._times.add(tokens.shape[1], time.monotonic() - begun)
        last = self._front.total - 1 if wanted and self._front.total - 1 in taps.layers else -1
        asked = Taps(tuple(layer for layer in taps.layers if layer != last), taps.rows)
        passes = [
            member.enter(
                rows,
                tokens,
                wanted=wanted or member is not stages[-1],
                room=room,
                taps=asked,
                hash_from=hash_from,
            )
            for member, rows in zip(stages, rest, strict=True)
        ]
        stages[0].give(passes[0], hidden)
        for number, member in enumerate(stages[1:], 1):
            before = passes[number - 1]
            if member.from_before:
                passes[number].before = before
                member.send_on()
            else:
                before.after = member, passes[number]
        return Flight(self._members, passes, self._front.finish, states, last)

    def kept_hashes(self, cache: list[Any], first: int) -> list[mx.array]:
        """A hash, (32,) uint8, of all that each other machine keeps of a sequence's tokens from ``first`` on.
        Computes one token more, which is added to ``cache``. Raises MemberLost."""
        passes = self.begin(mx.array([[0]]), cache, hash_from=first).passes
        self._members.wait(lambda: all(entered.done for entered in passes))
        return [mx.array(np.frombuffer(entered.kept, np.uint8)) for entered in passes]

    @property
    def busy(self) -> bool:
        """True if a member has not answered to all that it was sent. Raises MemberLost."""
        while self._members.pass_on():
            pass
        return any(member.under_way for member in self._members.stages)

    def undo(self, flights: Sequence[Flight]) -> None:
        """Tell all machines that these blocks, whose tokens were taken back from the caches, are not
        wanted: those that were not run yet never are."""
        for flight in flights:
            flight.drop()
        self._members.tell()

    def read(self, tokens: mx.array, cache: list[Any], room: int = 0, taps: Taps = NO_TAPS) -> Flight:
        """Have all layers keep what they keep of ``tokens``; nothing comes back but ``taps``. Nothing is
        waited for but what was sent ``limits.GROUP_FRAMES`` before.

        ``room``: so many tokens follow, with these.
        """
        flight = self.begin(tokens, cache, wanted=False, room=room, taps=taps)
        self._wait_for_all_but(limits.GROUP_FRAMES)
        return flight

    def settle(self) -> None:
        """Wait until every machine has computed what it was sent."""
        self._wait_for_all_but(0)

    def _wait_for_all_but(self, blocks: int) -> None:
        self._members.wait(lambda: all(member.under_way <= blocks for member in self._members.stages))
