"""The machines that can do work for this one: what is known of each, which may be asked, which failed lately.

Routing, shared prefill, smart prefill and drafting all read this one view, and all report failures, speeds
and answers to it. A machine that failed at one kind of work is therefore not asked for another kind either.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile

import msgspec
from msgspec import structs
from msgspec.structs import replace

from fleetd import limits
from fleetd.errors import (
    BadRequest,
    Draining,
    EngineError,
    FleetError,
    Incompatible,
    ModelError,
    ModelNotFound,
    ModelRefused,
    ModelUnsupported,
    OutOfMemory,
    Overloaded,
    PeerError,
    PeerWrong,
    ScorerNotReady,
)
from fleetd.p2p.membership.cards import Card, ModelCard
from fleetd.plan import chip_speeds
from fleetd.plan.affinity import BLOCK_CHARS, Affinity, SessionPlaces
from fleetd.plan.chip_speeds import compiles_late
from fleetd.plan.costs import LinkSpeed, PrefillSpeed
from fleetd.plan.fetch_speeds import FetchSpeed, FetchSpeeds
from fleetd.plan.prefill.options import PrefillOption
from fleetd.plan.refusals import THIS_NODE, Refusal
from fleetd.plan.speed_corrections import CorrectedWork, PromptWork, SpeedCorrections
from fleetd.requests.job import CHARS_PER_TOKEN, THIS_NAME, Job
from fleetd.requests.members import claims
from fleetd.requests.members.peer_backoff import PeerBackoff, Work
from fleetd.requests.members.rank_cores import beside_ranks

# Refusals that end by themselves, and soon: a machine is not left out for long after one.
_PASSING = (Overloaded, Draining, OutOfMemory, ScorerNotReady)
# What concerns one model alone: its files, its engine, or the room for it. Silence, lies and what nobody can
# read are the machine's.
_OF_ONE_MODEL = (EngineError, ModelError, ModelNotFound, OutOfMemory, ScorerNotReady, Incompatible)


class SentRequests(msgspec.Struct, frozen=True):
    """This machine's requests that are with another one now, and what it has yet to prefill for them."""

    requests: int = 0
    unread_tokens: int = 0


class Member(msgspec.Struct, frozen=True):
    """One machine at one moment: a paired machine, or this one (``here``)."""

    card: Card
    name: str
    # Why it cannot be reached; "" if it can.
    unusable: str = ""
    sees_prompts: bool = True
    # Seconds there and back.
    rtt_s: float = 0.0
    # What the path that a stream would take carries at least.
    bytes_per_s: float = 0.0
    here: bool = False
    # Why it is not asked for a while after a failure; "" if it may be.
    left_out: str = ""
    # The same by digest, for work with that model only.
    models_left_out: Mapping[str, str] = msgspec.field(default_factory=dict)
    # By model, the speeds that its own card claims and ``card`` does not have, as a clause.
    capped: Mapping[str, str] = msgspec.field(default_factory=dict)
    # Seconds that waking it probably takes; 0 for a machine that is awake or not to be woken.
    wake_s: float = 0.0
    # Another number once it was unpaired and paired again.
    pairing: int = 0
    # Its monotonic clock less this machine's, in seconds; None if not known.
    clock_offset_s: float | None = None

    @property
    def node_id(self) -> str:
        return THIS_NODE if self.here else self.card.node_id

    @property
    def life(self) -> str:
        """Key for what the machine's prefix caches hold: another one once its daemon has started again, or
        once it was unpaired and paired again."""
        return f"{self.node_id} {0 if self.here else self.card.epoch} {self.pairing}"

    @property
    def link(self) -> LinkSpeed | None:
        """The path from this machine; None for this machine itself."""
        return None if self.here else LinkSpeed(self.bytes_per_s, self.rtt_s)

    def chip(self, arithmetic: str) -> chip_speeds.Hardware:
        """Its published figures, with a model that a CPU multiplies by in this arithmetic."""
        facts = self.card.machine
        return chip_speeds.hardware_of(facts.chip, facts.accelerator, facts.cores, arithmetic)

    def model(self, name: str) -> ModelCard | None:
        return next((model for model in self.card.models if model.name == name), None)

    def model_with(self, digest: str) -> ModelCard | None:
        """The model with exactly these files; its name there may be another."""
        return next((model for model in self.card.models if digest and model.digest == digest), None)

    def why_left_out(self, digest: str) -> str:
        """Why it is not asked for work with these files, "" if it may be."""
        return self.left_out or self.models_left_out.get(digest, "")


def eligible(
    member: Member, model: str = "", *, even_left_out: bool = False, even_asleep: bool = False
) -> Refusal | None:
    """Why a machine must not be asked for work on a prompt; None if it may be. The most lasting reason first.

    Args:
        model: a digest; the machine needs these files. "": it needs none.
        even_left_out: also ask a machine that failed a short while ago.
        even_asleep: also ask one that can be woken.
    """
    name = member.name
    if not member.here:
        if not member.sees_prompts:
            return Refusal("private", f"{name} may not see prompts.")
        if member.unusable and not (even_asleep and member.wake_s):
            return Refusal("unusable", f"{name} cannot be used: {member.unusable.rstrip('.')}.")
    if member.card.draining:
        return Refusal("draining", f"{name} is stopping.")
    if model and member.model_with(model) is None:
        return Refusal("other_files", f"{name} has no model with these files.")
    if not even_left_out and (why := member.why_left_out(model)):
        return Refusal("failed", f"{name}: {why}")
    return None


def expected_load_s(model: ModelCard) -> float:
    """Seconds that a load of it takes by its machine's card, else by its size."""
    return model.load_s or chip_speeds.load_s(model.shape.weights_bytes)


class Members:
    """The fleet as all services of one daemon see it, and what they learned of its machines.

    Args:
        listed: the other machines that have sent a card; none without a fleet.
        own_card: what this machine tells others of itself; None before it has told anything.
        unaided: whether a machine that answers for this one must do it without the help of others.
        local_only: by the settings, no prompt leaves this machine, so there are no others.
    """

    def __init__(
        self,
        listed: Callable[[], Iterable[Member]] = tuple,
        own_card: Callable[[], Card | None] = lambda: None,
        *,
        unaided: Callable[[], bool] = lambda: False,
        local_only: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.affinity = Affinity(os.urandom(16))
        self.sessions = SessionPlaces(os.urandom(16))
        self.corrections = SpeedCorrections()
        # Machines that were late once because kernels were compiled, and the kind of work.
        self._forgiven = set[tuple[str, Work]]()
        self._fetch_speeds = FetchSpeeds()
        self.backoff = PeerBackoff()
        self.unaided = unaided
        # By model: how its last prompt here was prefilled, which the next one keeps if two ways are alike.
        self.last_prefill: dict[str, PrefillOption] = {}
        self.local_only = local_only
        # By node id.
        self.requests_at: Callable[[str], SentRequests] = lambda node_id: SentRequests()
        # Told of a machine that sent wrong keys and values.
        self.lied: Callable[[str], object] = lambda node_id: None
        # Machines that have done what they were asked for, and have not failed since.
        self._proven: set[str] = set()
        # By request: where its prompt is read at the moment, with which model, and the text's hashes.
        self._being_read: dict[str, tuple[str, str, list[bytes]]] = {}
        # How many questions about prompts machines have left unanswered, one after the other, and when the
        # last of them was given up.
        self._unanswered: dict[str, tuple[int, float]] = {}
        self._listed = listed
        self._own_card = own_card
        self._monotonic = monotonic

    def here(self) -> Member:
        """This machine; with an empty card before it has told one."""
        return Member(beside_ranks(self._own_card() or Card(THIS_NAME, 0, 0)), THIS_NAME, here=True)

    def others(self, work: Work) -> list[Member]:
        """The other machines, with such speeds as they can have, and at least as busy as this one makes them.

        ``left_out`` is set for those that are not to do ``work`` after a failure, or on trial.
        """
        if self.local_only:
            return []
        own = self._own_card()
        return [self._seen(found, own, work) for found in self._listed()]

    def _seen(self, found: Member, own: Card | None, work: Work) -> Member:
        claim, sent = found.card, self.requests_at(found.node_id)
        card = claims.believed(claim, own)
        capped = claims.capped(claim, card) if card is not claim else {}
        card = beside_ranks(card)
        if sent.requests:
            card = structs.replace(
                card,
                running=max(card.running, sent.requests - card.waiting),
                unread_tokens=max(card.unread_tokens, sent.unread_tokens),
            )
        reasons = self.backoff.reasons(found.node_id, work, self._monotonic())
        left_out = reasons.pop("", "")
        if work == "answer" and not left_out and found.node_id not in self._proven:
            left_out = _on_trial(sent.requests)
        return replace(found, card=card, left_out=left_out, models_left_out=reasons, capped=capped)

    def capped(self, model: str) -> list[str]:
        """A sentence for each machine that claims an impossible speed for a model."""
        return [
            f"{found.name} claims {found.capped[model]}: its hardware can do no more."
            for found in self.others("answer")
            if model in found.capped
        ]

    def model_at(self, node_id: str, name: str) -> tuple[ModelCard | None, bool]:
        """A model as another machine's card has it, and whether a request for it would have to wait there."""
        found = next((member for member in self.others("answer") if member.node_id == node_id), None)
        if found is None or (model := found.model(name)) is None:
            return None, True
        card = found.card
        return model, model.state != "loaded" or card.waiting > 0 or card.running >= card.max_streams

    def has_loaded(self, node_id: str, name: str) -> bool:
        """True if a machine's card says that it has loaded a model."""
        machines = (self.here(), *self.others("answer"))
        found = next((each.model(name) for each in machines if each.node_id == node_id), None)
        return found is not None and found.state == "loaded"

    # ---- what was learned --------------------------------------------------------------------------------

    def left_out(self, node_id: str, work: Work, model: str = "") -> str:
        """Why a machine is not asked for this work now, with the model of this digest or with any, as a
        sentence; "" if it may be asked."""
        reasons = self.backoff.reasons(node_id, work, self._monotonic())
        return reasons.get("") or reasons.get(model, "")

    def failure(self, node_id: str, work: Work) -> str:
        """The code of the failure at this very work that leaves a machine out now; "" if there is none."""
        return self.backoff.code(node_id, work, self._monotonic())

    def failed(self, node_id: str, work: Work, error: FleetError, model: str = "") -> None:
        """Leave a machine out for a while.

        Faults of the machine, its engine or the path to it concern every kind of work; incompatible models
        concern this kind alone. Another machine that cannot do now what its card says may be right once; one
        that goes on so is left out of this work, shortly at first. A request that is wrong is no fault of the
        machine.

        Args:
            model: the digest of the model it was asked for; what concerns that alone leaves the machine out
                for it alone. "" if it is unknown.
        """
        now_s = self._monotonic()
        if node_id == THIS_NODE or not isinstance(error, _OF_ONE_MODEL):
            model = ""
        if isinstance(error, PeerWrong) and work in ("fetch", "prefill"):
            self.lied(node_id)
        full_here = isinstance(error, OutOfMemory) and node_id == THIS_NODE
        if isinstance(error, PeerError | EngineError) or full_here:
            alone = isinstance(error, Incompatible | OutOfMemory)
            self.backoff.failed(node_id, work, error.code, now_s, model=model, this_work_only=alone)
            self._proven.discard(node_id)
        elif node_id != THIS_NODE and not isinstance(error, BadRequest | ModelRefused | ModelUnsupported):
            most_s = limits.BACKOFF_S if isinstance(error, _PASSING) else limits.BACKOFF_MOST_S
            self.backoff.refused(node_id, work, error.code, now_s, most_s, model=model)

    def late(self, node_id: str, work: Work) -> None:
        """Leave a machine out of this kind of work for a while: it took too long. The first time is forgiven
        if the machine compiles kernels late: they are there when it is asked again."""
        if work != "fetch" and self._compiles(node_id) and (node_id, work) not in self._forgiven:
            self._forgiven.add((node_id, work))
            return
        self.backoff.failed(node_id, work, "timeout", self._monotonic(), this_work_only=True)
        self._proven.discard(node_id)

    def succeeded(self, node_id: str, work: Work, model: str = "") -> None:
        """It has done this work with the model of this digest."""
        self.backoff.succeeded(node_id, work, model)
        self._proven.add(node_id)

    def proven(self, node_id: str) -> bool:
        """True if a machine has done what it was asked for, and has not failed since."""
        return node_id in self._proven

    def read(self, node_id: str, model: str, job: Job, share: float = 1.0) -> None:
        """A machine has read this share of a prompt, so its prefix cache holds it."""
        found = self._member(node_id)
        life = found.life if found is not None else ""
        self.sessions.ran(job.session, model, life)
        # Keys of a prompt in part are in no prefix cache.
        if job.request.keep is None:
            links = self.affinity.links(job.prompt_text)
            card = found.model(model) if found is not None else None
            room_chars = card.prefix_tokens * CHARS_PER_TOKEN if card is not None else 0
            self.affinity.computed(life, model, links[: int(share * len(links))], room_chars)

    def reads(self, request_id: str, node_id: str, model: str, job: Job) -> None:
        """A machine has been asked to read a prompt. Until ``reads_no_more``, prompts with the same beginning
        are placed there: they wait for it instead of being read a second time elsewhere."""
        if job.request.keep is None:
            links = self.affinity.links(job.prompt_text)
            self._being_read[request_id] = (self._life(node_id), model, links)

    def reads_no_more(self, request_id: str) -> None:
        """The prompt of a request has been read, or will not be."""
        self._being_read.pop(request_id, None)

    def being_read_chars(self, life: str, model: str, links: list[bytes]) -> int:
        """Characters at the beginning of a text that are in a prompt which a machine reads at the moment."""
        asked = [found for at, name, found in self._being_read.values() if (at, name) == (life, model)]
        alike = (
            sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(links, found, strict=False)))
            for found in asked
        )
        return max(alike, default=0) * BLOCK_CHARS

    def lost_prompts(self, node_id: str, model: str) -> None:
        """Forget what a machine's prefix cache held: the engine of the model has died there."""
        self.affinity.forget(self._life(node_id), model)

    def known_tokens(self, node_id: str, model: str, text: str) -> int:
        """About how many tokens at the beginning of a text a machine has read before."""
        chars = self.affinity.cached_chars(self._life(node_id), model, self.affinity.links(text))
        return chars // CHARS_PER_TOKEN

    def clock_offset_s(self, node_id: str) -> float | None:
        """A machine's monotonic clock less this one's, in seconds; None if not known, or for one that is not
        a member any more."""
        if node_id == THIS_NODE:
            return 0.0
        member = self._member(node_id)
        return member.clock_offset_s if member is not None else None

    def _member(self, node_id: str) -> Member | None:
        if node_id == THIS_NODE:
            return self.here()
        return next((each for each in self._listed() if each.node_id == node_id), None)

    def _life(self, node_id: str) -> str:
        found = self._member(node_id)
        return found.life if found is not None else ""

    def correction(
        self, node_id: str, model: str, speed: PrefillSpeed, work: PromptWork = "prefill"
    ) -> float:
        """How many times as long a machine takes as its own figures for a model say, by earlier work."""
        of = CorrectedWork(node_id, model, work)
        return self.corrections.factor(of, speed.token_s, self._monotonic())

    def computed(
        self,
        node_id: str,
        model: str,
        token_s: float,
        work: PromptWork = "prefill",
        *,
        expected_s: float,
        took_s: float,
    ) -> None:
        """What a part of a prompt took; ``expected_s`` and ``token_s`` by the machine's own figures."""
        of, now_s, late = CorrectedWork(node_id, model, work), self._monotonic(), self._compiles(node_id)
        self.corrections.ran(of, token_s, now_s, expected_s=expected_s, took_s=took_s, compiles=late)

    def waited(
        self, node_id: str, model: str, token_s: float, work: PromptWork, *, expected_s: float, took_s: float
    ) -> None:
        """What an answer of another machine took, by this machine's clock. Only an answer that is later than
        expected changes the machine's correction, and ``limits.ANSWER_OVERHEAD_S`` of its time does not
        count: requests take some time besides computing.
        """
        took_s = max(expected_s, took_s - limits.ANSWER_OVERHEAD_S)
        of, now_s, late = CorrectedWork(node_id, model, work), self._monotonic(), self._compiles(node_id)
        self.corrections.ran(
            of, token_s, now_s, expected_s=expected_s, took_s=took_s, seen_here=True, compiles=late
        )

    def _compiles(self, node_id: str) -> bool:
        found = self._member(node_id)
        return found is not None and compiles_late(found.card.machine.accelerator)

    def fetch_speed(self, node_id: str, link: LinkSpeed, bytes_per_s: float, cached: float) -> FetchSpeed:
        """How fast blocks come from a machine; see ``FetchSpeeds.speed``."""
        return self._fetch_speeds.speed(node_id, link, bytes_per_s, cached, self._monotonic())

    def fetched(
        self, node_id: str, cached: float, n_bytes: float, *, opening_s: float, took_s: float
    ) -> None:
        """Blocks have come from there; see ``FetchSpeeds.fetched``."""
        now_s = self._monotonic()
        self._fetch_speeds.fetched(node_id, cached, n_bytes, opening_s=opening_s, took_s=took_s, now_s=now_s)

    def answered(self, node_id: str) -> None:
        """A machine has said what it keeps of a prompt."""
        self._unanswered.pop(node_id, None)
        self.backoff.heard(node_id, "fetch")

    def unanswered(self, node_id: str, asked_s: float) -> None:
        """A machine has not said in time what it keeps of a prompt. The prompt has waited for it, so one that
        is silent again and again is asked for nothing of the kind for a while: not for long at first, since a
        machine may just be busy.

        Args:
            asked_s: when it was asked, in monotonic seconds. Of questions of the same moment, as subagents
                have them, one counts.
        """
        count, given_up_s = self._unanswered.get(node_id, (0, -math.inf))
        if asked_s < given_up_s:
            return
        count += 1
        if count >= limits.FETCH_UNANSWERED:
            self.backoff.silent(node_id, "fetch", self._monotonic())
            count = 0
        self._unanswered[node_id] = (count, self._monotonic())


def _on_trial(asked: int) -> str:
    """Why a machine that has not proved itself gets no further request, "" if it may have one."""
    if asked < limits.ANSWERS_ON_TRIAL:
        return ""
    return (
        f"It has yet to complete its first answer since it was found, and has {asked} requests of this one."
    )
