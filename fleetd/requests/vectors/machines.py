"""The machines that have a model for vectors, and how fast each computes with it.

model's name ──find──► the files that are meant, and the machines that have just these
a finished part ──learn──► tokens per second, for the next parts
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import msgspec

from fleetd import limits
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.errors import FleetError, NoMachine
from fleetd.models import file_threads
from fleetd.models.folder import ModelFolder
from fleetd.models.purposes import check_catalog, check_purpose
from fleetd.p2p.membership.cards import ModelCard
from fleetd.plan.chip_speeds import compiles_late
from fleetd.plan.costs import modelled
from fleetd.plan.refusals import THIS_NODE
from fleetd.requests.members.members import Member, Members, eligible, expected_load_s
from fleetd.requests.model_locator import ModelLocator
from fleetd.requests.vectors.job import VectorJob
from fleetd.requests.vectors.parts import VectorMachine

# Weight of the newest part in a machine's speed.
_NEWEST = 0.3
# Parts of fewer tokens say little about speed, as do those that wait behind others.
_TELLING_TOKENS = 128
_PRIOR_TOK_S = 2000.0


class EncoderModel(msgspec.Struct, frozen=True):
    """The files that are meant. ``folder``: on this machine, None if only others have them. ``digest``: ""
    if it is not known yet, and then no other machine is asked. ``can_pull``: this machine may fetch them."""

    name: str
    digest: str = ""
    folder: ModelFolder | None = None
    can_pull: bool = False

    @property
    def key(self) -> str:
        """Key for what is learned of the model."""
        return self.digest or self.name


class VectorMachines:
    """Looks for machines, and remembers how fast they were."""

    def __init__(
        self,
        pool: EnginePool,
        locator: ModelLocator,
        members: Members,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._locator = locator
        self._members = members
        self._monotonic = monotonic
        # Tokens per second, by node id and model.
        self._tok_s: dict[tuple[str, str], float] = {}
        # Those that have computed the part that compiles their kernels.
        self._compiled = set[tuple[str, str]]()
        # What requests have given each machine and wait for, by node id: tokens, about, and parts.
        self._given_tokens: Counter[str] = Counter()
        self._given_parts: Counter[str] = Counter()
        # By node id: until when a machine that answers a chat is left to that.
        self._rests_until_s: dict[str, float] = {}

    async def model(self, job: VectorJob) -> EncoderModel:
        """The model that a job means. Raises FleetError: no machine has it, or it is for something else."""
        located = await file_threads.look(self._locator.locate, job.model)
        if located.folder is not None:
            check_purpose(located.folder.name, located.folder.shape.purpose, job.purpose)
            card = self._members.here().model(located.folder.name)
            return EncoderModel(located.folder.name, card.digest if card else "", located.folder)
        check_catalog(located.name, job.purpose)
        cards = self._elsewhere(located.name, job)
        if not cards and located.can_pull:
            return EncoderModel(located.name, can_pull=True)
        if not cards:
            raise located.missing or NoMachine(f"No machine has {located.name} now.", param="model")
        for card in cards:
            check_purpose(located.name, card.shape.purpose, job.purpose)
        best = min(cards, key=lambda card: (card.state != "loaded", card.digest))
        return EncoderModel(located.name, best.digest)

    def _elsewhere(self, name: str, job: VectorJob) -> list[ModelCard]:
        """The model of this name on other machines that may be asked now."""
        found = (member.model(name) for member in self._others(job) if eligible(member) is None)
        return [card for card in found if card is not None and card.digest]

    def _others(self, job: VectorJob) -> list[Member]:
        return [] if job.local_only else self._members.others("vectors")

    def able(self, job: VectorJob, model: EncoderModel, lost: dict[str, FleetError]) -> list[VectorMachine]:
        """The machines that can compute for a job now, but for those that it has ``lost``."""
        found = []
        if model.folder is not None and THIS_NODE not in lost:
            found.append(self._here(model, model.folder))
        for member in self._others(job) if model.digest else ():
            card = member.model_with(model.digest)
            if card is not None and member.node_id not in lost and eligible(member, model.digest) is None:
                found.append(self._there(member, card, model))
        return found

    def own_kind(self, model: EncoderModel) -> str:
        """What kind of machine this one is, as ``VectorMachine.kind``; "" if it has not the model."""
        return self._here(model, model.folder).kind if model.folder is not None else ""

    def _here(self, model: EncoderModel, folder: ModelFolder) -> VectorMachine:
        member = self._members.here()
        card = member.model(folder.name) or ModelCard(folder.name, shape=folder.shape)
        return VectorMachine(
            member.node_id,
            member.name,
            self._speed(member, card, model),
            load_s=0.0 if self._pool.engine(folder) is not None else self._pool.load_s(folder),
            queued=self._given_tokens[member.node_id],
            chats=self._members.requests_at(THIS_NODE).requests > 0,
            rests=self._rests(THIS_NODE),
            kind=_kind(member, card),
            compiles=compiles_late(member.card.machine.accelerator),
        )

    def _there(self, member: Member, card: ModelCard, model: EncoderModel) -> VectorMachine:
        return VectorMachine(
            member.node_id,
            member.name,
            self._speed(member, card, model),
            load_s=0.0 if card.state == "loaded" else expected_load_s(card),
            rtt_s=member.rtt_s,
            queued=self._given_tokens[member.node_id],
            full=self._given_parts[member.node_id] >= limits.VECTOR_PARTS_GIVEN,
            chats=member.card.running + member.card.waiting > 0,
            rests=self._rests(member.node_id),
            kind=_kind(member, card),
            compiles=compiles_late(member.card.machine.accelerator),
        )

    def _speed(self, member: Member, card: ModelCard, model: EncoderModel) -> float:
        """Tokens per second: of its last parts, else as its card says, else by its chip."""
        if known := self._tok_s.get((member.node_id, model.key)):
            return known
        if card.speed.prefill_tok_s:
            return card.speed.prefill_tok_s
        if not card.shape.weights_bytes:
            return _PRIOR_TOK_S
        return 1 / modelled(member.chip(card.shape.cpu_arithmetic), card.shape).token_s

    def _rests(self, node_id: str) -> bool:
        return self._monotonic() < self._rests_until_s.get(node_id, 0.0)

    def gives(self, machine: VectorMachine, tokens: int) -> None:
        """A machine is given a part of about so many tokens."""
        self._given_tokens[machine.node_id] += tokens
        self._given_parts[machine.node_id] += 1

    def returns(self, machine: VectorMachine, tokens: int) -> None:
        """A machine has that part no more: it has answered, has failed, or need not answer."""
        self._given_tokens[machine.node_id] -= tokens
        self._given_parts[machine.node_id] -= 1

    def learn(self, machine: VectorMachine, model: EncoderModel, tokens: int, seconds: float) -> None:
        """A machine has computed a part; beside a chat it now rests, so that the chat has the machine."""
        if machine.chats:
            # Without the time in which the engine itself left the machine to a prompt.
            computed_s = min(seconds, max(limits.VECTOR_PASS_S, tokens / machine.tok_s))
            self._rests_until_s[machine.node_id] = self._monotonic() + limits.VECTOR_REST * computed_s
        elif tokens >= _TELLING_TOKENS and seconds > 0 and not machine.queued:
            key = (machine.node_id, model.key)
            if machine.compiles and key not in self._compiled:
                self._compiled.add(key)
                return
            newest = tokens / seconds
            known = self._tok_s.get(key, newest)
            self._tok_s[key] = known + _NEWEST * (newest - known)


def _kind(member: Member, card: ModelCard) -> str:
    """Equal for machines that compute the same bytes: the same code on the same chip."""
    machine = member.card.machine
    versions = sorted(member.card.versions.items())
    return f"{machine.accelerator} {machine.chip} {card.shape.cpu_arithmetic} {versions}"
