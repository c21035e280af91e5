"""The composition root: the parts of one daemon, and which of them knows which. ``app`` starts them.

MachineParts    this machine alone: its models and engines, its accounts and figures
DaemonParts     that, the fleet, the features of requests, and what other machines may ask of this one
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path

from fleetd import __version__
from fleetd.api.http.disabled_fleet import DisabledFleet
from fleetd.cache.service import DiskCache
from fleetd.cache.settings import DiskCacheSettings
from fleetd.config import Config
from fleetd.control.daemon_status import HardwareReading, MemoryBudget, RunningPull, RunningRequest
from fleetd.control.fleet_view import PeerView
from fleetd.control.group_view import GroupView
from fleetd.control.model_facts import MeasuredSpeed
from fleetd.control.model_listing import FoundModels, ModelListing
from fleetd.engine.daemon_side.group_front import GroupFront
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.daemon_side.worker_maker import WorkerMaker
from fleetd.engine.scoring.known_profiles import ProfileStore
from fleetd.engine.settings import WorkerOptions
from fleetd.errors import Draining, FleetError
from fleetd.fleet.own_card import CardMaker, Readings
from fleetd.fleet.service import Fleet, default_name
from fleetd.hardware.memory import machine_budget
from fleetd.hardware.probe import HardwareProbe
from fleetd.models import cpu_arithmetic, file_threads
from fleetd.models.catalog import find
from fleetd.models.drafter_kinds import drafter_kind
from fleetd.models.folder import ModelFolder
from fleetd.models.memory_need import WORKING_BYTES, WeightRules, estimated_files, needed_bytes
from fleetd.models.model_store import ModelStore
from fleetd.models.pinned import PinnedModels
from fleetd.models.pull_lines import PullProgress
from fleetd.p2p import wake_on_lan
from fleetd.p2p.membership.cards import Card
from fleetd.p2p.node import Node, NodeSettings
from fleetd.plan.load_times import LoadTimes
from fleetd.plan.model_speeds import ModelSpeeds
from fleetd.plan.refusals import THIS_NODE
from fleetd.requests.accounts import Accounts
from fleetd.requests.admission import ServingContext
from fleetd.requests.concurrency import BackgroundTasks
from fleetd.requests.drafting import messages as drafting_messages
from fleetd.requests.drafting.client import AnswerDrafting
from fleetd.requests.drafting.server import DraftServer
from fleetd.requests.groups import messages as group_messages
from fleetd.requests.groups.labels import GroupLabels
from fleetd.requests.groups.planning import FleetGroups
from fleetd.requests.groups.server import StageServer
from fleetd.requests.job import THIS_NAME
from fleetd.requests.kv_fetching import messages as fetching_messages
from fleetd.requests.kv_fetching.client import BlockFetching
from fleetd.requests.kv_fetching.fetch_counts import FetchCounts
from fleetd.requests.kv_fetching.kept_prompts import KeptPrompts
from fleetd.requests.kv_fetching.prompt_survey import PromptSurvey
from fleetd.requests.kv_fetching.server import BlockServer
from fleetd.requests.ledger import Ledger
from fleetd.requests.managing import messages as managing_messages
from fleetd.requests.managing.operations import ModelOperations
from fleetd.requests.managing.server import Look, ManageServer
from fleetd.requests.members.members import Members
from fleetd.requests.metrics import Metrics
from fleetd.requests.model_copies import ModelCopies
from fleetd.requests.model_locator import ModelLocator
from fleetd.requests.placement.placement import Placer
from fleetd.requests.plan_service import PlanService
from fleetd.requests.prefill_sharing import messages as sharing_messages
from fleetd.requests.prefill_sharing.client import PrefillSharing
from fleetd.requests.prefill_sharing.server import AssistServer
from fleetd.requests.promised_memory import PromisedMemory
from fleetd.requests.ranks import messages as rank_messages
from fleetd.requests.ranks.fabrics import Fabrics
from fleetd.requests.ranks.planning import RankPlanner
from fleetd.requests.ranks.prices import MeasuredSums, RankPrices
from fleetd.requests.ranks.server import RankServer
from fleetd.requests.remote import messages, remote
from fleetd.requests.remote.bulk_dialer import BulkDialer
from fleetd.requests.row_origins import RowOrigins
from fleetd.requests.runner import RequestRunner
from fleetd.requests.smart_prefill import messages as smart_messages
from fleetd.requests.smart_prefill.client import SmartPrefill
from fleetd.requests.smart_prefill.compression_job import CompressionService
from fleetd.requests.smart_prefill.scorers import Scorers
from fleetd.requests.smart_prefill.segment_scoring import SegmentScoring
from fleetd.requests.smart_prefill.server import ScoreServer
from fleetd.requests.smart_prefill.turns import ModelTurns
from fleetd.requests.traces import Traces
from fleetd.requests.vectors import messages as vector_messages
from fleetd.requests.vectors.machines import VectorMachines
from fleetd.requests.vectors.server import VectorServer
from fleetd.requests.vectors.service import VectorService
from fleetd.storage.paths import HomeFolder
from fleetd.storage.store import Store


class MachineParts:
    """What a daemon has without other machines. ``peers``: the paired machines, for metrics."""

    def __init__(
        self,
        config: Config,
        home: HomeFolder,
        *,
        peers: Callable[[], list[PeerView]],
        pool: EnginePool | None = None,
        models: ModelStore | None = None,
    ) -> None:
        self._engine, self._speculation = config.engine, config.speculation
        self._background = BackgroundTasks()
        self.prober = HardwareProbe(gpu=config.engine.device != "cpu")
        self.store = Store(home.db)
        self.ledger = Ledger(self.store)
        self.traces = Traces(self.store)
        self.models = models or _model_store(config, home)
        self.pinned = PinnedModels(home.pinned_models)
        self.disk_cache = DiskCache(
            _cache_settings(config, home), on=config.cache.disk, note=lambda: self.pool.disk_note
        )
        self.load_times = LoadTimes()
        self.pool = pool or EnginePool(
            WorkerMaker(
                _worker_options(config, home, self.disk_cache.for_workers),
                record_path=self.models.record_path,
                weight_rules=self.weight_rules,
                load_s=lambda folder: self.load_times.seconds(folder.name, folder.weights_bytes),
                drafter=self._drafter,
                kv_bits=config.models.kv_bits_of,
            ),
            idle_unload_s=float(config.engine.idle_unload_s),
            pressure=lambda: self.prober.read().pressure,
            pinned=lambda: self.pinned.names,
            ended=self._worker_ended,
        )
        self.metrics = Metrics(__version__, engines=self.pool.status, peers=peers)
        self.speeds = ModelSpeeds()
        self.profiles = ProfileStore.in_home(home.cache)

    async def _drafter(self, folder: ModelFolder) -> Path | None:
        """The folder of the drafter that the settings name, if it drafts from hidden states."""
        if not (name := self._speculation.draft_model) or self._speculation.mode == "off":
            return None
        try:
            found = await file_threads.look(self.models.resolve, name)
        except FleetError:
            return None
        return found.path if drafter_kind(found.config) is not None and found.path != folder.path else None

    def memory_budget(self, machine: HardwareReading, available_bytes: int) -> MemoryBudget:
        """What models may take of the memory that is available, in bytes."""
        return machine_budget(
            machine,
            available_bytes,
            self.pool.held_bytes,
            fraction=self._engine.memory_fraction,
            max_bytes=self._engine.max_memory_bytes,
            overcommit=self._engine.overcommit,
        )

    def usable_bytes(self) -> int:
        """What one more model may take now, without what it works with."""
        machine = self.prober.read()
        return max(0, self.memory_budget(machine, machine.model_available_bytes).usable_bytes - WORKING_BYTES)

    def weight_rules(self, machine: HardwareReading | None = None) -> WeightRules:
        """What decides how models are held here; by a reading of this moment if none is given."""
        machine = machine or self.prober.read()
        return WeightRules.of(
            machine.accelerator,
            self._engine.cpu_arithmetic,
            self.memory_budget(machine, machine.model_available_bytes),
            available=cpu_arithmetic.installed(),
        )

    def _worker_ended(self, pid: int) -> None:
        """The blocks that it had begun can be written by another one."""
        self._background.start(asyncio.to_thread(self.disk_cache.writer_ended, pid))

    async def close(self) -> None:
        """Wait for what was begun beside requests."""
        await self._background.finish()

    def write_kept(self, folder: ModelFolder) -> None:
        """Let the worker of a model write kept prompts at once."""
        if (engine := self.pool.engine(folder)) is not None:
            engine.write_now()


class DaemonParts:
    """A daemon's machine, its fleet if it has one, and the features of requests.

    ``most_unknown``: connections of machines that have not shown who they are. ``pool`` and ``models``: for
    tests, instead of those of ``config``.
    """

    def __init__(
        self,
        config: Config,
        home: HomeFolder,
        most_unknown: int,
        *,
        pool: EnginePool | None = None,
        models: ModelStore | None = None,
    ) -> None:
        self._config = config
        self.machine = MachineParts(config, home, peers=self._peers, pool=pool, models=models)
        # Made once the node is open: a card has its identity.
        self.card: CardMaker | None = None
        self.node = Node(_node_settings(config, home, most_unknown)) if config.fleet.enabled else None
        self.fleet = self._fleet_of(self.node) if self.node is not None else None
        # One for all features: a machine that failed one of them is left out of the others, too.
        self.members = Members(
            self.fleet.machines if self.fleet else tuple,
            self._current_card,
            unaided=self.fleet.unaided if self.fleet else lambda: False,
            local_only=config.fleet.local_only,
        )
        self.origins = RowOrigins(self.machine.disk_cache, self.machine.pool.forget_origins)
        self.members.lied = self.origins.forget
        if self.fleet is not None:
            self.fleet.removed = self.origins.forget
        self.fetch_counts = FetchCounts(self.machine.metrics.fetched)
        self.kept = KeptPrompts(
            self.machine.disk_cache,
            lambda model: self.members.here().model(model),
            self.machine.write_kept,
        )
        self.survey = self._survey(self.fleet) if self.fleet else None
        self.fetching = self._block_fetching(self.fleet) if self.fleet else None
        self.sharing = self._prefill_sharing(self.fleet) if self.fleet else None
        self.promised = PromisedMemory()
        self.fabrics = (
            Fabrics(self.node.plain_links, lambda: self.machine.prober.read().collectives)
            if self.node is not None
            else None
        )
        self.groups = self._groups(self.fleet) if self.fleet else None
        if self.groups is not None:
            self.machine.pool.maker.groups = self.groups
            self.machine.pool.recut.cut_anew = self.groups.anew
        self.drafting = self._drafter_service()
        self.placer = self._placer()
        self.compressing = self._compression()
        self.smart = SmartPrefill(
            self.compressing, self.members, self.machine.pool, self.machine.metrics, placer=self.placer
        )
        self.copies = (
            ModelCopies(self.node, self.machine.models, self._own_card) if self.node is not None else None
        )
        self.locator = self._locator()
        self.runner = self._runner()
        self.vectors = self._vectors()
        self.plans = PlanService(
            self.placer,
            self.locator.locate,
            self.smart,
            self.drafting,
            config.smart_prefill.policy,
            self.survey,
            self.groups,
        )
        # What other machines are told of the models here, and for words of those of the hub. The daemon sets
        # it once its API has begun.
        self.models_shown: Look = _not_yet
        # What holds layers for other machines' models; None without a fleet.
        self.stages: StageServer | None = None
        self.assists = self._serve_peers(self.node) if self.node is not None else None

    def running(self) -> list[RunningRequest]:
        """The requests of this machine that have not ended, oldest first."""
        found = [*self.runner.running(), *self.vectors.running()]
        return sorted(found, key=lambda request: request.at_s)

    @property
    def busy(self) -> bool:
        """True while this machine computes, or passes on answers, for anybody."""
        counts = self.runner.counts
        return counts.running + counts.waiting > 0 or self.machine.pool.busy

    async def close(self) -> None:
        """End what requests still do beside the engines; the runner has ended before."""
        features = (
            self.sharing,
            self.assists,
            self.stages,
            self.drafting,
            self.fetching,
            self.kept,
            self.origins,
        )
        for feature in features:
            if feature is not None:
                await feature.close()

    # ---- what this machine tells others of itself --------------------------------------------------------

    def make_card(self) -> CardMaker:
        """Begin to tell others of this machine; its node is open."""
        node, machine = self.node, self.machine
        wake = wake_on_lan.own_addresses() if node is not None and self._config.power.wake else ()
        bare = Card(
            node_id=node.identity.node_id if node is not None else THIS_NAME,
            epoch=node.epoch if node is not None else 0,
            sequence=0,
            name=node.name if node is not None else THIS_NAME,
            software=__version__,
            max_streams=self._config.engine.max_streams,
            wake=list(wake),
        )
        readings = Readings(
            machine=machine.prober.read,
            budget=machine.memory_budget,
            weight_rules=machine.weight_rules,
            kv_bits=self._config.models.kv_bits_of,
            wire_bits=self._config.fleet.narrow_bits,
            engines=machine.pool.status,
            counts=lambda: self.runner.counts,
            unread_tokens=lambda: self.runner.unread_tokens,
            draining=lambda: self.runner.draining,
            collectives=lambda: self.fabrics.possible if self.fabrics is not None else [],
        )
        self.card = CardMaker(
            bare,
            machine.models,
            readings,
            speeds=machine.speeds,
            load_times=machine.load_times,
            profiles=machine.profiles,
            publish=node.publish if node is not None else None,
        )
        return self.card

    def models_changed(self) -> None:
        """A model came or went: other machines hear of it at once."""
        if self.card is not None:
            self.card.changed()

    async def pull(self, ref: str) -> AsyncGenerator[PullProgress, None]:
        """Start or join the download of a model; yields its progress."""
        async with aclosing(self.locator.pulls.watch(ref)) as steps:
            async for step in steps:
                yield step
        self.models_changed()

    def running_pulls(self) -> list[RunningPull]:
        """The models, and layers of other machines' models, that are being fetched."""
        parts = self.copies.parts_coming if self.copies is not None else {}
        return [
            RunningPull(name)
            if step is None
            else RunningPull(name, f"{step.stage} {step.file}".strip(), step.done_bytes, step.total_bytes)
            for name, step in {**parts, **self.locator.pulls.running}.items()
        ]

    def _current_card(self) -> Card | None:
        """What others are sent of this machine; None while it starts."""
        return self.card.card() if self.card is not None else None

    def _own_card(self) -> Card:
        """The same. Raises Draining while it starts."""
        if (card := self._current_card()) is None:
            raise Draining("The daemon is still starting.")
        return card

    def _has(self, digest: str) -> bool:
        return any(model.digest == digest for model in self._own_card().models)

    def _peers(self) -> list[PeerView]:
        return self.fleet.view().peers if self.fleet is not None else []

    # ---- the features ------------------------------------------------------------------------------------

    def _fleet_of(self, node: Node) -> Fleet:
        return Fleet(
            node,
            local_only=self._config.fleet.local_only,
            manage=self._config.fleet.manage,
            wakes=self._config.power.wake,
            own_card=self._current_card,
        )

    def _survey(self, fleet: Fleet) -> PromptSurvey:
        looked = partial(self.machine.metrics.looked, "placement")
        return PromptSurvey(fleet, self.members, self.kept, looked)

    def _block_fetching(self, fleet: Fleet) -> BlockFetching | None:
        """None without a disk cache: what is fetched passes through its blocks."""
        if self.machine.disk_cache.for_workers is None:
            return None
        return BlockFetching(fleet, self.machine.pool, self.members, self.fetch_counts, self.origins.label)

    def _groups(self, fleet: Fleet) -> FleetGroups:
        pool, sums = self.machine.pool, MeasuredSums()
        pool.maker.ranks = ranks = RankPlanner(
            fleet,
            self.members,
            self.promised.promise,
            lambda: self.machine.weight_rules().budget_bytes,
            sums,
            self.fabrics,
        )
        exact = self._config.fleet.exactness == "exact"
        return FleetGroups(
            fleet,
            self.members,
            self.machine.weight_rules,
            lambda folder: _speed_together(pool.engine(folder)),
            self.promised,
            RankPrices(self.members, sums, ranks.check, self._fabrics_towards, exact=exact),
            lambda order: self.machine.models.pull_part(order),
        )

    def _fabrics_towards(self, node_id: str) -> list[str]:
        """What this machine would offer to carry sums with on the link to another one."""
        path = self.fleet.dialer.best(node_id) if self.fleet is not None else None
        if path is None or self.fabrics is None:
            return []
        return self.fabrics.towards(path.address[0])

    async def together(self, folder: ModelFolder, over: Sequence[str]) -> GroupView | None:
        """How machines of these names would hold a model with this one. Raises FleetError if they cannot."""
        return await self.groups.view(folder, over) if self.groups is not None else None

    def _prefill_sharing(self, fleet: Fleet) -> PrefillSharing:
        machine = self.machine
        return PrefillSharing(
            fleet, machine.pool, self.members, machine.metrics, machine.speeds, label=self.origins.label
        )

    def _drafter_service(self) -> AnswerDrafting:
        settings = self._config.speculation
        return AnswerDrafting(
            self.fleet,
            self.members,
            self.machine.pool,
            self.machine.models,
            self.machine.metrics,
            model=settings.draft_model,
            where=settings.draft_on,
        )

    def _placer(self) -> Placer:
        request = self.fleet.request if self.fleet else DisabledFleet().request
        wake = self.fleet.waker.wake if self.fleet else None
        return Placer(
            self.members,
            request,
            lambda model: self.machine.pool.facts(model),
            wake,
            needed_bytes=lambda folder: estimated_files(
                folder.weights_bytes, folder.config, self.machine.weight_rules()
            ),
            kv_bits=self._config.models.kv_bits_of,
        )

    def _compression(self) -> CompressionService:
        machine = self.machine
        scorers = Scorers(
            machine.pool,
            machine.models,
            machine.speeds,
            self.members,
            profiles=machine.profiles,
            warm=self.sharing.warm if self.sharing else lambda load, model: None,
        )
        request = self.fleet.request if self.fleet else None
        scoring = SegmentScoring(
            machine.pool,
            request,
            monotonic=time.monotonic,
            clock_offset_s=self.members.clock_offset_s,
        )
        turns = ModelTurns(
            machine.pool,
            lambda: machine.usable_bytes() + WORKING_BYTES,
            lambda folder: needed_bytes(folder, machine.weight_rules()),
        )
        return CompressionService(scoring, scorers, machine.ledger, turns=turns)

    def _locator(self) -> ModelLocator:
        models = self.machine.models
        return ModelLocator(models, self._config.models.names, embedded_name, self.copies)

    def _runner(self) -> RequestRunner:
        machine = self.machine
        kept = self.kept if self.fleet else None
        groups = GroupLabels(machine.pool) if self.fleet else None
        features = (groups, kept, self.fetching, self.sharing, self.drafting)
        return RequestRunner(
            machine.pool,
            self.locator,
            Accounts(machine.ledger, machine.metrics, machine.speeds),
            self.members,
            [feature for feature in features if feature is not None],
            placer=self.placer,
            smart=self.smart,
            survey=self.survey,
            record=machine.traces.record,
            name=self._config.fleet.name or default_name(),
        )

    def _vectors(self) -> VectorService:
        machine = self.machine
        return VectorService(
            machine.pool,
            self.locator,
            VectorMachines(machine.pool, self.locator, self.members),
            machine.ledger,
            machine.metrics,
            self.fleet.request if self.fleet else None,
            record=machine.traces.record,
            name=self._config.fleet.name or default_name(),
            draining=lambda: self.runner.draining,
            failed=lambda node_id, error, model: self.members.failed(node_id, "vectors", error, model),
            succeeded=lambda node_id, model: self.members.succeeded(node_id, "vectors", model),
        )

    # ---- for other machines ------------------------------------------------------------------------------

    def _serve_peers(self, node: Node) -> AssistServer:
        """Handle what members may ask of this machine, besides copies."""
        machine = self.machine
        context = ServingContext(
            machine.models,
            self._own_card,
            draining=lambda: self.runner.draining,
            finished=machine.metrics.served,
        )
        dialer = BulkDialer(node)
        assists = AssistServer(dialer, machine.pool.lent, context, label=self.origins.label)
        blocks = BlockServer(
            dialer,
            machine.disk_cache,
            self.kept,
            context,
            self._sees_prompts,
            self.fetch_counts,
            node.name_of,
        )
        for method, unaided in messages.METHODS.items():
            node.handle(method, remote.JobServer(self.runner.run, self._has, node.name_of, unaided=unaided))
        node.handle(
            vector_messages.VECTORS,
            VectorServer(machine.pool, context, machine.ledger, chats=self._chats),
        )
        node.handle(smart_messages.SCORE, ScoreServer(machine.pool, context, machine.ledger))
        node.handle(drafting_messages.FOLLOW, DraftServer(dialer, machine.pool.lent, context))
        node.handle(fetching_messages.FIND, blocks.find)
        node.handle(fetching_messages.LOOK, blocks.look)
        node.handle(fetching_messages.FETCH, blocks.fetch)
        node.handle(sharing_messages.ASSIST, assists.assist)
        node.handle(sharing_messages.WARM, assists.warm)
        self.stages = StageServer(
            dialer,
            machine.pool.lent,
            context,
            node.name_of,
            self.promised,
            machine.usable_bytes,
            machine.weight_rules,
            copies=self.copies,
            label=self.origins.label,
            pulls=lambda peer: self._config.fleet.manage and self._confirmed(peer),
        )
        node.handle(group_messages.SERVE, self.stages)
        node.handle(group_messages.FETCH, self.stages.fetch)
        node.handle(group_messages.LINK, self.stages.link)
        ranks = RankServer(
            dialer,
            machine.pool.lent,
            context,
            self.promised.promise,
            machine.usable_bytes,
            lambda: machine.weight_rules().accelerator == "cpu",
            node.name_of,
            self.fabrics,
        )
        node.handle(rank_messages.SERVE, ranks)
        managing = ManageServer(
            ModelOperations(machine.models, machine.pool, machine.pinned, self.pull, self.models_changed),
            lambda words: self.models_shown(words),
            context,
            enabled=self._config.fleet.manage,
            confirmed=self._confirmed,
            name_of=node.name_of,
        )
        node.handle(managing_messages.RUN, managing.run)
        node.handle(managing_messages.LOOK, managing.look)
        return assists

    def _chats(self) -> bool:
        """True while this machine answers a chat."""
        return self.members.requests_at(THIS_NODE).requests > 0

    def _confirmed(self, node_id: str) -> bool:
        """True for a member that a person here has confirmed."""
        member = self.node.roster.members.get(node_id) if self.node is not None else None
        return member is not None and member.confirmed

    def _sees_prompts(self, node_id: str) -> bool:
        """True if a machine may see the prompts that were typed here."""
        return any(
            member.node_id == node_id and member.sees_prompts for member in self.members.others("fetch")
        )


def _speed_together(engine: EngineProcess | None) -> MeasuredSpeed | None:
    """What was measured of a model that others have layers of, each whole; None of another one."""
    return engine.speed if isinstance(engine, GroupFront) and engine.settings.ring is None else None


async def _not_yet(words: str) -> ModelListing | FoundModels:
    raise Draining("The daemon is still starting.")


def embedded_name(ref: str) -> str | None:
    """The catalog name behind a reference if that model travels with fleetd."""
    entry = find(ref)
    return entry.name if entry is not None and entry.source == "embedded" else None


def _model_store(config: Config, home: HomeFolder) -> ModelStore:
    chosen, hub_cache = config.models.dir, config.models.hub_cache
    return ModelStore(
        Path(chosen).expanduser().absolute() if chosen else home.models,
        hub_cache=Path(hub_cache).expanduser() if hub_cache else None,
    )


def _node_settings(config: Config, home: HomeFolder, most_unknown: int) -> NodeSettings:
    fleet = config.fleet
    return NodeSettings(
        folder=home.identity,
        name=fleet.name or default_name(),
        software=__version__,
        host=fleet.host,
        port=fleet.port,
        mdns=fleet.mdns,
        static=tuple(fleet.static_peers),
        plain_links=tuple(fleet.plain_links),
        most_unknown=most_unknown,
    )


def _cache_settings(config: Config, home: HomeFolder) -> DiskCacheSettings:
    chosen = config.cache.dir
    folder = Path(chosen).expanduser().absolute() if chosen else home.kv_blocks
    return DiskCacheSettings(str(folder), str(home.kv_key), config.cache.quota_bytes)


def _worker_options(config: Config, home: HomeFolder, blocks: DiskCacheSettings | None) -> WorkerOptions:
    engine = config.engine
    return WorkerOptions(
        device=engine.device,
        threads=engine.threads,
        cpu_arithmetic=engine.cpu_arithmetic,
        max_memory_bytes=engine.max_memory_bytes,
        memory_fraction=engine.memory_fraction,
        overcommit=engine.overcommit,
        wire_weights=engine.wire_weights,
        max_streams=engine.max_streams,
        prefill_chunk_tokens=engine.prefill_chunk_tokens,
        prefix_cache_bytes=engine.prefix_cache_bytes,
        speculation=config.speculation.mode,
        cache=str(home.cache),
        blocks=blocks,
    )
