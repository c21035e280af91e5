"""The machines that could score a prompt, by what they say of themselves and by what they did before.

models, cards, speeds ──find──► the one compressor, and who has it, cheapest first
what came of a prompt ──learn─► who is left out for a while, at whose pace the next one is priced
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.engine.protocol import Profile
from fleetd.errors import EngineError, InvalidValue, ModelUnsupported, OutOfMemory, PeerError
from fleetd.models.catalog import find as in_catalog
from fleetd.p2p.membership.cards import Card, ModelCard
from fleetd.plan import scoring as planner
from fleetd.plan.costs import PrefillSpeed
from fleetd.plan.model_speeds import ModelSpeeds
from fleetd.plan.scoring import Scorer
from fleetd.plan.speed_corrections import SpeedCorrections
from fleetd.requests.backoff import PeerBackoff
from fleetd.requests.job import THIS_NAME
from fleetd.requests.placement import THIS_NODE, Member
from fleetd.requests.smart_prefill import model_holders
from fleetd.requests.smart_prefill.model_holders import ModelHolder
from fleetd.requests.smart_prefill.segment_scoring import CompressorModel, ScoringJob
from fleetd.requests.smart_prefill.skip import SkipCompression


class Pool(Protocol):
    def engine(self, folder: Any) -> Any: ...


class Models(Protocol):
    def installed(self) -> Sequence[Any]: ...


class Fleet(Protocol):
    def machines(self) -> Iterable[Member]: ...


class Scorers:
    """Args:
    fleet: None for a machine that has no others.
    own_card: what this machine tells others of itself; None where it does not yet.
    local_only: by the settings, no prompt leaves this machine.
    """

    def __init__(
        self,
        pool: Pool,
        models: Models,
        speeds: ModelSpeeds,
        *,
        fleet: Fleet | None = None,
        own_card: Callable[[], Card | None] = lambda: None,
        local_only: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._models = models
        self._speeds = speeds
        self._fleet = fleet
        self._own_card = own_card
        self._local_only = local_only
        self._monotonic = monotonic
        self._penalties = PeerBackoff()
        # This machine, while it has no room for a compressor beside what is loaded.
        self._full = PeerBackoff()
        # Compressors whose attention finds too little.
        self._unable: set[str] = set()
        self._paces = SpeedCorrections()
        # Of each compressor which heads score, and where its layers may end.
        self._profiles: dict[str, Profile] = {}

    async def find(
        self, policy: SmartPrefillPolicy, target_bytes: int, local_only: bool
    ) -> tuple[CompressorModel, list[Scorer]]:
        """The model that is to score, and the machines that have it, cheapest first.

        Args:
            target_bytes: weights of the model that answers.

        Raises Skip.
        """
        holding = model_holders.choose(policy.compressor_model, await self._holders(local_only), target_bytes)
        if not holding:
            named = policy.compressor_model
            can = f"can score prompts with {named}" if named else "has a model that can score prompts"
            raise SkipCompression("no_compressor", f"No machine {can} now.")
        return model_holders.compressor(holding), self._able(holding)

    def profile(self, compressor: CompressorModel) -> Profile | None:
        return self._profiles.get(compressor.key)

    def speed_at(self, node_id: str, model: str) -> PrefillSpeed | None:
        """How fast a machine prefills with a model, by its own account; None where nobody measured it."""
        if node_id == THIS_NODE:
            known = self._speeds.of(model)
            return known.prefill if known.prefill_tok_s > 0 else None
        others = self._fleet.machines() if self._fleet is not None else ()
        models = [m for machine in others if machine.card.node_id == node_id for m in machine.card.models]
        return next((model_holders.speed_of(found) for found in models if found.name == model), None)

    def learn(self, work: ScoringJob, *, late: bool) -> None:
        """Who failed is left out for a while; who did it, by its own pace the next time.

        ``late``: those that have not answered were given up.
        """
        now_s, known = self._monotonic(), work.compressor.key
        errors = [ran.error for ran in work.ran.values()]
        if any(isinstance(error, ModelUnsupported) for error in errors):
            self._unable.add(known)
        if any(isinstance(error, InvalidValue) for error in errors):
            # Heads that another machine made up would be refused for ever.
            self._profiles.pop(known, None)
        elif work.profile is not None:
            self._profiles[known] = work.profile
        for ran in work.ran.values():
            scorer = ran.scorer
            if scorer.node_id == THIS_NODE and isinstance(ran.error, OutOfMemory):
                self._full.failed(THIS_NODE, ran.error.code, now_s)
            elif scorer.node_id != THIS_NODE and isinstance(ran.error, OutOfMemory | PeerError | EngineError):
                self._penalties.failed(scorer.node_id, ran.error.code, now_s)
            elif late and ran.unanswered and ran.error is None:
                self._penalties.failed(scorer.node_id, "timeout", now_s)
            elif ran.tokens and ran.error is None:
                self._penalties.succeeded(scorer.node_id)
                self._full.succeeded(scorer.node_id)
            if ran.tokens and scorer.measured and not scorer.load_s:
                factor = self._paces.factor(scorer.node_id, known, scorer.speed.token_s, now_s)
                self._paces.ran(
                    scorer.node_id,
                    known,
                    scorer.speed.token_s / factor,
                    now_s,
                    expected_s=scorer.seconds(ran.tokens) / factor,
                    took_s=ran.computed_s,
                )

    async def _holders(self, local_only: bool) -> list[ModelHolder]:
        folders = await asyncio.to_thread(self._models.installed)
        card = self._own_card() or Card(THIS_NAME, 0, 0)
        told = {model.name: model for model in card.models}
        tier, chip = card.machine.tier, model_holders.chip_of(card.machine)
        found = [
            ModelHolder(
                THIS_NODE,
                THIS_NAME,
                self._own(folder, told.get(folder.name)),
                tier,
                chip,
                running=card.running,
                folder=folder,
            )
            for folder in folders
        ]
        now_s = self._monotonic()
        if self._penalties.reason(THIS_NODE, now_s):
            found = []
        elif self._full.reason(THIS_NODE, now_s):
            # Trying again at once costs seconds.
            found = [holder for holder in found if holder.model.state == "loaded"]
        if self._fleet is not None and not local_only and not self._local_only:
            others = model_holders.holders(self._fleet.machines())
            found += [holder for holder in others if not self._penalties.reason(holder.node_id, now_s)]
        return [holder for holder in found if holder.key not in self._unable]

    def _own(self, folder: Any, told: ModelCard | None) -> ModelCard:
        """A model on this machine; its card may not have been made yet."""
        entry = in_catalog(folder.name)
        speed = self._speeds.of(folder.name)
        return ModelCard(
            folder.name,
            digest=told.digest if told is not None else "",
            roles=list(entry.roles) if entry is not None else ["chat"],
            weights_bytes=folder.weights_bytes,
            context_tokens=folder.context_tokens,
            state="loaded" if self._pool.engine(folder) is not None else "installed",
            prefill_tok_s=speed.prefill_tok_s,
            prefill_context_s=speed.prefill_context_s,
            prefill_fixed_s=speed.prefill_fixed_s,
        )

    def _able(self, holding: Sequence[ModelHolder]) -> list[Scorer]:
        """By what they took for other prompts, cheapest first."""
        now_s = self._monotonic()
        found = []
        for holder in holding:
            bare = model_holders.scorer(holder)
            factor = self._paces.factor(holder.node_id, holder.key, bare.speed.token_s, now_s)
            found.append(model_holders.scorer(holder, factor))
        return sorted(found, key=lambda scorer: (scorer.seconds(planner.AROUND_TOKENS), scorer.node_id))
