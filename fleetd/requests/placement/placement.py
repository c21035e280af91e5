"""Which machine a request runs on: the members as candidates, the planner's choice, and its reasons.

A request that must stay runs here, and so does every request without a fleet; the planner is not asked then.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from fleetd import limits
from fleetd.control.model_facts import KvBits, MeasuredSpeed
from fleetd.control.prefill_plan import StepView
from fleetd.engine.protocol import Ready
from fleetd.errors import FleetError, InvalidValue, NoMachine, from_code
from fleetd.models.catalog import find
from fleetd.models.folder import ModelFolder
from fleetd.p2p.membership.cards import Card, ModelCard
from fleetd.p2p.session.transport import PeerStream
from fleetd.plan.beginnings import Beginning, KeptBeginning, from_disk, from_peer
from fleetd.plan.costs import MEASURED_TOKENS, PrefillSpeed
from fleetd.plan.fetch_speeds import FetchSpeed
from fleetd.plan.prefill import step_names
from fleetd.plan.refusals import THIS_NODE
from fleetd.plan.route import Candidate, RouteQuestion
from fleetd.plan.ways import Home, Ways, plan
from fleetd.requests.job import CHARS_PER_TOKEN, LOCAL, THIS_NAME, Exactness, Job, Planned
from fleetd.requests.members.members import Member, Members, eligible
from fleetd.requests.members.named_machines import named
from fleetd.requests.placement import planner_facts

#: By node id, what machines keep of a prompt.
PromptPlaces = Mapping[str, KeptBeginning]
_NOWHERE: PromptPlaces = {}

# Assumed length of an answer without a limit.
ANSWER_TOKENS = 256
# Of a prompt's estimated tokens, this share is there at least.
_CERTAIN = 3 / 4


class Placement(msgspec.Struct, frozen=True):
    """``node_id`` is THIS_NODE or a peer's. ``digest``: of the files that it would run, "" if unknown.
    ``prefill_s``: by the plan, None if it was not priced. ``fetches``: what others keep of the prompt may be
    fetched; helpers compute it sooner otherwise. ``cached_tokens``: of the prompt's, those that are probably
    not computed. ``capped``: claims of others that are not believed.
    ``asleep``: it has to be woken first. ``kept_where``: which machine has read its beginning before, and if
    another one was chosen, why; "" where none has.
    """

    node_id: str
    planned: Planned
    digest: str = ""
    prefill_s: float | None = None
    asleep: bool = False
    capped: tuple[str, ...] = ()
    kept_where: str = ""
    fetches: bool = True
    cached_tokens: int = 0
    # What was planned until the first token, step by step and in all, and in all for this machine alone; None
    # if that was not priced. Steps that name no machine are of the one that answers.
    steps: tuple[StepView, ...] = ()
    first_s: float | None = None
    alone_s: float | None = None
    # Names of the other machines that have to hold the model with this one, which holds it alone for ();
    # None leaves it open.
    over: tuple[str, ...] | None = None


class AnswerTokens(msgspec.Struct, frozen=True):
    """Tokens of one answer: read before in its prompt, read for it, and decoded after the first one."""

    cached: int
    prefilled: int
    decoded: int


class KnownTokens(msgspec.Struct, frozen=True):
    """About how many tokens at a prompt's beginning a machine has ``read`` before, and how many are in a
    prompt that it reads at the moment."""

    read: int = 0
    being_read: int = 0

    @property
    def tokens(self) -> int:
        """Those that are not computed for this prompt."""
        return max(self.read, self.being_read)

    @property
    def awaited(self) -> int:
        """Those of them that are in no cache yet."""
        return self.tokens - self.read


NOTHING_KNOWN = KnownTokens()


class WantedModel(msgspec.Struct, frozen=True):
    """A model by its canonical name.

    Args:
        here: its files are on this machine.
        can_pull: they are not, but this machine fetches them by itself.
        folder: the files, where a card may not show them yet.
    """

    name: str
    here: bool
    can_pull: bool = False
    folder: ModelFolder | None = None


class Placer:
    """Prices every way to answer a prompt, for requests and for people, and chooses a machine.

    Args:
        request: begins a request at another machine: its id, a method and a body.
        facts: what the engine of a model that is loaded here says of it.
        wake: returns once a sleeping machine is awake, or raises PeerUnreachable.
        needed_bytes: of memory, that a model which is installed here needs.
        kv_bits: in how many bits a load here would hold a model's keys and values.
    """

    def __init__(
        self,
        members: Members,
        request: Callable[[str, str, bytes], PeerStream],
        facts: Callable[[str], Ready | None] = lambda model: None,
        wake: Callable[[str], Awaitable[None]] | None = None,
        needed_bytes: Callable[[ModelFolder], int] = lambda folder: folder.weights_bytes,
        kv_bits: Callable[[str], KvBits] = lambda model: 0,
    ) -> None:
        self.request = request
        self.wake = wake
        self._members = members
        self._facts = facts
        self._needed_bytes = needed_bytes
        self._wanted_kv_bits = kv_bits

    def choose(
        self,
        job: Job,
        model: WantedModel,
        *,
        tried: frozenset[str],
        why: FleetError | None,
        places: PromptPlaces = _NOWHERE,
    ) -> Placement:
        """Where to run it next.

        Args:
            places: what each machine keeps of the prompt, as far as it was asked.
            tried: where it failed already.
            why: the failure there, or why the model is not here; raised if no machine is left.
        """
        reason = str(why) if why is not None and tried else ""
        alone = replace(LOCAL, reason=reason, kv_bits=self._kv_bits(model, self._members.here()))
        staying = Placement(THIS_NODE, alone)
        possible = (model.here or model.can_pull) and THIS_NODE not in tried
        if job.placement:
            return self._named(job, model, staying if possible else None, tried=tried, why=why)
        if job.local_only or self._members.local_only:
            if possible:
                return replace(staying, **self._priced_alone(job, model))
            raise why or NoMachine(f"{model.name} is not on this machine, and this request stays here.")
        others = self._members.others("answer")
        if job.request.exact:
            having = [member for member in others if self._model(model, member) is not None]
            others = [member for member in others if self._computes_the_same(member, model)]
            if having and not others and not possible and not tried:
                raise other_bytes(model.name, having)
        if not others and possible:
            return replace(staying, **self._priced_alone(job, model))
        capped = tuple(self.capped(model.name))
        staying = replace(staying, capped=capped)
        ways = self.rank(job, model, others, tried=tried, places=places)
        if not ways.placements:
            if possible:
                # Its engine knows its memory best, and refuses with the figures.
                return staying
            raise no_machine(model.name, ways, why, tried=bool(tried))
        best = ways.placements[0]
        if best.node_id == THIS_NODE:
            declined = ways.chosen is not None and ways.chosen.declined
            return replace(
                staying,
                kept_where=ways.kept_where,
                fetches=not declined,
                cached_tokens=ways.chosen.cached_tokens if ways.chosen is not None else 0,
                **_priced(ways),
            )
        member = next(member for member in others if member.node_id == best.node_id)
        return replace(self._remote(model, member, ways, reason), capped=capped)

    def _named(
        self,
        job: Job,
        model: WantedModel,
        staying: Placement | None,
        *,
        tried: frozenset[str],
        why: FleetError | None,
    ) -> Placement:
        """Where a request runs that names its machines. ``staying``: here, None if that is not possible.

        Raises as ``named``, and NoMachine if the machine that is named cannot run it.
        """
        first, *rest = named(self._members, job.placement)
        if job.local_only and (rest or not first.here):
            raise InvalidValue(
                "A request that stays on this machine cannot be placed on others.",
                hint="Leave out `local_only` or `placement`.",
                param="placement",
            )
        if first.here:
            if staying is None:
                raise why or NoMachine(f"{model.name} is not on this machine.", param="placement")
            return replace(staying, over=tuple(member.name for member in rest))
        if job.request.exact and not self._computes_the_same(first, model):
            raise other_bytes(model.name, [first])
        ways = self.rank(job, model, [first], tried=tried | {THIS_NODE})
        if not ways.placements:
            raise no_machine(model.name, ways, why, tried=bool(tried))
        return self._remote(model, first, ways, "")

    def over(self, names: Sequence[str]) -> tuple[str, ...]:
        """Names of the other machines that are to hold a model with this one. Raises as ``named``, and
        InvalidValue if this machine is not the first of ``names``."""
        first, *rest = named(self._members, names)
        if not first.here:
            raise InvalidValue(
                f"{first.name} alone is named, and this machine holds the first layers.",
                hint=f"Begin the list with {THIS_NAME!r}.",
                param="placement",
            )
        return tuple(member.name for member in rest)

    def _remote(self, model: WantedModel, member: Member, ways: Ways, reason: str) -> Placement:
        """On another machine, by the first of ``ways``."""
        best = ways.placements[0]
        exactness: Exactness = "exact" if self._computes_the_same(member, model) else "equivalent"
        return Placement(
            best.node_id,
            Planned("remote", (best.name,), exactness, reason, kv_bits=self._kv_bits(model, member)),
            best.digest,
            best.price.prefill_s,
            member.wake_s > 0,
            kept_where=ways.kept_where,
            cached_tokens=ways.chosen.cached_tokens if ways.chosen is not None else 0,
            **_priced(ways),
        )

    def _computes_the_same(self, member: Member, model: WantedModel) -> bool:
        here = self._members.here()
        alike = planner_facts.alike(here.card, member.card, model.name)
        return alike and self._kv_bits(model, here) == self._kv_bits(model, member)

    def _kv_bits(self, model: WantedModel, member: Member) -> KvBits:
        """Bits of each number of the model's keys and values on that machine; 0 is as they are computed."""
        if member.here:
            facts = self._facts(model.name)
            return facts.shape.kv_bits if facts is not None else self._wanted_kv_bits(model.name)
        card = member.model(model.name)
        return card.shape.kv_bits if card is not None else 0

    def _priced_alone(self, job: Job, model: WantedModel) -> dict[str, Any]:
        """What is planned for a request that this machine answers without others."""
        here, text = self._members.here(), job.prompt_text
        ask = RouteQuestion(model.name, len(text) // CHARS_PER_TOKEN, max_tokens=1, admitted=True)
        home = self._home(ask, model, here, (), (), self.known(model, text)(here), 0, _NOWHERE)
        return _priced(plan(ask, [home]))

    def capped(self, model: str) -> list[str]:
        """A sentence for each machine that claims a speed which its hardware cannot have."""
        return self._members.capped(model)

    def rank(
        self,
        job: Job,
        model: WantedModel,
        others: Sequence[Member],
        *,
        tried: frozenset[str],
        places: PromptPlaces = _NOWHERE,
    ) -> Ways:
        """Every way to answer a request, priced or refused."""
        text = job.prompt_text
        ask = RouteQuestion(
            model.name,
            prompt_tokens=len(text) // CHARS_PER_TOKEN,
            max_tokens=min(job.request.max_tokens or ANSWER_TOKENS, ANSWER_TOKENS),
            digest=job.digest,
            exclude=tried,
            admitted=True,
        )

        session = self._members.sessions.last(job.session, model.name)
        return self.ways(
            ask,
            model,
            self.known(model, text),
            others,
            session=session,
            places=places,
            exact=job.request.exact,
            unaided=job.images > 0,
        )

    def known(self, model: WantedModel, *texts: str) -> Callable[[Member], KnownTokens]:
        """What each machine has read of the beginning of one of the texts, by what was asked of it here."""
        affinity, being_read = self._members.affinity, self._members.being_read_chars
        links = [affinity.links(text) for text in texts]

        def tokens(member: Member) -> KnownTokens:
            found = self._model(model, member)
            if found is None or found.state != "loaded":
                return NOTHING_KNOWN  # unloading has given the prefix cache back
            read = max(affinity.cached_chars(member.life, model.name, each) for each in links)
            reading = max(being_read(member.life, model.name, each) for each in links)
            return KnownTokens(read // CHARS_PER_TOKEN, reading // CHARS_PER_TOKEN)

        return tokens

    def ways(
        self,
        ask: RouteQuestion,
        model: WantedModel,
        known: Callable[[Member], KnownTokens] = lambda member: NOTHING_KNOWN,
        others: Sequence[Member] | None = None,
        kept: int = 0,
        session: str = "",
        places: PromptPlaces = _NOWHERE,
        added: Sequence[Member] = (),
        exact: bool = False,
        unaided: bool = False,
    ) -> Ways:
        """Every way to answer a prompt, priced or refused.

        Args:
            added: machines that are not there, and are priced as if they were.
            known: what a machine has probably read of the prompt.
            others: the other machines that may answer; None for all of them.
            kept: of the prompt's tokens, those that are computed, where not all are.
            session: the ``life`` of the machine where a named session is.
            places: what each machine keeps of the prompt.
            exact: helpers send rows as they are held.
            unaided: no machine can help with the prompt, or has some of it: it has images.
        """
        others = [*(self._members.others("answer") if others is None else others), *added]
        here = self._members.here()
        helping = [here, *self._members.others("prefill"), *added]
        short = not ask.counted and ask.prompt_tokens < limits.SHARE_LEAST_TOKENS
        if short or unaided:
            helping = []  # only people want to hear why no machine helps with so short a prompt
        # Looked up once for all homes; mostly nothing of the prompt is kept anywhere.
        sources = [here, *self._members.others("fetch")] if places and not unaided else []
        machines = [(each, known(each)) for each in (here, *others)]
        homes = [
            self._home(ask, model, each, helping, sources, read, kept, places) for each, read in machines
        ]
        if exact:
            homes = [
                home if home.prompt is None else replace(home, prompt=planner_facts.as_held(home.prompt))
                for home in homes
            ]
        if not session:
            # Most clients do not name their sessions: a prompt goes on from the one that it begins with.
            most, read = max(machines, key=lambda pair: pair[1].tokens)
            session = most.life if 2 * read.tokens > ask.prompt_tokens else ""
        if session:
            homes = [
                replace(home, candidate=replace(home.candidate, session=member.life == session))
                for home, (member, _) in zip(homes, machines, strict=True)
            ]
        return plan(ask, homes)

    def _home(
        self,
        ask: RouteQuestion,
        model: WantedModel,
        member: Member,
        helping: Sequence[Member],
        sources: Sequence[Member],
        known: KnownTokens,
        kept: int,
        places: PromptPlaces,
    ) -> Home:
        """``helping``: the machines that could help it; ``sources``: those that it could fetch from."""
        if not member.here and self._members.unaided():
            helping = sources = ()  # it is asked to read the prompt alone
        found = self._model(model, member)
        told = places.get(member.node_id)
        if told is not None and found is not None and found.state == "loaded":
            # Unloading gives the prefix cache back.
            known = replace(known, read=max(known.read, told.memory_tokens))
        cached = known.tokens
        able = replace(
            candidate(member, found, can_pull=model.can_pull and member.here),
            cached_tokens=cached,
            awaited_tokens=known.awaited,
        )
        if found is None:
            return Home(able)
        facts = self._facts(model.name) if member.here else None
        if facts is not None:
            found = planner_facts.loaded_here(found, facts)
        else:
            found = planner_facts.as_told(found, helping)
        shape, held = found.shape, kept or ask.prompt_tokens
        kv_bytes = shape.sizes.of(held if ask.counted else int(held * _CERTAIN))
        chain = planner_facts.chain_of(member, helping, found)
        spec, *helpers = planner_facts.corrected(chain, self._members, found.digest)
        speed = planner_facts.with_context(member, found.speed, shape)
        decode_tok_s = speed.decode_tok_s / self._decode_correction(member, found)
        return Home(
            replace(
                able,
                speed=replace(speed, decode_tok_s=decode_tok_s),
                correction=spec.speed.token_s / chain[0].speed.token_s,
                kv_bytes=kv_bytes,
            ),
            planner_facts.prompt(shape, ask.prompt_tokens, cached, MEASURED_TOKENS, kept=kept),
            spec,
            tuple(helpers),
            self._members.last_prefill.get(model.name) if member.here else None,
            self._beginnings(
                model,
                member,
                sources,
                cached,
                places,
                spec.speed,
                shape.sizes.whole(ask.prompt_tokens),
            ),
        )

    def _beginnings(
        self,
        model: WantedModel,
        member: Member,
        sources: Iterable[Member],
        cached: int,
        places: PromptPlaces,
        speed: PrefillSpeed,
        state_bytes: int,
    ) -> tuple[Beginning, ...]:
        """What a machine, whose prefill has this ``speed``, can have of the prompt besides what is in its
        memory: from its own disk, and from ``sources``."""
        told = places.get(member.node_id)
        own = from_disk(told, cached, state_bytes) if told is not None else None
        found = [] if own is None else [own]
        for source in sources:
            kept = places.get(source.node_id)
            if source.node_id == member.node_id or kept is None:
                continue
            if not planner_facts.alike(member.card, source.card, model.name):
                continue
            fetch = self._fetch_speed(member, source, kept)
            theirs = from_peer(kept, cached, own, fetch, source.name, speed, state_bytes)
            if theirs is not None:
                found.append(theirs)
        return tuple(found)

    def _fetch_speed(self, member: Member, source: Member, kept: KeptBeginning) -> FetchSpeed:
        """How fast blocks come to one machine from another: to this one as they came before."""
        link = planner_facts.between(member, source)
        if not member.here:
            return FetchSpeed.by_figures(link, kept.bytes_per_s)
        return self._members.fetch_speed(source.node_id, link, kept.bytes_per_s, kept.cached)

    def _decode_correction(self, member: Member, found: ModelCard) -> float:
        """How many times as long a token of an answer takes there as its card says."""
        if member.here or found.speed.decode_tok_s <= 0:
            return 1.0
        speed = PrefillSpeed(1 / found.speed.decode_tok_s)
        return self._members.correction(member.node_id, found.digest, speed, "decode")

    def model_here(self, model: WantedModel) -> ModelCard | None:
        """The model on this machine, with what others that have loaded it know of its shape; None if it is
        not here."""
        here = self._members.here()
        found, facts = self._model(model, here), self._facts(model.name)
        if found is None or facts is not None:
            return found if found is None or facts is None else planner_facts.loaded_here(found, facts)
        return planner_facts.as_told(found, self._members.others("prefill"))

    def answered(
        self, placement: Placement, model: WantedModel, tokens: AnswerTokens, first_s: float, decode_s: float
    ) -> None:
        """Correct a machine's speeds by what its answer took: to the first token, and from there on."""
        others = self._members.others("answer")
        member = next((member for member in others if member.node_id == placement.node_id), None)
        found = member.model(model.name) if member is not None else None
        if member is None or found is None or found.digest != placement.digest:
            return
        learn = partial(self._members.waited, member.node_id, found.digest)
        if tokens.prefilled >= limits.ANSWER_SPEED_TOKENS:
            told = planner_facts.as_told(found, [self._members.here(), *others])
            speed = planner_facts.home(member, told).speed
            new = range(tokens.cached, tokens.cached + tokens.prefilled)
            expected_s = speed.total(1.0, new, MEASURED_TOKENS)
            learn(speed.token_s, "prefill", expected_s=expected_s, took_s=first_s)
        if tokens.decoded >= limits.ANSWER_SPEED_TOKENS // 8 and found.speed.decode_tok_s > 0:
            token_s = 1 / found.speed.decode_tok_s
            learn(token_s, "decode", expected_s=tokens.decoded * token_s, took_s=decode_s)

    def _model(self, model: WantedModel, member: Member) -> ModelCard | None:
        """The model on a machine; on this one by its files, which its card may show too late."""
        if not member.here:
            return member.model(model.name)
        if not model.here:
            return None
        told = member.model(model.name)
        if told is not None or model.folder is None:
            return told
        facts = self._facts(model.name)
        return ModelCard(
            model.name,
            memory_bytes=self._needed_bytes(model.folder),
            state="installed" if facts is None else "loaded",
            shape=model.folder.shape,
            speed=facts.speed if facts is not None else MeasuredSpeed(),
        )

    def failed(self, node_id: str, error: FleetError, digest: str = "") -> None:
        """Another machine did not answer; the next requests go elsewhere for a while if they can.

        Args:
            digest: of the model that was to answer.
        """
        if node_id != THIS_NODE:
            self._members.failed(node_id, "answer", error, digest)


def _priced(ways: Ways) -> dict[str, Any]:
    """The fields of a Placement that say what was planned."""
    way = ways.chosen
    if way is None:
        return {}
    brought = way.begun.name if way.begun is not None else ""
    steps = tuple(
        StepView(name, seconds, machine=brought if name == step_names.FETCHED else "")
        for name, seconds in way.steps
    )
    return {"steps": steps, "first_s": way.first_token_s, "alone_s": ways.alone_s}


def no_machine(name: str, ways: Ways, why: FleetError | None = None, *, tried: bool = False) -> FleetError:
    """The error for a request that can be served nowhere, with each machine's reason.

    Args:
        why: the failure where it ran last (``tried``), or why the model is not here.
    """
    rejected = [each for each in ways.rejected if each.refusal.code != "tried"]
    # Why the model is not here, the error says itself.
    reasons = [each.refusal.sentence for each in rejected if each.node_id != THIS_NODE or why is None]
    lacking = all(each.refusal.code == "absent" for each in rejected)
    if why is not None and (tried or not reasons):
        return why
    if why is not None and lacking:
        return from_code(why.code, f"{why.message} {' '.join(reasons)}", hint=why.hint, param=why.param)
    return NoMachine(
        f"No machine of the fleet can run {name} now: {' '.join(reasons) or 'none has it.'}",
        hint="`fleetctl peers` shows what each machine has.",
        param="model",
    )


def other_bytes(model: str, members: Sequence[Member]) -> NoMachine:
    """Why no exact answer comes from machines that have a model."""
    names = ", ".join(member.name for member in members)
    return NoMachine(
        f"It is not shown that {names} would give the bytes which this machine gives with {model}.",
        hint="Load the model on this machine, too: then they are compared. Or leave out `exactness`.",
        param="exactness",
    )


def candidate(member: Member, found: ModelCard | None, *, can_pull: bool = False) -> Candidate:
    """A member as the planner needs it for a model, which is None where that machine lacks it."""
    card, facts = member.card, member.card.machine
    bare = Candidate(
        node_id=member.node_id,
        name=member.name,
        refusal=eligible(member, even_left_out=True, even_asleep=True),
        wake_s=member.wake_s,
        left_out=bool(member.why_left_out(found.digest if found is not None else "")),
        chip=facts.chip,
        accelerator=facts.accelerator,
        cores=facts.cores,
        memory_bytes=facts.memory_bytes,
        available_bytes=card.usable_bytes,
        evictable_bytes=card.evictable_bytes,
        rtt_s=member.rtt_s,
        running=card.running,
        waiting=card.waiting,
        unread_tokens=card.unread_tokens,
        max_streams=card.max_streams,
        can_pull=can_pull,
    )
    if found is None:
        return bare
    return replace(
        bare,
        state=found.state,
        digest=found.digest,
        shape=found.shape,
        speed=found.speed,
        needed_bytes=found.memory_bytes,
        load_s=found.load_s,
        roles=tuple(found.roles),
        kv_room_bytes=_kv_room_bytes(card, found),
    )


def _kv_room_bytes(card: Card, found: ModelCard) -> int | None:
    """Memory for keys and values once it has loaded the model; None if it has, or loads it."""
    if found.state != "installed":
        return None
    left = card.usable_bytes + card.evictable_bytes - found.memory_bytes
    return max(0, int(left * (1 - limits.PREFIX_SHARE)))


def canonical(ref: str) -> str:
    """The name under which every machine knows a model."""
    entry = find(ref)
    return entry.name if entry is not None else ref
