"""One shared prefill seen from the machine that answers: its helpers agree, get their streams, are watched.

    AssistQuestion ──► every helper at once ──► AssistOffer: compared
    AssistGo       ──► every helper    here: dial each helper; expect the last one, if its output comes here
    from then on each helper's request is watched: it computes, is done, failed, or is silent

Before anything is computed, both ends compare what the other says of itself:

    other files, dtype or mlx-lm      →  Incompatible, with the name of the field
    equal fingerprints of the layers  →  "exact": every byte is what this machine would have computed
    else                              →  "equivalent": the same model, rounded in another order

This module knows neither why these helpers were chosen nor what follows from a failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fleetd.control.model_facts import KvBits, WireBits
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.protocol import Arithmetic, StepTime, StreamTag
from fleetd.errors import FleetError, Incompatible, InvalidValue, PeerLost, ProtocolError
from fleetd.p2p.bulk_connections import Expected
from fleetd.p2p.session.transport import PeerStream
from fleetd.plan.prefill.split import Split, WarmRows, checked
from fleetd.requests.concurrency import gather_or_cancel
from fleetd.requests.ports import FleetPort
from fleetd.requests.prefill_sharing import messages
from fleetd.requests.remote.bulk_dialer import invitation
from fleetd.requests.remote.peer_stream import require_message, said_by


class SharingTerms(msgspec.Struct, frozen=True):
    """What is agreed on. ``id``: of the request; ``arithmetic``: of the engine here.

    ``own_chunks``: the prompt is cut into chunks as it would be here alone. ``kv_bits``: in how many bits
    keys and values are held here; 0 is as computed. ``wire_bits``: in how many helpers send them; 0 is as
    they are held. ``exact``: by what is known before helpers answer, they have the bytes of this machine.
    """

    id: str
    model: str
    digest: str
    split: Split
    arithmetic: Arithmetic
    own_chunks: bool
    kv_bits: KvBits = 0
    wire_bits: WireBits = 0
    exact: bool = True


@dataclass(slots=True)
class AgreedHelper:
    """``failed``: why it is given up; ``steps``: what it did, once it is done. ``expected``: rows that it may
    still have; ``warm``: them, if it has; ``kept``: it keeps those of this prompt."""

    node_id: str
    name: str
    rank: int
    expected: WarmRows | None = None
    warm: WarmRows | None = None
    kept: bool = False
    stream: PeerStream = field(init=False)
    offer: messages.AssistOffer = field(init=False)
    ready: bool = False
    failed: FleetError | None = None
    steps: Sequence[StepTime] | None = None


class Agreement:
    """Args:
    helpers: node ids and names, in the order of the chain.
    warm: by node id, rows of the cached prefix that a helper may still have.
    """

    def __init__(
        self,
        partners: FleetPort,
        engine: EngineProcess,
        terms: SharingTerms,
        helpers: Sequence[tuple[str, str]],
        warm: Mapping[str, WarmRows] | None = None,
    ) -> None:
        self.helpers = [
            AgreedHelper(node_id, name, rank, (warm or {}).get(node_id))
            for rank, (node_id, name) in enumerate(helpers)
        ]
        self._partners = partners
        self._engine = engine
        self._terms = terms
        self._opened: list[PeerStream] = []

    @property
    def terms(self) -> SharingTerms:
        return self._terms

    @property
    def split(self) -> Split:
        """How the prompt is divided among them."""
        return self._terms.split

    async def reach(self, within_s: float) -> bool:
        """Once every stream is with the engine: whether the result will be exactly this machine's own.

        Raises FleetError, which is PeerLost if that takes longer than ``within_s`` seconds; then some helper
        has ``failed``, unless the fault is here.
        """
        try:
            async with asyncio.timeout(within_s):
                exact = await gather_or_cancel(*(self._ask(helper) for helper in self.helpers))
                await self._unless_one_fails(self._connect())
        except TimeoutError:
            late = PeerLost(f"It did not agree to help within {within_s:.1f} s.")
            for helper in self.helpers:
                if not helper.ready:
                    helper.failed = late
            names = ", ".join(helper.name for helper in self.helpers if not helper.ready)
            raise PeerLost(f"{names} did not agree to help within {within_s:.1f} s.") from None
        known = all(helper.warm is None or helper.warm.exact for helper in self.helpers)
        return all(exact) and known and not self._terms.wire_bits

    async def watch(self) -> None:
        """Return when every helper is done. Raises the first one's failure, at once."""
        await gather_or_cancel(*(self._watch(helper) for helper in self.helpers))

    def close(self) -> None:
        """End what is not done, there as well; idempotent."""
        for stream in self._opened:
            stream.cancel()

    # ---- one helper --------------------------------------------------------------------------------------

    async def _ask(self, helper: AgreedHelper) -> bool:
        terms = self._terms
        ask = messages.AssistQuestion(
            terms.model,
            terms.digest,
            terms.split,
            helper.rank,
            terms.id,
            terms.arithmetic,
            terms.kv_bits,
            helper.expected,
            terms.wire_bits,
            terms.exact,
        )
        with _blaming(helper):
            helper.stream = self._partners.request(helper.node_id, messages.ASSIST, messages.encode(ask))
            self._opened.append(helper.stream)
            helper.offer = offer = messages.decode(await require_message(helper.stream), messages.AssistOffer)
            if (offer.input is None) != (helper.rank == 0):
                raise ProtocolError(f"{helper.name} expects streams that this split does not have.")
            _same("kv_bits", str(terms.kv_bits), str(offer.kv_bits))
            _same("wire_bits", str(terms.wire_bits), str(offer.wire_bits))
            helper.warm = helper.expected if offer.warm else None
            layers = terms.split.layers_of(helper.rank)
            return compare(terms.arithmetic, offer.arithmetic, layers, own_chunks=terms.own_chunks)

    async def _connect(self) -> None:
        split = self._terms.split
        with ExitStack() as stack:
            own: Expected | None = None
            if split.has_next(split.helpers - 1):
                own = stack.enter_context(self._partners.expect())
            for helper in self.helpers:
                with _blaming(helper):
                    helper.stream.send(messages.encode(self._go(helper, own)))
                    helper.stream.end()
            work = [self._dial(helper) for helper in self.helpers]
            if own is not None:
                work.append(self._visited(self.helpers[-1], own))
            await gather_or_cancel(*work)

    def _go(self, helper: AgreedHelper, own: Expected | None) -> messages.AssistGo:
        if helper is not self.helpers[-1]:
            following = self.helpers[helper.rank + 1]
            return messages.AssistGo(following.node_id, following.offer.input)
        return (
            messages.AssistGo() if own is None else messages.AssistGo(self._partners.node_id, invitation(own))
        )

    async def _dial(self, helper: AgreedHelper) -> None:
        with _blaming(helper):
            invited = helper.offer.home
            sock = await self._partners.connect(helper.node_id, invited)
        tag = StreamTag(self._terms.id, f"helper{helper.rank}", invited.key, "connector")
        await self._engine.give_stream(tag, sock)
        helper.ready = True

    async def _visited(self, helper: AgreedHelper, own: Expected) -> None:
        with _blaming(helper):
            sock = await own.socket()
        await self._engine.give_stream(StreamTag(self._terms.id, "in", own.key, "acceptor"), sock)

    async def _unless_one_fails(self, work: Coroutine[Any, Any, None]) -> None:
        """A helper that is gone opens no streams: they are not waited for then."""
        working, watching = asyncio.create_task(work), asyncio.create_task(self.watch())
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                await watching
            await working
        finally:
            for task in (working, watching):
                task.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    async def _watch(self, helper: AgreedHelper) -> None:
        if helper.steps is not None:
            return
        with _blaming(helper):
            done = messages.decode(await require_message(helper.stream), messages.AssistDone)
            helper.steps, helper.kept = done.steps, done.kept


@contextmanager
def _blaming(helper: AgreedHelper) -> Iterator[None]:
    """Errors inside are this helper's, and carry its name."""
    try:
        yield
    except FleetError as error:
        helper.failed = said_by(helper.name, error)
        raise helper.failed from error


# ---- Compared before anything is computed ---------------------------------------------------------------


def compare(home: Arithmetic, helper: Arithmetic, layers: range, *, own_chunks: bool) -> bool:
    """True if the helper computes for ``layers`` the bytes that home would; False if it rounds otherwise.

    Args:
        layers: those that the helper is to compute.
        own_chunks: the split cuts the prompt into the chunks that home would use alone.

    Raises Incompatible, naming the field, if home could not use the helper's rows. Both ends compare, each
    with what the other said of itself, so neither depends on the other's care.
    """
    _same("dtype", home.dtype, helper.dtype)
    # A model's graph may differ between versions, and no fingerprint of one layer shows that.
    _same("mlx-lm", home.versions.get("mlx-lm", ""), helper.versions.get("mlx-lm", ""))
    # Between forms, frames would come that are not due.
    _same("states", str(home.states), str(helper.states))
    missing = [layer for layer in layers if _of(helper, layer) is None]
    if missing:
        raise Incompatible(f"Layer {missing[0]} is not among those that the helper holds.", param="layers")
    if any(_of(home, layer) != _of(helper, layer) for layer in layers):
        if home.accelerator == helper.accelerator:
            _same("mlx", home.versions.get("mlx", ""), helper.versions.get("mlx", ""))
        return False
    return own_chunks or home.chunks == helper.chunks == "any"


def checked_split(split: Split, *, layers: int, context_tokens: int, rank: int | None = None) -> Split:
    """The same split. Raises ProtocolError, before anything of the split's size is allocated, for a split of
    another model or of a prompt that this machine's model cannot take.

    Args:
        layers, context_tokens: the model's, as the own engine says.
        rank: the helper's in the chain; None for the machine that answers.
    """
    try:
        checked(split)
    except InvalidValue as error:
        raise ProtocolError(f"A split that makes no sense: {error.message}") from None
    if split.layers != layers:
        raise ProtocolError(f"A split of {split.layers} layers; the model has {layers}.")
    if split.tokens >= context_tokens:
        raise ProtocolError(f"A split of {split.tokens} tokens; the model takes {context_tokens}.")
    if rank is not None and not 0 <= rank < split.helpers:
        raise ProtocolError(f"Rank {rank} is none of the {split.helpers} helpers'.")
    return split


def _same(field: str, home: str, helper: str) -> None:
    if home != helper:
        raise Incompatible(
            f"{field} is {helper or 'unknown'} there and {home or 'unknown'} here.", param=field
        )


def _of(arithmetic: Arithmetic, layer: int) -> bytes | None:
    at = layer - arithmetic.first_layer
    return arithmetic.layers[at] if 0 <= at < len(arithmetic.layers) else None
