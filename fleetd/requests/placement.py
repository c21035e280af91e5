"""Which machine a request runs on: the members as candidates, the planner's choice, and its reasons.

A request that must stay runs here, and so does every request without a fleet; the planner is not asked then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fleetd.errors import EngineError, FleetError, NoMachine, PeerError
from fleetd.models.catalog import find
from fleetd.p2p.membership.cards import Card
from fleetd.p2p.session.transport import PeerStream
from fleetd.plan.refusals import THIS_NODE
from fleetd.plan.route import Candidate, Ranked, RouteQuestion, route
from fleetd.requests.job import CHARS_PER_TOKEN, LOCAL, Exactness, Job, Planned
from fleetd.requests.members import Member, Members, eligible

# Assumed length of an answer without a limit.
_ANSWER_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Placement:
    """``node_id`` is THIS_NODE or a peer's. ``digest``: of the files that it would run, "" if unknown."""

    node_id: str
    planned: Planned
    digest: str = ""


class Placer:
    """Args:
    request: begins a request at another machine: its id, a method and a body.
    """

    def __init__(self, members: Members, request: Callable[[str, str, bytes], PeerStream]) -> None:
        self.request = request
        self._members = members

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
            why: the failure there, or why the model is not here; raised if no machine is left.
        """
        reason = str(why) if why is not None and tried else ""
        staying = Placement(THIS_NODE, Planned("local", LOCAL.nodes, LOCAL.exactness, reason))
        possible = (here or can_pull) and THIS_NODE not in tried
        if job.local_only or self._members.local_only:
            if possible:
                return staying
            raise why or NoMachine(f"{name} is not on this machine, and this request stays here.")
        others = self._members.others("answer")
        if not others and possible:
            return staying
        ranked = self.rank(job, name, others, here=here, can_pull=can_pull, tried=tried)
        if not ranked.placements:
            if possible:
                # Its engine knows its memory best, and refuses with the figures.
                return staying
            raise self._no_machine(name, ranked, why, tried=bool(tried))
        best = ranked.placements[0]
        if best.node_id == THIS_NODE:
            return staying
        card = next(member.card for member in others if member.node_id == best.node_id)
        exactness: Exactness = "exact" if alike(self._members.here().card, card, name) else "plan"
        return Placement(best.node_id, Planned("remote", (best.name,), exactness, reason), best.digest)

    def rank(
        self,
        job: Job,
        name: str,
        others: Sequence[Member],
        *,
        here: bool,
        can_pull: bool,
        tried: frozenset[str],
    ) -> Ranked:
        """Every machine, priced or refused."""
        text = job.prompt_text
        links = self._members.affinity.links(text)
        ask = RouteQuestion(
            name,
            prompt_tokens=len(text) // CHARS_PER_TOKEN,
            max_tokens=min(job.request.max_tokens or _ANSWER_TOKENS, _ANSWER_TOKENS),
            digest=job.digest,
            exclude=tried,
        )

        def of(member: Member) -> Candidate:
            chars = self._members.affinity.cached_chars(member.node_id, name, links)
            # This machine's card may be older than its files.
            missing = member.here and not here
            return candidate(member, "" if missing else name, can_pull and member.here, chars)

        return route(ask, map(of, [self._members.here(), *others]))

    def failed(self, node_id: str, error: FleetError) -> None:
        """Another machine did not answer; the next requests go elsewhere for a while if they can."""
        if node_id != THIS_NODE and isinstance(error, PeerError | EngineError):
            self._members.failed(node_id, "answer", error)

    @staticmethod
    def _no_machine(name: str, ranked: Ranked, why: FleetError | None, *, tried: bool) -> FleetError:
        reasons = [
            rejected.refusal.sentence
            for rejected in ranked.rejected
            if rejected.node_id != THIS_NODE and rejected.refusal.code not in ("absent", "tried")
        ]
        if why is not None and (tried or not reasons):
            return why
        return NoMachine(
            f"No machine of the fleet can run {name} now: {' '.join(reasons) or 'none has it.'}",
            hint="`fleetctl peers` shows what each machine has.",
            param="model",
        )


def alike(own: Card, other: Card, model: str) -> bool:
    """True if both have measured that they compute the same bytes from the same files.

    False while one of them has never loaded the model.
    """
    mine, theirs = (next((m for m in card.models if m.name == model), None) for card in (own, other))
    return (
        mine is not None
        and theirs is not None
        and mine.digest == theirs.digest != ""
        and mine.arithmetic == theirs.arithmetic != ""
    )


def candidate(member: Member, model: str, can_pull: bool = False, cached_chars: int = 0) -> Candidate:
    """A member as the planner needs it for a model, by its name."""
    card, facts, found = member.card, member.card.machine, member.model(model)
    bare = Candidate(
        node_id=member.node_id,
        name=member.name,
        refusal=eligible(member, even_left_out=True),
        left_out=bool(member.left_out),
        chip=facts.chip,
        accelerator=facts.accelerator,
        cores=facts.cores,
        memory_bytes=facts.memory_bytes,
        available_bytes=card.usable_bytes or card.available_bytes,
        evictable_bytes=card.evictable_bytes,
        rtt_s=member.rtt_s,
        running=card.running,
        waiting=card.waiting,
        max_streams=card.max_streams,
        can_pull=can_pull,
        cached_tokens=cached_chars // CHARS_PER_TOKEN,
    )
    if found is None:
        return bare
    return replace(
        bare,
        state=found.state,
        digest=found.digest,
        weights_bytes=found.weights_bytes,
        needed_bytes=found.memory_bytes,
        prefill_tok_s=found.prefill_tok_s,
        decode_tok_s=found.decode_tok_s,
        doubtful=found.doubtful,
        roles=tuple(found.roles),
    )


def canonical(ref: str) -> str:
    """The name under which every machine knows a model."""
    entry = find(ref)
    return entry.name if entry is not None else ref
