"""The machines that could score a prompt: which model scores it, who has that model, and how fast each is.

models, cards, speeds ──find──► the one compressor, and the machines that have it, cheapest first
outcome of a prompt ───learn──► machines left out for a while; measured speeds for the next price

A compressor that is asked for by name is taken. Otherwise models with the role "compressor" are looked at,
or, if no machine has one, chat models that are clearly smaller than the model that answers: of those that
find about as much as the best one, by the search for their profiles, the cheapest scores. Only a model whose
profile is known scores; one that has none yet is measured once its machine has
nothing else to do, and the prompt is read whole meanwhile.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing

import msgspec
from msgspec import structs
from msgspec.structs import replace

from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.control.model_facts import ModelShape
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.protocol import Loading, Profile
from fleetd.engine.scoring.known_profiles import SEARCH_TOKENS, ProfileStore
from fleetd.errors import InvalidValue, ModelUnsupported, OutOfMemory
from fleetd.models import file_threads
from fleetd.models.catalog import find as in_catalog
from fleetd.models.folder import ModelFolder
from fleetd.models.model_store import ModelStore
from fleetd.p2p.membership.cards import ModelCard
from fleetd.plan import chip_speeds
from fleetd.plan import scoring as planner
from fleetd.plan.costs import MEASURED_TOKENS, PrefillSpeed, modelled
from fleetd.plan.model_speeds import ModelSpeeds
from fleetd.plan.prefill.options import Load
from fleetd.plan.refusals import THIS_NODE
from fleetd.plan.scoring import Scorer
from fleetd.requests.members.members import Member, Members, eligible
from fleetd.requests.placement.placement import canonical
from fleetd.requests.placement.planner_facts import speed_of
from fleetd.requests.smart_prefill.segment_scoring import CompressorModel, ScoringJob
from fleetd.requests.smart_prefill.skip import SkipCompression

# A chat model scores only for models at least this many times its size.
_CLEARLY_LARGER = 4
# A model whose recall is no more than this below another's finds as much: a search asks few questions.
_ABOUT = 0.1
# Layers, and the width of hidden states, of a typical compressor, for machines that never measured one.
_LAYERS, _WIDTH = 30, 1024


class ModelHolder(msgspec.Struct, frozen=True):
    """A machine, and a model on it. ``folder``: here; None on another machine. ``search_tokens``: about how
    many of them are left of the search for its profile, 0 if that is known. ``recall``: as the profile has
    it. ``price_s``: seconds that the machine takes to score a text of usual length with it."""

    member: Member
    model: ModelCard
    folder: ModelFolder | None = None
    search_tokens: int = 0
    recall: float = 0.0
    price_s: float = 0.0

    @property
    def key(self) -> str:
        """The same as ``CompressorModel.key``."""
        return self.model.digest or self.model.name


class Scorers:
    """Args:
    profiles: those that this machine knows.
    warm: asks another machine to load a model.
    """

    def __init__(
        self,
        pool: EnginePool,
        models: ModelStore,
        speeds: ModelSpeeds,
        members: Members,
        *,
        profiles: ProfileStore | None = None,
        warm: Callable[[Load, ModelCard], None] = lambda load, model: None,
    ) -> None:
        self._known = profiles or ProfileStore()
        self._warm = warm
        self._pool = pool
        self._models = models
        self._speeds = speeds
        self._members = members
        # Compressors whose attention finds too little, by the machine that says so: what another one says
        # concerns that one, what this one found concerns all.
        self._unable: set[tuple[str, str]] = set()
        # By compressor: which heads score, and after which layer it may stop.
        self._profiles: dict[str, Profile] = {}

    async def find(
        self, policy: SmartPrefillPolicy, target_bytes: int, local_only: bool
    ) -> tuple[CompressorModel, list[Scorer]]:
        """The model that is to score, and the machines that have it, cheapest first.

        Args:
            target_bytes: weights of the model that answers.

        Raises SkipCompression.
        """
        named = policy.compressor_model
        folders = await file_threads.look(self._models.installed)
        known = await file_threads.look(self._known_of, self._holders(folders, local_only))
        found = [replace(each, price_s=self._scorer(each).seconds(planner.AROUND_TOKENS)) for each in known]
        holders = choose(named, [holder for holder in found if not holder.search_tokens], target_bytes)
        if not holders and (unmeasured := choose(named, found, target_bytes)):
            raise self._measured_later(unmeasured)
        if not holders:
            can = f"can score prompts with {named}" if named else "has a model that can score prompts"
            raise SkipCompression("no_compressor", f"No machine {can} now.")
        here = next((holder for holder in holders if holder.member.here), None)
        model = (here or holders[0]).model
        able = [self._scorer(holder, without_question=policy.without_question) for holder in holders]
        able.sort(key=lambda scorer: (scorer.seconds(planner.AROUND_TOKENS), scorer.node_id))
        return CompressorModel(model.name, model.digest, here.folder if here else None), able

    def _known_of(self, holders: Iterable[ModelHolder]) -> list[ModelHolder]:
        """The models that can score, and what is left to find out about them. Reads files."""
        found = []
        for holder in holders:
            if holder.folder is not None and not holder.model.digest:
                digest = self._models.known_digest(holder.folder)
                holder = replace(holder, model=structs.replace(holder.model, digest=digest))
            # What this machine found, or was shipped, goes before what another machine told.
            profile = self._known.find(holder.model.digest) or self._profiles.get(holder.key)
            if profile is not None and profile.heads:
                self._profiles[holder.key] = profile
                recall = profile.recall or holder.model.scoring_recall
                found.append(replace(holder, search_tokens=0, recall=recall))
            elif profile is None and holder.model.scoring != "unable":
                found.append(replace(holder, recall=holder.model.scoring_recall))
        return found

    def _measured_later(self, holders: Sequence[ModelHolder]) -> SkipCompression:
        """Have the machines that hold an unmeasured model measure it; the reason to go on without."""
        for holder in holders:
            if holder.folder is not None:
                self._pool.measuring.want(holder.folder)
            elif holder.model.state != "loaded":
                self._warm(Load(holder.member.node_id), holder.model)
        first = min(holders, key=self._search_s)
        return SkipCompression(
            "measuring",
            f"{first.model.name} is not measured for scoring yet: {first.member.name} does that while it has "
            f"nothing else to do, in about {max(1.0, self._search_s(first)):.0f} s.",
        )

    def _search_s(self, holder: ModelHolder) -> float:
        """Seconds until a profile is found, if nothing comes between."""
        scorer = self._scorer(holder)
        return scorer.load_s + scorer.speed.total(1.0, range(holder.search_tokens), MEASURED_TOKENS)

    async def load(self, compressor: CompressorModel) -> AsyncGenerator[Loading, None]:
        """Load it here, if nothing has to give way for that: only then is it known how fast it scores.

        Raises FleetError.
        """
        if compressor.folder is None:
            return
        try:
            async with aclosing(self._pool.loading(compressor.folder, evict=False)) as steps:
                async for progress in steps:
                    yield progress
        except OutOfMemory as error:
            self._members.failed(THIS_NODE, "score", error)
            raise

    def profile(self, compressor: CompressorModel) -> Profile | None:
        return self._profiles.get(compressor.key)

    def speed_at(self, node_id: str, model: str) -> PrefillSpeed | None:
        """How fast a machine prefills with a model, as it measured; None before that."""
        if node_id == THIS_NODE:
            known = self._speeds.of(model)
            return PrefillSpeed.of(known) if known.prefill_tok_s > 0 else None
        card, _ = self._members.model_at(node_id, model)
        return speed_of(card) if card is not None else None

    def learn(self, work: ScoringJob, *, late: bool) -> None:
        """Leave machines that failed out for a while, and correct the speed of the others.

        Args:
            late: the deadline has passed; machines that have not answered were given up.
        """
        key = work.compressor.key
        errors = [ran.error for ran in work.ran.values()]
        self._unable |= {
            (ran.scorer.node_id, key) for ran in work.ran.values() if isinstance(ran.error, ModelUnsupported)
        }
        if any(isinstance(error, InvalidValue) for error in errors):
            # The profile came from another machine, and may be made up: every engine would refuse it.
            self._profiles.pop(key, None)
        elif work.profile is not None:
            self._profiles[key] = work.profile
        for ran in work.ran.values():
            scorer = ran.scorer
            if ran.error is not None:
                # An engine that died here is started again for the next prompt.
                if scorer.node_id != THIS_NODE or isinstance(ran.error, OutOfMemory):
                    self._members.failed(scorer.node_id, "score", ran.error, key)
            elif late and ran.unanswered:
                self._members.late(scorer.node_id, "score")
            elif ran.tokens:
                self._members.succeeded(scorer.node_id, "score", key)
            if ran.tokens and scorer.measured and not scorer.load_s:
                self._members.computed(
                    scorer.node_id,
                    key,
                    scorer.speed.token_s / scorer.correction,
                    "score",
                    expected_s=scorer.seconds(ran.tokens, ran.passes, around=0) / scorer.correction,
                    took_s=ran.computed_s,
                )

    def _holders(self, folders: Iterable[ModelFolder], local_only: bool) -> list[ModelHolder]:
        here = self._members.here()
        found = [self._own(here, folder) for folder in folders]
        failure = self._members.failure(THIS_NODE, "score")
        if failure == OutOfMemory.code:
            # There was no room to load a compressor, and another attempt would take seconds.
            found = [holder for holder in found if holder.model.state == "loaded"]
        elif failure:
            found = []
        for member in [] if local_only else self._members.others("score"):
            if eligible(member) is None:
                found += [
                    ModelHolder(member, model, search_tokens=0 if model.scoring == "ready" else SEARCH_TOKENS)
                    for model in member.card.models
                ]
        return [
            holder
            for holder in found
            if self._unable.isdisjoint({(THIS_NODE, holder.key), (holder.member.node_id, holder.key)})
            and not holder.member.why_left_out(holder.key)
        ]

    def _own(self, here: Member, folder: ModelFolder) -> ModelHolder:
        """A model on this machine, which its card may not show yet."""
        entry = in_catalog(folder.name)
        card, speed = here.model(folder.name), self._speeds.of(folder.name)
        engine = self._pool.engine(folder)
        facts = engine.facts if engine is not None else None
        if facts is not None and not speed.prefill_tok_s:
            speed = facts.speed
        model = ModelCard(
            folder.name,
            digest=card.digest if card is not None else "",
            roles=list(entry.roles) if entry is not None else [folder.purpose],
            state="loaded" if engine is not None else "installed",
            shape=folder.shape,
            speed=speed,
            scoring=engine.scoring.state if engine is not None else card.scoring if card is not None else "",
        )
        left = engine.scoring.left if engine is not None else 0 if model.scoring == "ready" else SEARCH_TOKENS
        return ModelHolder(here, model, folder, left)

    def _scorer(self, holder: ModelHolder, *, without_question: bool = False) -> Scorer:
        """Its price, corrected by what it took for other prompts."""
        member, model = holder.member, holder.model
        measured, weights_bytes = speed_of(model), model.shape.weights_bytes
        typical = ModelShape(weights_bytes=max(1, weights_bytes), layers=_LAYERS, hidden_width=_WIDTH)
        speed = measured or modelled(member.chip(model.shape.cpu_arithmetic), typical)
        correction = self._members.correction(member.node_id, holder.key, speed, "score")
        profile = self._profiles.get(holder.key)
        share = planner.exit_share(profile.exit_layer, profile.layers) if profile else planner.EXIT_SHARE
        if without_question:
            share = planner.whole_share(weights_bytes, model.shape.outside_bytes)
        return Scorer(
            member.node_id,
            member.name,
            speed.times(correction),
            share,
            link=member.link,
            tier=member.card.machine.tier,
            load_s=0.0 if model.state == "loaded" else chip_speeds.load_s(weights_bytes),
            running=member.card.running,
            context_tokens=model.shape.context_tokens,
            measured=measured is not None,
            correction=correction,
        )


def choose(named: str, found: Sequence[ModelHolder], target_bytes: int) -> list[ModelHolder]:
    """All machines that have the one model that is to score; none if no machine has a fitting model.

    Args:
        named: the compressor that was asked for; "" leaves the choice open.
        target_bytes: weights of the model that answers.
    """
    # Another machine is asked by digest, so it must have told one.
    able = [holder for holder in found if holder.member.here or holder.model.digest]
    if named:
        able = [holder for holder in able if holder.model.name in (named, canonical(named))]
    else:
        compressors = [holder for holder in able if "compressor" in holder.model.roles]
        able = compressors or [
            holder
            for holder in able
            if "chat" in holder.model.roles
            and 0 < holder.model.shape.weights_bytes * _CLEARLY_LARGER <= target_bytes
        ]
    most = max((holder.recall for holder in able), default=0.0)
    about = [holder for holder in able if holder.recall >= most - _ABOUT]

    def order(holder: ModelHolder) -> tuple[float, int, str, bool, str]:
        # If files differ that have one name, those on this machine are meant.
        model, price_s = holder.model, 0.0 if named else holder.price_s
        return price_s, model.shape.weights_bytes, model.name, not holder.member.here, model.digest

    best = min(about, key=order, default=None)
    if best is None:
        return []
    return [
        holder
        for holder in able
        if holder is best or (best.model.digest and holder.model.digest == best.model.digest)
    ]
