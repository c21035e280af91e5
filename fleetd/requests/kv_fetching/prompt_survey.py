"""Before a prompt is placed: how much of it this machine and the others keep.

One question to each machine that may see it, all at once, and one look at this machine's disk. What is not
told in time counts as nothing; the prompt waits no longer for it. The time is a small part of what reading
the prompt here takes, and a machine whose path is longer than that is not asked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from fleetd import limits
from fleetd.errors import FleetError, PeerUnreachable
from fleetd.plan.beginnings import KeptBeginning
from fleetd.plan.costs import MEASURED_TOKENS, PrefillSpeed
from fleetd.plan.refusals import THIS_NODE
from fleetd.process.observe import get_logger
from fleetd.requests.job import CHARS_PER_TOKEN, Job
from fleetd.requests.kv_fetching import messages
from fleetd.requests.kv_fetching.kept_prompts import KeptPrompts, beginning_of, links
from fleetd.requests.members.members import Member, Members, eligible
from fleetd.requests.placement.placement import PromptPlaces
from fleetd.requests.placement.planner_facts import speed_of
from fleetd.requests.ports import FleetPort

log = get_logger("fleetd.survey")


class PromptSurvey:
    """Args:
    here: what this machine keeps.
    looked: told how many seconds a prompt has waited for the answers.
    """

    def __init__(
        self,
        partners: FleetPort,
        members: Members,
        here: KeptPrompts,
        looked: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._looked = looked
        self._partners = partners
        self._members = members
        self._here = here

    async def of_job(self, job: Job, model: str) -> PromptPlaces:
        """What machines keep of a request's prompt; nothing if it must stay here.

        Of one that was just read here, what is on this disk, while this machine is busy: others may have it
        from here. Of one that may be shortened, what is on this disk in any case: it is read whole if that is
        sooner.
        """
        text, own = job.prompt_text, self._members.here()
        shortens = job.smart is not None
        if (job.local_only and not shortens) or job.request.keep is not None:
            return {}
        here = own.model(model)
        if here is not None and here.state != "loaded":
            here = None
        known = self._members.known_tokens(THIS_NODE, model, text) if here is not None else 0
        new = len(text) // CHARS_PER_TOKEN - known
        busy = own.card.running > 0 and known >= limits.FETCH_LEAST_TOKENS
        if new < limits.FETCH_LEAST_TOKENS and not busy:
            return {}
        begun_s = time.monotonic()
        others = new >= limits.FETCH_LEAST_TOKENS and not job.local_only
        # Others' prompts come first here.
        until_read = range(known, known + new + own.card.unread_tokens)
        within_s = _within_s(speed_of(here) if here is not None else None, until_read)
        found = await self.of_text(text, model, others=others, within_s=within_s, alone=shortens)
        self._looked(time.monotonic() - begun_s)
        return found

    async def of_text(
        self,
        text: str,
        model: str,
        *,
        others: bool = True,
        within_s: float | None = None,
        alone: bool = False,
    ) -> PromptPlaces:
        """Returns nothing if no other machine may be asked: then everything is answered here.

        Args:
            others: ask them, too.
            alone: tell of this machine's own disk even then.
            within_s: seconds that they have for it; None for ``FETCH_LOOK_S``.
        """
        within_s = limits.FETCH_LOOK_S if within_s is None else within_s
        asked, digest = links(text), self._digest(model)
        sources = self._sources()
        if not asked or not digest or not (sources or alone):
            return {}
        members = [member for member in sources if others and member.rtt_s < within_s]
        questions = (self._ask(member, digest, asked, within_s) for member in members)
        answers = await asyncio.gather(self._look(digest, asked), *questions)
        nodes = [THIS_NODE, *(member.node_id for member in members)]
        return {node: found for node, found in zip(nodes, answers, strict=True) if found is not None}

    def _sources(self) -> list[Member]:
        """The machines to ask, those with the fastest links first."""
        found = [member for member in self._members.others("fetch") if eligible(member) is None]
        return sorted(found, key=lambda member: -member.bytes_per_s)[: limits.FETCH_ASKED]

    def _digest(self, model: str) -> str:
        """The digest of the files that the name stands for: here, or on the first machine that has them."""
        machines = (self._members.here(), *self._members.others("answer"))
        models = (member.model(model) for member in machines)
        return next((found.digest for found in models if found is not None and found.digest), "")

    async def _look(self, digest: str, asked: list[bytes]) -> KeptBeginning:
        return beginning_of(await asyncio.to_thread(self._here.look, digest, asked))

    async def _ask(
        self, member: Member, digest: str, asked: list[bytes], within_s: float
    ) -> KeptBeginning | None:
        body, asked_s = messages.encode(messages.TextQuestion(digest, asked)), time.monotonic()
        try:
            answer = await self._partners.ask(member.node_id, messages.LOOK, body, within_s=within_s)
            found = messages.decode(answer, messages.TextFound)
        except FleetError as error:
            log.debug("survey.no_answer", peer=member.node_id[:7], reason=str(error))
            # Silence for a moment says nothing of a machine.
            if isinstance(error, PeerUnreachable) and within_s >= limits.FETCH_LOOK_S:
                self._members.unanswered(member.node_id, asked_s)
            return None
        self._members.answered(member.node_id)
        return beginning_of(found)


def _within_s(here: PrefillSpeed | None, until_read: range) -> float:
    """How long a prompt may wait for what others say of it.

    Args:
        here: this machine's speed, None if it cannot read the prompt at once.
        until_read: the tokens that it would compute until it has read the prompt.
    """
    if here is None:
        return limits.FETCH_LOOK_S
    reading_s = here.total(1.0, until_read, MEASURED_TOKENS)
    return min(limits.FETCH_LOOK_S, limits.FETCH_LOOK_SHARE * reading_s)
