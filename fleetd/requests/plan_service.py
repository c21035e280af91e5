"""What would be done with a prompt now: the planner that requests use, asked by people."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.control.group_view import GroupView
from fleetd.control.prefill_plan import (
    AddedPoint,
    AddedQuestion,
    AddedView,
    OptionView,
    PlanQuestion,
    PlanView,
)
from fleetd.engine.protocol import ChatPrompt, Generate
from fleetd.errors import (
    ContextLengthExceeded,
    FleetError,
    InvalidValue,
    ModelNotFound,
    ModelUnsupported,
)
from fleetd.models import file_threads
from fleetd.plan import known_machines, what_if
from fleetd.plan.beginnings import KeptBeginning
from fleetd.plan.known_machines import KnownMachine
from fleetd.plan.refusals import THIS_NODE
from fleetd.plan.route import RouteQuestion
from fleetd.plan.ways import Ways
from fleetd.requests.drafting.client import AnswerDrafting
from fleetd.requests.groups.planning import FleetGroups
from fleetd.requests.job import CHARS_PER_TOKEN, LOCAL, prompt_text
from fleetd.requests.kv_fetching.prompt_survey import PromptSurvey
from fleetd.requests.members.members import Member
from fleetd.requests.placement.added_machine import added_member
from fleetd.requests.placement.placement import (
    ANSWER_TOKENS,
    KnownTokens,
    Placement,
    Placer,
    PromptPlaces,
    no_machine,
)
from fleetd.requests.placement.way_views import way_view, way_views
from fleetd.requests.request import LocatedModel
from fleetd.requests.smart_prefill.client import AnsweringModel, SmartPrefill


class PlanService:
    """Answers POST /fleet/v1/plan.

    Args:
        locate: as ``ModelLocator.locate``.
        survey: asks where a prompt is kept; None if no other machine could tell.
        policy: what smart prefill does if the question leaves it open.
        groups: how machines hold a model together that none holds alone; None without a fleet.
    """

    def __init__(
        self,
        placer: Placer,
        locate: Callable[[str], LocatedModel],
        smart: SmartPrefill,
        drafting: AnswerDrafting,
        policy: SmartPrefillPolicy,
        survey: PromptSurvey | None = None,
        groups: FleetGroups | None = None,
    ) -> None:
        self._placer = placer
        self._locate = locate
        self._smart = smart
        self._drafting = drafting
        self._policy = policy
        self._survey = survey
        self._groups = groups

    async def plan(self, question: PlanQuestion) -> PlanView:
        """Every way to answer such a prompt. Nothing is loaded, and no text leaves this machine: others that
        may see prompts are told hashes of its beginnings.

        Raises:
            ContextLengthExceeded: no way is left because the prompt is longer than the model's context.
            ModelNotFound, NoMachine: no machine can run the model; with each machine's reason.
            InvalidValue, ModelNotFound, NoMachine, OutOfMemory: the machines that are named cannot hold it.
        """
        model = await file_threads.look(self._locate, question.model)
        over = self._placer.over(question.placement) if question.placement else ()
        if over and model.folder is None:
            raise model.missing or ModelNotFound(f"{model.name} is not on this machine.")
        tokens = question.tokens or len(question.text or "") // CHARS_PER_TOKEN
        cached = min(question.cached, tokens)
        if (group := await self._group(model, over)) is not None:
            return _over_machines(PlanView(model.name, tokens, cached, group=group))
        ask = RouteQuestion(model.name, tokens, ANSWER_TOKENS, counted=True)
        wanted = model.wanted
        prompts = _as_prompts(question.text or "")
        known = self._placer.known(wanted, *prompts)

        def known_or_asked(member: Member) -> KnownTokens:
            found = known(member)
            return KnownTokens(cached) if member.here and cached > found.tokens else found

        places = await self._places(prompts, model.name)
        whole = ways = self._placer.ways(
            ask,
            wanted,
            known_or_asked,
            places=places,
        )
        capped = self._placer.capped(model.name)
        view = PlanView(model.name, tokens, cached, way_views(ways), capped=capped)
        if question.smart is not None:
            # Only the engine refuses a request whose prompt is too long, once that is shortened.
            if ways.chosen is None:
                ways = self._placer.ways(replace(ask, counted=False), wanted)
            view = await self._smart.plan(view, question.smart, _target(model, ways, places), self._policy)
        if not any(option.chosen for option in view.options):
            if model.folder is not None and self._groups is not None:
                group = await self._groups.view(model.folder)
                if group is not None:
                    return _over_machines(replace(view, group=group))
            raise _nowhere(model, whole)
        return view if model.folder is None else await self._drafting.plan(view, model.folder)

    async def _group(self, model: LocatedModel, over: Sequence[str]) -> GroupView | None:
        """How the machines that are named would hold a model, or those that have it loaded do."""
        if model.folder is None or self._groups is None:
            return None
        loaded = self._groups.loaded(model.folder)
        names = {part.machine for part in loaded.parts[1:]} if loaded is not None else set()
        if loaded is not None and (not over or names == set(over)):
            return loaded
        return await self._groups.view(model.folder, over) if over else None

    async def added(self, question: AddedQuestion) -> AddedView:
        """How soon first tokens would come with one more machine. Nothing is loaded, asked or sent.

        Raises:
            InvalidValue: no machine of this name is known.
            ModelNotFound, ModelUnsupported: the model is not here, or machines cannot share its prefill.
        """
        machine = _known_machine(question.machine)
        model = await file_threads.look(self._locate, question.model)
        own = self._placer.model_here(model.wanted)
        if own is None:
            raise model.missing or ModelNotFound(f"{model.name} is not on this machine.")
        if not own.shape.hidden_bytes:
            raise ModelUnsupported(
                f"A load finds out how a model can be divided; this daemon has not loaded {model.name} yet.",
                hint=f"Load it once: `fleetctl models load {model.name}`.",
                param="model",
            )
        if own.shape.unshareable:
            raise ModelUnsupported(own.shape.unshareable, hint="Choose another model with -m.", param="model")
        added = [] if machine is None else [added_member(machine, question.link, own)]
        points = []
        for tokens in what_if.lengths(own.shape.context_tokens):
            points.append(self._point(model, tokens, added))
            await asyncio.sleep(0)  # requests are planned on this loop
        held = added[0].card.models[0] if added else None
        return AddedView(
            model.name,
            machine.name if machine is not None else "",
            question.link if machine is not None else "",
            layers_held=0 if held is None else held.part_last or own.shape.layers,
            layers=own.shape.layers if added else 0,
            modelled_here=own.speed.prefill_tok_s <= 0,
            doubt=own.speed.doubt,
            points=points,
        )

    def _point(self, model: LocatedModel, tokens: int, added: Sequence[Member]) -> AddedPoint:
        ask = RouteQuestion(model.name, tokens, ANSWER_TOKENS, counted=True)
        today = self._placer.ways(ask, model.wanted)
        alone, fleet = what_if.alone(today), what_if.soonest(what_if.all_ways(today))
        if alone is None or fleet is None:
            raise _nowhere(model, today)
        best, added_s = fleet, None
        if added:
            ways = what_if.all_ways(self._placer.ways(ask, model.wanted, added=added))
            best = what_if.soonest([fleet, *ways]) or fleet
            added_s = what_if.warm_s(best)
        shown = way_view(best)
        return AddedPoint(
            tokens, what_if.warm_s(alone), what_if.warm_s(fleet), added_s, shown.kind, shown.nodes
        )

    async def _places(self, prompts: Sequence[str], model: str) -> PromptPlaces:
        """What machines keep of a text in one of its forms."""
        if self._survey is None:
            return {}
        found: dict[str, KeptBeginning] = {}
        for places in await asyncio.gather(*(self._survey.of_text(text, model) for text in prompts)):
            for node_id, kept in places.items():
                found[node_id] = _more(kept, found.get(node_id, kept))
        return found


def _over_machines(view: PlanView) -> PlanView:
    """The plan with the group as its chosen way, if the machines hold the model."""
    if view.group is None or not view.group.parts:
        return view
    parts = view.group.parts
    nodes, cuts = [part.machine for part in parts], [0, *(part.last for part in parts)]
    chosen = OptionView("group", nodes, chosen=True, cuts=cuts, cached_tokens=view.cached_tokens)
    return replace(view, options=[chosen, *view.options])


def _known_machine(name: str) -> KnownMachine | None:
    """The machine of this name; None for "". Raises InvalidValue with the nearest names."""
    if not name or (found := known_machines.find(name)) is not None:
        return found if name else None
    near = known_machines.nearest(name)
    hint = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise InvalidValue(
        f"No machine is known as {name!r}.",
        hint=hint + "Names are like 'Mac mini M4, 16 GB'; `fleetctl plan --with list` lists them.",
        param="machine",
    )


def _more(a: KeptBeginning, b: KeptBeginning) -> KeptBeginning:
    most = max(a, b, key=lambda each: each.disk_tokens)
    return replace(most, memory_tokens=max(a.memory_tokens, b.memory_tokens))


def _as_prompts(text: str) -> tuple[str, str]:
    """A text as requests bring it: as it is, and as the first message of a chat."""
    chat = ChatPrompt([{"content": text, "role": "user"}])
    return text, prompt_text(Generate("", chat))


def _target(model: LocatedModel, ways: Ways, places: PromptPlaces) -> AnsweringModel:
    """The machine that would answer if the whole prompt were read. ``places``: what machines keep of it."""
    node_id = ways.chosen.node_id if ways.chosen is not None else THIS_NODE
    return AnsweringModel(model.name, model.folder, Placement(node_id, LOCAL), places=places)


def _nowhere(model: LocatedModel, ways: Ways) -> FleetError:
    long = [each.refusal for each in ways.rejected if each.refusal.code == "context"]
    if long:
        hint = "Shorten it, or ask for smart prefill (--smart)."
        return ContextLengthExceeded(long[0].sentence, hint=hint, param="tokens")
    return no_machine(model.name, ways, model.missing)
