"""Which machine a job runs on: the fleet's cards as candidates, the planner's choice, and its reasons.

A job that has to stay, or a machine without others, never gets here as far as the planner: it runs here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from fleetd.errors import FleetError, NoMachine
from fleetd.models.catalog import find
from fleetd.p2p.membership.cards import Card
from fleetd.p2p.session.transport import PeerStream
from fleetd.plan.affinity import Affinity, chain
from fleetd.plan.route import SELF, Candidate, Holding, Ranked, RouteQuestion, route
from fleetd.requests.job import CHARS_PER_TOKEN, LOCAL, Exactness, Job, Planned

# An answer whose length is left open.
_ANSWER_TOKENS = 256
THIS_NODE = ""


@dataclass(frozen=True, slots=True)
class Member:
    """A machine of the fleet as placing sees it. ``reach``: ``route.USABLE``, or why it is not.

    ``bytes_per_s``: what may be relied on of the way that streams to it would take.
    """

    card: Card
    name: str
    reach: str
    sees_prompts: bool
    rtt_s: float
    bytes_per_s: float = 0.0


class Others(Protocol):
    """The rest of the fleet."""

    def machines(self) -> Iterable[Member]: ...
    def request(self, node_id: str, method: str, body: bytes) -> PeerStream: ...


@dataclass(frozen=True, slots=True)
class Placement:
    """``node_id`` is THIS_NODE or a peer's; ``digest``: of the files that it would run, "" where unknown."""

    node_id: str
    planned: Planned
    digest: str = ""


class Placer:
    """Args:
    own_card: what this machine tells others of itself now.
    local_only: by the settings, no prompt leaves this machine.
    """

    def __init__(self, others: Others, own_card: Callable[[], Card], *, local_only: bool = False) -> None:
        self.others = others
        self._own_card = own_card
        self._local_only = local_only
        self._affinity = Affinity()
        self._key = os.urandom(16)

    def choose(
        self,
        job: Job,
        name: str,
        *,
        here: bool,
        can_pull: bool,
        tried: frozenset[str],
        why: FleetError | None,
    ) -> Placement:
        """Where to run it next.

        Args:
            here: the model's files are on this machine.
            can_pull: they are not, but this machine fetches them by itself.
            tried: where it failed already.
            why: what was wrong there, or why the model is not here; raised where nothing else is left.
        """
        reason = str(why) if why is not None and tried else ""
        staying = Placement(THIS_NODE, Planned("local", LOCAL.nodes, LOCAL.exactness, reason))
        possible = (here or can_pull) and THIS_NODE not in tried
        if job.local_only or self._local_only:
            if possible:
                return staying
            raise why or NoMachine(f"{name} is not on this machine, and this request stays here.")
        machines = list(self.others.machines())
        if not machines and possible:
            return staying
        ranked = self.rank(job, name, machines, here=here, can_pull=can_pull, tried=tried)
        if not ranked.placements:
            if possible:
                # Its engine knows best what it can hold, and says it with the figures.
                return staying
            raise self._nowhere(name, ranked, why, tried=bool(tried))
        best = ranked.placements[0]
        if best.node_id == THIS_NODE:
            return staying
        card = next(machine.card for machine in machines if machine.card.node_id == best.node_id)
        exactness: Exactness = "exact" if alike(self._own_card(), card, name) else "plan"
        return Placement(best.node_id, Planned("remote", (best.name,), exactness, reason), best.digest)

    def rank(
        self,
        job: Job,
        name: str,
        machines: Iterable[Member],
        *,
        here: bool,
        can_pull: bool,
        tried: frozenset[str],
    ) -> Ranked:
        """Every machine, priced or refused."""
        own = self._own_card()
        text = job.prompt_text
        links = chain(text, self._key)
        ask = RouteQuestion(
            name,
            prompt_tokens=len(text) // CHARS_PER_TOKEN,
            max_tokens=min(job.request.max_tokens or _ANSWER_TOKENS, _ANSWER_TOKENS),
            digest=job.digest,
            exclude=tried,
        )
        mine = candidate(own, name, node_id=THIS_NODE, title="this machine", reach=SELF, can_pull=can_pull)
        if not here:
            mine = _without(mine)
        candidates = [
            mine,
            *(
                candidate(
                    machine.card,
                    name,
                    node_id=machine.card.node_id,
                    title=machine.name,
                    reach=machine.reach,
                    sees_prompts=machine.sees_prompts,
                    rtt_s=machine.rtt_s,
                )
                for machine in machines
            ),
        ]

        def with_cache(c: Candidate) -> Candidate:
            chars = self._affinity.cached_chars(c.node_id, name, links)
            return replace(c, cached_tokens=chars // CHARS_PER_TOKEN)

        return route(ask, map(with_cache, candidates))

    def computed(self, node_id: str, name: str, job: Job) -> None:
        """A machine has answered: the next turn of this conversation is cheapest there."""
        self._affinity.computed(node_id, name, chain(job.prompt_text, self._key))

    @staticmethod
    def _nowhere(name: str, ranked: Ranked, why: FleetError | None, *, tried: bool) -> FleetError:
        telling = [
            r.sentence
            for r in ranked.rejected
            if r.node_id != THIS_NODE and r.code not in ("absent", "tried")
        ]
        if why is not None and (tried or not telling):
            return why
        return NoMachine(
            f"No machine of the fleet can run {name} now: {' '.join(telling) or 'none has it.'}",
            hint="`fleetctl peers` shows what each machine has.",
            param="model",
        )


def alike(own: Card, other: Card, model: str) -> bool:
    """Whether both have measured that they compute the same bytes from the same files.

    Unknown while one of them has never loaded the model.
    """
    found = [next((m for m in card.models if m.name == model), None) for card in (own, other)]
    mine, theirs = found
    return (
        mine is not None
        and theirs is not None
        and mine.digest == theirs.digest != ""
        and mine.arithmetic == theirs.arithmetic != ""
    )


def candidate(
    card: Card,
    model: str,
    *,
    node_id: str,
    title: str,
    reach: str,
    sees_prompts: bool = True,
    rtt_s: float = 0.0,
    can_pull: bool = False,
) -> Candidate:
    """A card as the planner wants it."""
    held = next((m for m in card.models if m.name == model), None)
    holding = (
        None
        if held is None
        else Holding(
            digest=held.digest,
            state=held.state,
            weights_bytes=held.weights_bytes,
            memory_bytes=held.memory_bytes,
            prefill_tok_s=held.prefill_tok_s,
            decode_tok_s=held.decode_tok_s,
            roles=tuple(held.roles),
        )
    )
    machine = card.machine
    return Candidate(
        node_id=node_id,
        name=title,
        reach=reach,
        sees_prompts=sees_prompts,
        chip=machine.chip,
        accelerator=machine.accelerator,
        cores=machine.cores,
        memory_bytes=machine.memory_bytes,
        available_bytes=card.available_bytes,
        evictable_bytes=card.evictable_bytes,
        rtt_s=rtt_s,
        running=card.running,
        waiting=card.waiting,
        max_streams=card.max_streams,
        draining=card.draining,
        model=holding,
        can_pull=can_pull,
    )


def _without(mine: Candidate) -> Candidate:
    """This machine's card may be a moment older than the files."""
    return replace(mine, model=None)


def canonical(ref: str) -> str:
    """The name under which every machine knows a model."""
    entry = find(ref)
    return entry.name if entry is not None else ref
