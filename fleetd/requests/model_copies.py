"""Models from a peer instead of the internet: who has the same files, and both ends of the copy.

    here    MODEL_OFFER digest            →  names, sizes and hashes of its files, checked against the digest
    here    MODEL_PART digest             →  the same, and how large its layers are, each by itself
    here    MODEL_SEND digest, what lacks →  an invitation; a child process reads the sealed stream
    there                                    a child process reads the files and seals them

Whatever goes wrong with one peer, the next one is tried, and then the source that the model came from.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.errors import (
    DiskFull,
    FleetError,
    Overloaded,
    PeerLate,
    PeerUnreachable,
    ProtocolError,
)
from fleetd.models import file_threads, hub_parts, parts
from fleetd.models.catalog import find
from fleetd.models.copy import client
from fleetd.models.copy.messages import (
    CopyNeed,
    CopyOffer,
    PartOffer,
    PartOrder,
    offer_of,
    part_offer_from_hub,
    part_offer_of,
)
from fleetd.models.folder import ModelFolder
from fleetd.models.model_store import ModelStore
from fleetd.models.pull_lines import PullProgress
from fleetd.p2p import link_prober
from fleetd.p2p.membership.cards import Card, ModelCard
from fleetd.p2p.message_reader import reader
from fleetd.p2p.node import Node
from fleetd.p2p.session.transport import PeerStream
from fleetd.process.observe import get_logger
from fleetd.requests.admission import model_by_digest
from fleetd.requests.placement.placement import canonical
from fleetd.requests.remote.bulk_dialer import BulkDialer, invitation
from fleetd.requests.remote.message_codec import Digest, encode

log = get_logger("fleetd.copies")

MODEL_OFFER, MODEL_PART, MODEL_SEND = "model.offer", "model.part", "model.send"
_ATTEMPTS = 3
# Stages of a copy that are the other machine's as well.
_ON_THE_WAY = ("connecting", "copying")


class CopyQuestion(msgspec.Struct, frozen=True):
    digest: Digest


class Order(msgspec.Struct, frozen=True):
    digest: Digest
    needs: Annotated[list[CopyNeed], Meta(max_length=limits.COPY_FILES)]


# Each raises ProtocolError.
_read_wanted: Callable[[bytes], CopyQuestion] = reader(
    CopyQuestion, "A peer's wish for a model", limits.COPY_MESSAGE_BYTES
)
_read_order: Callable[[bytes], Order] = reader(Order, "A peer's order of a model", limits.COPY_MESSAGE_BYTES)
_read_offer: Callable[[bytes], CopyOffer] = reader(
    CopyOffer, "A peer's offer of a model", limits.COPY_MESSAGE_BYTES
)
_read_part: Callable[[bytes], PartOffer] = reader(
    PartOffer, "A peer's offer of layers", limits.COPY_MESSAGE_BYTES
)


class CopyTimes:
    """Bytes and seconds from the first to the last news of a copy that is on its way."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0
        self._begun: tuple[int, float] | None = None

    def seen(self, step: PullProgress, now: float) -> None:
        """Raises PeerLate for a copy that a machine keeps going byte by byte, and that would never end."""
        if step.stage == "copying":
            begun, begun_s = self._begun = self._begun or (step.done_bytes, now)
            self.count, self.seconds = step.done_bytes - begun, now - begun_s
            due = (self.seconds - limits.COPY_GRACE_S) * limits.COPY_LEAST_BYTES_PER_S
            if self.count < due:
                raise PeerLate(f"{self.count} bytes of the copy came in {self.seconds:.0f} s.")


class ModelCopies:
    """Serves this machine's models to peers, and fetches theirs."""

    def __init__(self, node: Node, models: ModelStore, own_card: Callable[[], Card]) -> None:
        self._node = node
        self._dialer = BulkDialer(node)
        self._models = models
        self._own_card = own_card
        self._given = 0
        #: By model of another machine, how far fetching its layers is; None before the first step.
        self.parts_coming: dict[str, PullProgress | None] = {}
        node.handle(MODEL_OFFER, self._offer)
        node.handle(MODEL_PART, self._offer_part)
        node.handle(MODEL_SEND, self._send)

    # ---- fetching ----------------------------------------------------------------------------------------

    async def pull(self, ref: str) -> AsyncGenerator[PullProgress, None]:
        """Pull the model from a peer that has it, else from where it comes from; nothing if it is here.

        Raises:
            FleetError: as ``ModelStore.pull``.
        """
        for node_id, model in await self._holders(ref):
            try:
                async with aclosing(self._copy(node_id, model)) as steps:
                    async for step in steps:
                        yield step
            except DiskFull:
                raise
            except FleetError as error:
                log.warning(
                    "copy.failed", peer=self._node.name_of(node_id), model=model.name, error=str(error)
                )
            else:
                await file_threads.look(self._models.drop_parts)
                return
        async with aclosing(self._models.pull(ref)) as steps:
            async for step in steps:
                yield step
        await file_threads.look(self._models.drop_parts)

    async def _holders(self, ref: str) -> list[tuple[str, ModelCard]]:
        """Peers that have the model, the fastest path first; of different files only the most common ones.

        Only those that a person here has confirmed: any member can invent others, and so be the most.
        """
        with contextlib.suppress(FleetError):
            await file_threads.look(self._models.resolve, ref)
            return []
        name, entry = canonical(ref), find(ref)
        pinned = entry.revision if entry is not None else None
        mesh, members = self._node.mesh, self._node.roster.members
        found = [
            (card.node_id, model)
            for card in mesh.cards
            for model in card.models
            if model.name == name
            and model.digest
            and (pinned is None or model.revision == pinned)
            and (peer := mesh.peers.get(card.node_id)) is not None
            and peer.usable
            and (member := members.get(card.node_id)) is not None
            and member.confirmed
        ]
        counts: dict[str, int] = {}
        for _, model in found:
            counts[model.digest] = counts.get(model.digest, 0) + 1
        common = max(counts, key=lambda digest: (counts[digest], digest), default="")
        found = [(node_id, model) for node_id, model in found if model.digest == common]
        found.sort(key=lambda item: (-self._speed(item[0]), item[0]))
        return found[:_ATTEMPTS]

    def _speed(self, node_id: str) -> float:
        best = self._dialer.best(node_id)
        return best.expected_bytes_per_s if best is not None else 0.0

    async def _copy(self, node_id: str, model: ModelCard) -> AsyncGenerator[PullProgress, None]:
        log.info("copy.begins", peer=self._node.name_of(node_id), model=model.name)
        body = encode(CopyQuestion(model.digest))
        offer = _read_offer(await self._node.ask(node_id, MODEL_OFFER, body, within_s=limits.COPY_OFFER_S))

        def receive(connect: client.Connect) -> AsyncGenerator[PullProgress, None]:
            models_dir = self._models.models_dir
            return client.receive(offer, models_dir, connect, name=model.name, digest=model.digest)

        async with aclosing(self._received(node_id, model.digest, receive)) as steps:
            async for step in steps:
                yield step

    async def part(
        self, node_id: str, name: str, digest: str, first: int, last: int
    ) -> AsyncGenerator[PullProgress, None]:
        """Fetch what is not here of layers [first, last) from a machine that has the whole model.

        ``name``: of the model there. Raises FleetError, as ``client.receive``.
        """
        held = await file_threads.look(parts.find, self.part_path(node_id, digest))
        if held is not None and held.has_layers(first, last):
            return
        log.info("copy.begins", peer=self._node.name_of(node_id), model=name, first=first, last=last)
        self.parts_coming[name] = None
        try:
            body = encode(CopyQuestion(digest))
            offer = _read_part(await self._node.ask(node_id, MODEL_PART, body, within_s=limits.COPY_OFFER_S))
            order = PartOrder(offer, digest, name, node_id, first, last)

            def receive(connect: client.Connect) -> AsyncGenerator[PullProgress, None]:
                return client.receive_part(order, self._models.models_dir, connect)

            async with aclosing(self._received(node_id, digest, receive)) as steps:
                async for step in steps:
                    self.parts_coming[name] = step
                    yield step
        finally:
            self.parts_coming.pop(name, None)

    def part_path(self, node_id: str, digest: str) -> Path:
        """Where the part of a machine's model lies, if it is here."""
        return parts.place(self._models.models_dir, digest, node_id)

    async def _received(
        self,
        node_id: str,
        digest: str,
        receive: Callable[[client.Connect], AsyncGenerator[PullProgress, None]],
    ) -> AsyncGenerator[PullProgress, None]:
        """The steps of ``receive``, which is given the way to the machine that sends."""
        name = self._node.name_of(node_id)
        opened: list[PeerStream] = []

        async def connect(needs: list[CopyNeed]) -> tuple[socket.socket, bytes]:
            stream = self._node.request(node_id, MODEL_SEND, encode(Order(digest, needs)))
            opened.append(stream)
            try:
                async with asyncio.timeout(limits.COPY_OFFER_S):
                    answer = await stream.receive()
            except TimeoutError:
                raise PeerUnreachable(f"{name} did not answer within {limits.COPY_OFFER_S:.0f} s.") from None
            if answer is None:
                raise ProtocolError(f"{name} gave no invitation.")
            invited = link_prober.invitation(answer)
            return await self._dialer.connect(node_id, invited), invited.key

        try:
            copied = CopyTimes()
            async with aclosing(receive(connect)) as steps:
                async for step in steps:
                    copied.seen(step, asyncio.get_running_loop().time())
                    if step.stage in _ON_THE_WAY:
                        step = msgspec.structs.replace(step, file=f"{step.file} from {name}".strip())
                    yield step
            self._dialer.carried(node_id, copied.count, copied.seconds)
        finally:
            for stream in opened:
                stream.cancel()

    # ---- serving -----------------------------------------------------------------------------------------

    async def _offer(self, _peer: str, body: bytes, stream: PeerStream) -> None:
        folder = await self._model(_read_wanted(body).digest)
        stream.send(encode(await file_threads.read_whole(offer_of, self._models, folder)))

    async def _offer_part(self, _peer: str, body: bytes, stream: PeerStream) -> None:
        digest = _read_wanted(body).digest
        if (part := await file_threads.look(self._own_part, digest)) is not None:
            stream.send(encode(await file_threads.look(part_offer_from_hub, part)))
            return
        folder = await self._model(digest)
        stream.send(encode(await file_threads.read_whole(part_offer_of, self._models, folder)))

    async def _send(self, peer: str, body: bytes, stream: PeerStream) -> None:
        order = _read_order(body)
        if self._given >= limits.COPIES_GIVEN:
            raise Overloaded(f"This machine gives {limits.COPIES_GIVEN} copies already.")
        self._given += 1
        try:
            part = await file_threads.look(self._own_part, order.digest)
            path = part if part is not None else (await self._model(order.digest)).path
            with self._dialer.expect() as expected:
                stream.send(encode(invitation(expected)))
                log.info("copy.serving", peer=self._node.name_of(peer), model=path.name)
                await client.send(path, order.needs, await expected.socket(), expected.key)
        finally:
            self._given -= 1

    def _own_part(self, digest: str) -> Path | None:
        """The folder of a model that this machine answers with and has in part. Reads small files."""
        path = hub_parts.place(self._models.models_dir, digest)
        return path if parts.is_own(path) else None

    async def _model(self, digest: str) -> ModelFolder:
        return await model_by_digest(self._models, self._own_card(), "that model", digest)
