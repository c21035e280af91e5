"""Holding layers of other machines' models: what a member may ask for, and how long they stay here.

    to FETCH ──► layers fetched if they are not here
    StageQuestion ──► digest checked, layers fetched if they are not here ──► memory promised
        ──► loaded beside what runs ──► StageTold with a stream ──► stream to the engine ──► alive, alive …
    LinkQuestion ──► a stream to or from another member ──► to the engine

The request's stream is the life of it: when the machine that asked is gone, so is everything begun for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from fleetd import limits
from fleetd.engine.daemon_side.lent_workers import LentWorkers
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.protocol import (
    HOP_IN,
    HOP_OUT,
    STAGE,
    Accepted,
    Event,
    Loading,
    Prefill,
    ServeStage,
    StreamTag,
)
from fleetd.errors import DownloadFailed, EngineDied, InvalidValue, ModelNotFound, NotFound
from fleetd.models import file_threads, hub_parts, parts
from fleetd.models.cpu_arithmetic import CpuArithmetic
from fleetd.models.folder import ModelFolder
from fleetd.models.hub_parts import HubCommit, HubPartOrder
from fleetd.models.memory_need import WeightRules, layer_bytes
from fleetd.models.names import part_name, shown_name
from fleetd.p2p.link_prober import Invitation
from fleetd.p2p.membership.identity import short_id
from fleetd.p2p.session.transport import PeerStream
from fleetd.requests.admission import ConcurrencyLimit, ServingContext
from fleetd.requests.concurrency import BackgroundTasks, with_beats, with_heartbeats
from fleetd.requests.groups import messages
from fleetd.requests.groups.messages import LinkQuestion, LinkTold, StageQuestion, StageTold
from fleetd.requests.model_copies import ModelCopies
from fleetd.requests.promised_memory import PromisedMemory
from fleetd.requests.remote.bulk_dialer import BulkDialer, invitation
from fleetd.requests.remote.message_codec import ALIVE
from fleetd.requests.remote.peer_stream import own_id
from fleetd.requests.row_origins import Labels, no_label

_ON_CPU: tuple[CpuArithmetic, ...] = ("int8", "float32")
_ON_GPU: tuple[Literal[""], ...] = ("",)


@dataclass(slots=True)
class _HeldStage:
    """Layers that are held for a group.

    ``engine``, ``job``: which work of which engine it is, while it runs. ``links``: the streams to other
    members that were asked for, HOP_IN and HOP_OUT. ``freed``: nothing of it is in memory any more.
    """

    engine: EngineProcess | None = None
    job: str = ""
    links: set[str] = field(default_factory=set)
    freed: asyncio.Event = field(default_factory=asyncio.Event)


class StageServer:
    """The handler of ``messages.SERVE``; ``fetch`` is that of ``messages.FETCH``, ``link`` of ``LINK``."""

    def __init__(
        self,
        dialer: BulkDialer,
        lent: LentWorkers,
        context: ServingContext,
        name_of: Callable[[str], str] = str,
        promised: PromisedMemory | None = None,
        free_bytes: Callable[[], int] = lambda: 1 << 62,
        rules: Callable[[], WeightRules] = lambda: WeightRules(),
        copies: ModelCopies | None = None,
        label: Labels = no_label,
        pulls: Callable[[str], bool] = lambda peer: True,
    ) -> None:
        """
        Args:
            name_of: a machine's name, by its node id.
            promised: what groups were promised here.
            free_bytes: what models may take now, beside what workers hold.
            rules: how this machine holds weights.
            copies: fetches layers of models that are not here; None if nothing is fetched.
            label: of what is kept of a machine's prompts.
            pulls: True for the node id of a machine for which layers are fetched from the hub.
        """
        self._name_of = name_of
        self._promised = promised or PromisedMemory()
        self._free_bytes, self._rules = free_bytes, rules
        self._dialer = dialer
        self._copies = copies
        self._label = label
        self._pulls = pulls
        self._lent = lent
        self._context = context
        self._limit = ConcurrencyLimit(context, "group", limits.GROUPS, f"is in {limits.GROUPS} groups")
        self._background = BackgroundTasks()
        # By the machine that asked, and the group's id there.
        self._held: dict[tuple[str, str], _HeldStage] = {}

    async def link(self, peer: str, body: bytes, stream: PeerStream) -> None:
        """Raises FleetError: what the other side is told."""
        ask = messages.decode(body, LinkQuestion)
        held, name = self._held.get((peer, ask.id)), HOP_IN if ask.next is None else HOP_OUT
        if held is None or (engine := held.engine) is None or name in held.links:
            raise NotFound("No such layers wait for a stream to another machine here.")
        held.links.add(name)
        if ask.next is None:
            with self._dialer.expect() as expected:
                stream.send(messages.encode(LinkTold(invitation(expected))))
                sock = await expected.socket()
            tag = StreamTag(held.job, HOP_IN, expected.key, "acceptor")
        else:
            sock = await self._dialer.connect(ask.next.node_id, ask.next.invitation)
            tag = StreamTag(held.job, HOP_OUT, ask.next.invitation.key, "connector")
        await engine.give_stream(tag, sock)
        stream.send(messages.encode(LinkTold()))

    async def fetch(self, peer: str, body: bytes, stream: PeerStream) -> None:
        """Raises FleetError: what the other side is told."""
        ask = messages.decode(body, StageQuestion)
        with self._limit.serving(peer, ask.id):
            await with_beats(self._folder(peer, ask, stream), limits.GROUP_BEAT_S, lambda: stream.send(ALIVE))

    async def __call__(self, peer: str, body: bytes, stream: PeerStream) -> None:
        """Raises FleetError: what the other side is told."""
        ask = messages.decode(body, StageQuestion)
        with self._limit.serving(peer, ask.id):
            async with (
                aclosing(self._hold(peer, ask, stream)) as told,
                aclosing(with_heartbeats(told, limits.GROUP_BEAT_S)) as beats,
            ):
                async for message in beats:
                    stream.send(ALIVE if message is None else messages.encode(message))

    async def _hold(
        self, peer: str, ask: StageQuestion, stream: PeerStream
    ) -> AsyncGenerator[StageTold, None]:
        """What the other machine is told, while the layers are here; does not end by itself."""
        folder = await self._folder(peer, ask, stream)
        if (before := self._held.get((peer, ask.after))) is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(limits.GROUP_AGAIN_S):
                    await before.freed.wait()

        def loading(step: Loading | Prefill) -> None:
            if isinstance(step, Loading):
                stream.send(messages.encode(StageTold(step.stage, step.done, step.total)))

        layers = f"Layers {ask.first} to {ask.last} of {folder.name}"
        n_bytes = await file_threads.look(self._need, folder, ask)
        held = partial(self._lent.held_of, folder, ask.first, ask.last)
        with self._promised.promise(layers, n_bytes, self._free_bytes() + held(), held):
            yield StageTold(messages.PROMISED)
            async with aclosing(self._loaded(peer, ask, folder, loading)) as told:
                async for message in told:
                    yield message

    def _need(self, folder: ModelFolder, ask: StageQuestion) -> int:
        """Bytes of memory for the layers and their keys and values, at least: a CPU's worker chooses its
        arithmetic itself, and counts for itself. Reads headers of files."""
        kinds = _ON_CPU if self._rules().accelerator == "cpu" else _ON_GPU
        found = [layer_bytes(folder.path, folder.config, arithmetic) for arithmetic in kinds]
        weights = min(sum(sizes.layers[ask.first : ask.last]) for sizes in found)
        return weights + (ask.last - ask.first) * ask.tokens * found[0].row

    async def _loaded(
        self,
        peer: str,
        ask: StageQuestion,
        folder: ModelFolder,
        loading: Callable[[Loading | Prefill], None],
    ) -> AsyncGenerator[StageTold, None]:
        """The same, once there is memory for it."""
        origin = await self._label(peer)
        if (peer, ask.id) in self._held:
            raise InvalidValue("Layers are held for this group already.")
        held = self._held[peer, ask.id] = _HeldStage()
        layers = ask.first, ask.last
        try:
            async with self._lent.assisting(
                folder, ask.first, ask.last, progress=loading, asked_by=self._name_of(peer)
            ) as engine:
                # A worker that has more layers than these serves them, too.
                layers = engine.settings.first_layer, engine.settings.last_layer
                served = ServeStage(own_id(ask.id), ask.first, ask.last, ask.tokens, peer, origin)
                async with aclosing(engine.serve(served)) as events:
                    if not isinstance(await anext(events, None), Accepted):
                        raise EngineDied(f"The engine for {shown_name(folder.name)} did not take the work.")
                    held.engine, held.job = engine, served.id
                    with self._dialer.expect() as expected:
                        yield _joined(engine, invitation(expected))
                        sock = await expected.socket()
                    await engine.give_stream(StreamTag(served.id, STAGE, expected.key, "acceptor"), sock)
                    await _ended(events)
            raise EngineDied(f"The engine for {shown_name(folder.name)} ended its part.")
        finally:
            held.engine = None
            # The next group may be cut elsewhere, and needs the memory for that.
            self._background.start(self._free((peer, ask.id), folder, layers))

    async def _free(self, group: tuple[str, str], folder: ModelFolder, layers: tuple[int, int]) -> None:
        try:
            await self._lent.let_go(folder, *layers)
        finally:
            self._held.pop(group).freed.set()

    async def _folder(self, peer: str, ask: StageQuestion, stream: PeerStream) -> ModelFolder:
        """The model that this machine has, else the layers of it, which are fetched from ``peer``, or from
        the hub if that has them from there, too."""
        if ask.hub is not None:
            return await self._of_hub(peer, ask, ask.hub, stream)
        try:
            return await self._context.model_by_digest(ask.model, ask.digest)
        except ModelNotFound:
            if self._copies is None:
                raise
        steps = self._copies.part(peer, ask.model, ask.digest, ask.first, ask.last)
        async with aclosing(steps):
            async for step in steps:
                stream.send(messages.encode(StageTold(step.stage, step.done_bytes, step.total_bytes)))
        path = self._copies.part_path(peer, ask.digest)
        return await file_threads.look(parts.folder, path, part_name(ask.model, ask.digest))

    async def _of_hub(self, peer: str, ask: StageQuestion, at: HubCommit, stream: PeerStream) -> ModelFolder:
        """The whole model if this machine has it, else the layers, which are fetched from the hub."""
        models = self._context.models
        if (whole := await file_threads.look(models.at_commit, at)) is not None:
            return whole
        path = hub_parts.place(models.models_dir, ask.digest)
        name = f"{at.name}~{ask.digest[:8]}"
        if await file_threads.look(hub_parts.serves, path, ask.first, ask.last):
            return await file_threads.look(parts.folder, path, name)
        if not self._pulls(peer):
            raise DownloadFailed(
                "It fetches from the hub only for machines that may manage it.",
                hint="On that machine: set fleet.manage = true, and confirm this one with "
                f"`fleetctl peers prompts {short_id(peer)} yes`.",
            )
        order = HubPartOrder(at.hub_id, at.commit, ask.digest, ask.first, ask.last)
        async with aclosing(models.pull_part(order)) as steps:
            async for step in steps:
                stream.send(messages.encode(StageTold(step.stage, step.done_bytes, step.total_bytes)))
        return await file_threads.look(parts.folder, path, name)

    async def close(self) -> None:
        """Wait until the layers of groups that have ended are let go of."""
        await self._background.finish()


async def _ended(events: AsyncGenerator[Event, None]) -> None:
    """Wait until the layers are not run any more. Raises why."""
    async for _ in events:
        await asyncio.sleep(0)


def _joined(engine: EngineProcess, expected: Invitation) -> StageTold:
    """What the machine that asked is told once its stream is expected."""
    facts = engine.facts
    arithmetic = facts.arithmetic if facts is not None else None
    if arithmetic is None:
        return StageTold(stream=expected)
    return StageTold(stream=expected, arithmetic=arithmetic.kind, layers=arithmetic.text)
