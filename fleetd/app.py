"""The composition root: the only module that knows all parts, and the order in which they start and stop.

    start  lock → store → token → pool → peer port → HTTP on the Unix socket and on TCP → READY
    stop   STOPPING → new work refused (503) → running answers finish, at most DRAIN_S → the rest ends with a
           typed error → good-bye to peers → engines → sockets → store → lock

A second signal skips the waiting. A last-resort timer outside the event loop bounds both ways, so that
nothing that hangs can hold the process.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import uvloop
from aiohttp import web

from fleetd import __version__, limits
from fleetd.api.app import build_app, make_runner
from fleetd.api.disabled_fleet import DisabledFleet
from fleetd.api.services import Services
from fleetd.cache.service import DiskCache
from fleetd.cache.settings import DiskCacheSettings
from fleetd.config import DEFAULT_PORT, Config, setting_views
from fleetd.control.daemon_status import DaemonStatus, HardwareReading, HttpAddress, MemoryBudget
from fleetd.control.fleet_view import PeerView
from fleetd.descriptors import UNSCALED, connection_caps, open_limit, raise_limit
from fleetd.engine.pool import EnginePool, PoolOptions
from fleetd.engine.scoring.known_profiles import ProfileStore
from fleetd.errors import ConfigError, Draining, FleetError, PortInUse
from fleetd.fleet import Fleet, default_name
from fleetd.hardware.memory import machine_budget
from fleetd.hardware.probe import HardwareProbe
from fleetd.home import paths
from fleetd.home.durable import PRIVATE_FILE
from fleetd.home.paths import HomeFolder
from fleetd.host_port import host_port
from fleetd.ledger import Ledger
from fleetd.metrics import Metrics
from fleetd.models.catalog import CATALOG, find
from fleetd.models.folder import ModelFolder
from fleetd.models.model_store import ModelStore
from fleetd.models.pinned import PinnedModels
from fleetd.models.verify import verify
from fleetd.notify import Notifier
from fleetd.observe import get_logger
from fleetd.own_card import CardMaker
from fleetd.p2p import wake_on_lan
from fleetd.p2p.membership.cards import Card
from fleetd.p2p.membership.new_identity import finish
from fleetd.p2p.node import Node, NodeSettings
from fleetd.periodic import keep_running
from fleetd.plan.model_speeds import ModelSpeeds
from fleetd.power.keep_awake import KeepAwake
from fleetd.requests import messages, remote
from fleetd.requests.admission import ServingContext
from fleetd.requests.bulk_dialer import BulkDialer
from fleetd.requests.drafting import messages as drafting_messages
from fleetd.requests.drafting.client import DrafterService
from fleetd.requests.drafting.server import DraftServer
from fleetd.requests.job import THIS_NAME
from fleetd.requests.kv_fetching import messages as fetching_messages
from fleetd.requests.kv_fetching.client import BlockFetching
from fleetd.requests.kv_fetching.fetch_counts import FetchCounts
from fleetd.requests.kv_fetching.kept_prompts import KeptPrompts
from fleetd.requests.kv_fetching.prompt_survey import PromptSurvey
from fleetd.requests.kv_fetching.server import BlockServer
from fleetd.requests.members import Members
from fleetd.requests.model_copies import ModelCopies
from fleetd.requests.placement import Placer
from fleetd.requests.plan_service import PlanService
from fleetd.requests.prefill_sharing import messages as sharing_messages
from fleetd.requests.prefill_sharing.client import PrefillSharing
from fleetd.requests.prefill_sharing.server import AssistServer
from fleetd.requests.runner import Runner
from fleetd.requests.smart_prefill import messages as smart_messages
from fleetd.requests.smart_prefill.client import SmartPrefill
from fleetd.requests.smart_prefill.compression_job import CompressionService
from fleetd.requests.smart_prefill.scorers import Scorers
from fleetd.requests.smart_prefill.segment_scoring import SegmentScoring
from fleetd.requests.smart_prefill.server import ScoreServer
from fleetd.requests.traces import Traces
from fleetd.store import Store, StoreUnavailable

log = get_logger("fleetd")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_PRUNE_S = 86_400.0


def run(config: Config, home: HomeFolder, new_identity: subprocess.Popen[bytes] | None = None) -> None:
    """Run the daemon in a prepared home until a signal ends it; raises FleetError if it cannot start.

    ``new_identity``: a process that makes the home's identity; it is waited for.
    """
    # No prompt ends up in a core dump.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    raise_limit()
    if (caps := connection_caps(open_limit(), _http_sites(config))) != UNSCALED:
        # The log of a service does not show what a shell was limited to.
        log.warning("descriptors.few", open_files=open_limit(), connections=caps.http, raise_with="ulimit -n")
    with paths.HomeLock(home):
        paths.clear_stale_socket(home.socket)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(Daemon(config, home, new_identity=new_identity).serve())
        except BaseExceptionGroup as group:
            # The task group wraps even a single failure; people get the failure.
            raise _first(group) from group


class Daemon:
    """All parts of one daemon."""

    def __init__(
        self,
        config: Config,
        home: HomeFolder,
        *,
        pool: EnginePool | None = None,
        models: ModelStore | None = None,
        notifier: Notifier | None = None,
        exit_after: Callable[[float], None] | None = None,
        new_identity: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self._config = config
        self._home = home
        self._notifier = notifier or Notifier()
        self._exit_after = exit_after or _exit_after
        self._new_identity = new_identity
        self._started_s = time.monotonic()
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._ready = False
        self._http: HttpAddress | None = None
        self._ollama: HttpAddress | None = None
        self._ollama_missing = ""
        self._caps = connection_caps(open_limit(), _http_sites(config))
        self._prober = HardwareProbe(gpu=config.engine.device != "cpu")
        self._store = Store(home.db)
        self._ledger = Ledger(self._store)
        self._models = models or ModelStore(
            Path(config.models.dir).expanduser().absolute() if config.models.dir else home.models,
            hub_cache=Path(config.models.hub_cache).expanduser() if config.models.hub_cache else None,
        )
        self._pinned = PinnedModels(home.pinned_models)
        self._disk_cache = DiskCache(
            _cache_settings(config, home), on=config.cache.disk, note=lambda: self._pool.disk_note
        )
        self._pool = pool or EnginePool(
            _pool_options(config, home, self._disk_cache.for_workers),
            record_path=self._models.record_path,
            pressure=lambda: self._prober.read().pressure,
            accelerator=lambda: self._prober.read().accelerator,
            pinned=lambda: self._pinned.names,
        )
        self._metrics = Metrics(__version__, engines=self._pool.status, peers=self._peers)
        self._node = (
            Node(_node_settings(config, home, self._caps.peers_unknown)) if config.fleet.enabled else None
        )
        self._fleet = (
            Fleet(
                self._node,
                local_only=config.fleet.local_only,
                wakes=config.power.wake,
                own_card=self._told_card,
            )
            if self._node
            else None
        )
        copies = ModelCopies(self._node, self._models, self._own_card) if self._node else None
        self._speeds = ModelSpeeds()
        self._profiles = ProfileStore.in_home(home.cache)
        # One for all services: a machine that failed one of them is left out of the others, too.
        self._members = Members(
            self._fleet.machines if self._fleet else tuple,
            self._told_card,
            unaided=self._fleet.unaided if self._fleet else lambda: False,
            local_only=config.fleet.local_only,
        )
        self._traces = Traces(self._store)
        self._drafting = DrafterService(
            self._fleet,
            self._members,
            self._pool,
            self._models,
            self._metrics,
            model=config.speculation.draft_model,
            where=config.speculation.draft_on,
            remembers=config.speculation.remember,
        )
        self._sharing = self._sharer(self._fleet) if self._fleet else None
        fetches = self._fleet is not None and self._disk_cache.for_workers is not None
        self._fetch_counts = FetchCounts(self._metrics.fetched)
        self._kept = KeptPrompts(
            self._disk_cache, lambda model: self._members.here().model(model), self._write_kept
        )
        looked = partial(self._metrics.looked, "placement")
        survey = PromptSurvey(self._fleet, self._members, self._kept, looked) if self._fleet else None
        self._fetching = (
            BlockFetching(self._fleet, self._pool, self._members, self._fetch_counts)
            if self._fleet and fetches
            else None
        )
        request = self._fleet.request if self._fleet else DisabledFleet().request
        wake = self._fleet.waker.wake if self._fleet else None
        placer = Placer(self._members, request, lambda model: self._pool.facts(model), wake)
        self._compressing = self._compressor()
        self._smart = SmartPrefill(
            self._compressing,
            self._members,
            self._pool,
            self._metrics,
            placer=placer,
        )
        self._runner = Runner(
            pool=self._pool,
            models=self._models,
            source=copies or self._models,
            ledger=self._ledger,
            metrics=self._metrics,
            names=config.models.names,
            embedded=embedded_name,
            placing=placer,
            sharing=self._sharing,
            smart=self._smart,
            drafting=self._drafting,
            fetching=self._fetching,
            kept=self._kept if self._fleet else None,
            survey=survey,
            speeds=self._speeds,
            members=self._members,
            record=self._traces.record,
        )
        self._plans = PlanService(
            placer, self._runner.locate, self._smart, self._drafting, config.smart_prefill.policy, survey
        )
        self._assists = self._serve_peers(self._node) if self._node else None
        self._card: CardMaker | None = None
        power = config.power
        self._awake = KeepAwake(self._working, enabled=power.keep_awake, least_battery=power.least_battery)

    def _working(self) -> bool:
        """Whether this machine computes, or passes on answers, for anybody."""
        counts = self._runner.counts
        return counts.running + counts.waiting > 0 or self._pool.busy

    def _write_kept(self, folder: ModelFolder) -> None:
        """Let the worker of a model write kept prompts at once."""
        if (engine := self._pool.engine(folder)) is not None:
            engine.write_now()

    def _sharer(self, fleet: Fleet) -> PrefillSharing:
        return PrefillSharing(fleet, self._pool, self._members, self._metrics, self._speeds)

    def _compressor(self) -> CompressionService:
        scorers = Scorers(
            self._pool,
            self._models,
            self._speeds,
            self._members,
            profiles=self._profiles,
            warm=self._sharing.warm if self._sharing else lambda load, model: None,
        )
        request = self._fleet.request if self._fleet else None
        scoring = SegmentScoring(self._pool, request, monotonic=time.monotonic)
        return CompressionService(scoring, scorers, self._ledger)

    def _serve_peers(self, node: Node) -> AssistServer:
        """What members may ask of this machine, besides copies."""
        context = ServingContext(
            self._models,
            self._own_card,
            draining=lambda: self._runner.draining,
            finished=self._metrics.served,
        )
        dialer = BulkDialer(node)
        assists = AssistServer(dialer, self._pool, context)

        node.handle(messages.RUN, remote.JobServer(self._runner.run, self._has, node.name_of))
        unaided = remote.JobServer(self._runner.run, self._has, node.name_of, unaided=True)
        node.handle(messages.RUN_UNAIDED, unaided)
        node.handle(smart_messages.SCORE, ScoreServer(self._pool, context, self._ledger))
        node.handle(drafting_messages.FOLLOW, DraftServer(dialer, self._pool, context))
        blocks = BlockServer(
            dialer,
            self._disk_cache,
            self._kept,
            context,
            self._sees_prompts,
            self._fetch_counts,
            node.name_of,
        )
        node.handle(fetching_messages.FIND, blocks.find)
        node.handle(fetching_messages.LOOK, blocks.look)
        node.handle(fetching_messages.FETCH, blocks.fetch)
        node.handle(sharing_messages.ASSIST, assists.assist)
        node.handle(sharing_messages.WARM, assists.warm)
        return assists

    def _sees_prompts(self, node_id: str) -> bool:
        """Whether a machine may see the prompts that were typed here."""
        return any(
            member.node_id == node_id and member.sees_prompts for member in self._members.others("fetch")
        )

    def status(self) -> DaemonStatus:
        machine = self._prober.read()
        return DaemonStatus(
            version=__version__,
            pid=os.getpid(),
            home=str(self._home.root),
            socket=str(self._home.socket),
            http=self._http,
            ollama=self._ollama,
            ollama_missing=self._ollama_missing,
            uptime_s=round(time.monotonic() - self._started_s, 3),
            ready=self._ready and not self._runner.draining,
            draining=self._runner.draining,
            default_model=self._config.models.default,
            machine=machine,
            memory=self._memory_budget(machine, machine.model_available_bytes),
            engines=self._pool.status(),
            requests=self._runner.counts,
            power=self._awake.view,
            fleet=self._fleet.view() if self._fleet is not None else DisabledFleet().view(),
        )

    async def serve(self) -> None:
        """Start, say READY, run until a signal, stop."""
        if self._config.engine.overcommit:
            log.warning("memory.overcommit", note="models load whatever memory is free; the machine may swap")
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        async with AsyncExitStack() as stack:
            # Closing joins a thread that may be waiting for a disk.
            stack.push_async_callback(asyncio.to_thread, self._store.close)
            await self._open_ledger()
            token = await asyncio.to_thread(paths.load_token, self._home.token)
            stack.push_async_callback(asyncio.to_thread, self._disk_cache.close)
            await asyncio.to_thread(self._disk_cache.start)
            if self._new_identity is not None:
                await asyncio.to_thread(finish, self._new_identity)
            if self._node is not None:
                await self._node.open()
            async with asyncio.TaskGroup() as group:
                background = [
                    group.create_task(keep_running("pool", self._pool.run), name="pool"),
                    group.create_task(keep_running("watchdog", self._notifier.watchdog), name="watchdog"),
                    group.create_task(keep_running("prune", self._prune_daily), name="prune"),
                ]
                awake = keep_running("keep awake", self._awake.run)
                background.append(group.create_task(awake, name="keep awake"))
                self._card = self._card_maker(self._node)
                if self._fleet is not None:
                    background.append(group.create_task(self._fleet.run(), name="fleet"))
                background.append(group.create_task(keep_running("card", self._card.run), name="card"))
                pinned = keep_running("pinned models", self._load_pinned)
                background.append(group.create_task(pinned, name="pinned models"))
                try:
                    async with AsyncExitStack() as sites:
                        self._http = await self._listen(sites, token)
                        self._tell_ready(self._http)
                        await self._stop.wait()
                        await self._drain()
                        if self._node is not None:
                            await self._node.goodbye()
                        await self._end_engines()
                finally:
                    for task in background:
                        task.cancel()
        log.info("daemon.stopped")
        # A thread may still be reading a model of hundreds of gigabytes; its result is not waited for.
        self._exit_after(limits.STOP_S)

    # ---- starting ----------------------------------------------------------------------------------------

    async def _open_ledger(self) -> None:
        try:
            lost = await asyncio.to_thread(self._ledger.recover)
        except StoreUnavailable as error:
            log.warning(
                "ledger.degraded", error=str(error), note="usage is not recorded; answers are not affected"
            )
        else:
            if lost:
                log.info("ledger.recovered", refunded=lost)

    async def _load_pinned(self) -> None:
        """Load the pinned models one by one: each needs the disk, and its load says what memory is left."""
        for name in sorted(self._pinned.names):
            try:
                await self._pool.load(await asyncio.to_thread(self._models.resolve, name))
            except FleetError as error:
                log.warning("pinned.not_loaded", model=name, code=error.code, error=error.message)

    def _card_maker(self, node: Node | None) -> CardMaker:
        return CardMaker(
            node_id=node.identity.node_id if node is not None else THIS_NAME,
            epoch=node.epoch if node is not None else 0,
            name=node.name if node is not None else THIS_NAME,
            software=__version__,
            models=self._models,
            engines=self._pool.status,
            machine=self._prober.read,
            counts=lambda: self._runner.counts,
            draining=lambda: self._runner.draining,
            max_streams=self._config.engine.max_streams,
            publish=node.publish if node is not None else None,
            speeds=self._speeds,
            profiles=self._profiles,
            budget=self._memory_budget,
            wake=wake_on_lan.own_addresses() if node is not None and self._config.power.wake else (),
        )

    def _memory_budget(self, machine: HardwareReading, available_bytes: int) -> MemoryBudget:
        engine = self._config.engine
        return machine_budget(
            machine,
            available_bytes,
            self._pool.held_bytes,
            fraction=engine.memory_fraction,
            max_bytes=engine.max_memory_bytes,
            overcommit=engine.overcommit,
        )

    def _peers(self) -> list[PeerView]:
        return self._fleet.view().peers if self._fleet is not None else []

    async def _pull(self, ref: str) -> AsyncGenerator[Any, None]:
        async with aclosing(self._runner.pulls.watch(ref)) as steps:
            async for step in steps:
                yield step
        self._models_changed()

    def _models_changed(self) -> None:
        if self._card is not None:
            self._card.changed()

    def _told_card(self) -> Card | None:
        """What this machine tells others of itself; None while it starts."""
        return self._card.card() if self._card is not None else None

    def _own_card(self) -> Card:
        if self._card is None:
            raise Draining("The daemon is still starting.")
        return self._card.card()

    def _has(self, digest: str) -> bool:
        return any(model.digest == digest for model in self._own_card().models)

    async def _listen(self, stack: AsyncExitStack, token: str) -> HttpAddress:
        http = self._config.http
        app = build_app(
            Services(
                runner=self._runner,
                models=self._models,
                pull=self._pull,
                pool=self._pool,
                ledger=self._ledger,
                metrics=self._metrics,
                status=self.status,
                verify=verify,
                token=token if http.require_token else "",
                version=__version__,
                names=self._config.models.names,
                catalog=CATALOG,
                hosts=frozenset(http.allowed_hosts),
                origins=frozenset(http.allowed_origins),
                fleet=self._fleet or DisabledFleet(),
                plan=self._plans.plan,
                pinned=self._pinned,
                traces=self._traces.newest,
                smart_defaults=self._config.smart_prefill.policy,
                compressing=self._compressing,
                disk_cache=self._disk_cache,
                fetches=self._fetch_counts.machines,
                models_changed=self._models_changed,
                running=self._runner.running,
                ended=self._traces.ended,
                answer_tokens=self._config.engine.answer_tokens or None,
                settings=setting_views(self._config),
            )
        )
        local = make_runner(app, trusted=True, caps=self._caps)
        stack.push_async_callback(local.cleanup)
        await local.setup()
        await web.UnixSite(local, self._home.socket).start()
        stack.callback(self._home.socket.unlink, missing_ok=True)
        self._home.socket.chmod(PRIVATE_FILE)

        remote = make_runner(app, trusted=False, caps=self._caps)
        stack.push_async_callback(remote.cleanup)
        await remote.setup()
        listening = await _open_tcp(remote, http.host, http.port)
        if http.ollama_address is not None:
            tokenless = make_runner(app, trusted=False, needs_token=False, caps=self._caps)
            stack.push_async_callback(tokenless.cleanup)
            await tokenless.setup()
            await self._open_ollama(tokenless, *http.ollama_address)
        return listening

    async def _open_ollama(self, runner: web.AppRunner, host: str, port: int) -> None:
        """All else is served if the port is taken, mostly by Ollama itself."""
        try:
            self._ollama = await _open_tcp(runner, host, port)
        except (PortInUse, ConfigError) as error:
            taken = f"another program listens at {host_port(host, port)}"
            self._ollama_missing = taken if isinstance(error, PortInUse) else error.message
            log.warning(
                "http.ollama_not_served",
                reason=self._ollama_missing,
                note="end it and restart fleetd, or choose another http.ollama_listen; all else is served",
            )

    def _tell_ready(self, http: HttpAddress) -> None:
        self._ready = True
        address = f"http://{host_port(http.host, http.port)}/v1"
        self._notifier.ready(f"serving {address}")
        log.info(
            "daemon.ready",
            home=str(self._home.root),
            api=address,
            version=__version__,
            # Since the process began, imports included: what a person waits for.
            ready_s=round(self._since_start_s(), 2),
        )

    def _since_start_s(self) -> float:
        try:
            return time.time() - psutil.Process().create_time()
        except Exception:  # psutil meets kernels that it does not know
            return time.monotonic() - self._started_s

    async def _prune_daily(self) -> None:
        while True:
            with suppress(StoreUnavailable):
                pruned = await asyncio.to_thread(self._ledger.prune, self._config.usage.keep_days)
                if pruned:
                    log.info("ledger.pruned", rows=pruned, keep_days=self._config.usage.keep_days)
            await asyncio.sleep(_PRUNE_S)

    # ---- stopping ----------------------------------------------------------------------------------------

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            log.info("daemon.hurry", signal=number.name)
            self._hurry.set()
            self._exit_after(limits.STOP_S)
            return
        self._runner.begin_drain()
        self._stop.set()
        running = self._runner.counts
        log.info("daemon.draining", signal=number.name, running=running.running, waiting=running.waiting)
        self._notifier.stopping("finishing running answers")
        self._exit_after(limits.DRAIN_S + 2 * limits.ENGINE_STOP_S + limits.STOP_S)

    async def _drain(self) -> None:
        """Wait for running answers; at most DRAIN_S, and not at all after a second signal."""
        waits = [asyncio.create_task(self._runner.drained()), asyncio.create_task(self._wait_hurry())]
        try:
            await asyncio.wait(waits, timeout=limits.DRAIN_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _wait_hurry(self) -> None:
        await self._hurry.wait()

    async def _end_engines(self) -> None:
        await self._runner.abandon()
        for work in (self._sharing, self._assists, self._drafting, self._fetching, self._kept):
            if work is not None:
                await work.close()
        within_s = limits.STOP_S / 2 if self._hurry.is_set() else 2 * limits.ENGINE_STOP_S
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._pool.close()


def embedded_name(ref: str) -> str | None:
    """The catalog name behind a reference if that model travels with fleetd."""
    entry = find(ref)
    return entry.name if entry is not None and entry.source == "embedded" else None


def _http_sites(config: Config) -> int:
    """The local socket, the port, and the address for clients of Ollama."""
    return 2 if config.http.ollama_address is None else 3


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
        most_unknown=most_unknown,
    )


def _cache_settings(config: Config, home: HomeFolder) -> DiskCacheSettings:
    chosen = config.cache.dir
    folder = Path(chosen).expanduser().absolute() if chosen else home.kv_blocks
    return DiskCacheSettings(str(folder), str(home.kv_key), config.cache.quota_bytes)


def _pool_options(config: Config, home: HomeFolder, blocks: DiskCacheSettings | None) -> PoolOptions:
    engine = config.engine
    return PoolOptions(
        device=engine.device,
        threads=engine.threads,
        max_memory_bytes=engine.max_memory_bytes,
        memory_fraction=engine.memory_fraction,
        overcommit=engine.overcommit,
        wire_weights=engine.wire_weights,
        max_streams=engine.max_streams,
        prefill_chunk_tokens=engine.prefill_chunk_tokens,
        prefix_cache_bytes=engine.prefix_cache_bytes,
        speculation=config.speculation.mode,
        remember_answers=config.speculation.remember,
        cache=str(home.cache),
        blocks=blocks,
        idle_unload_s=float(engine.idle_unload_s),
    )


async def _open_tcp(runner: web.AppRunner, host: str, port: int) -> HttpAddress:
    # One family, so that port 0 means one port.
    address = "127.0.0.1" if host == "localhost" else host
    try:
        await web.TCPSite(runner, address, port).start()
    except OSError as error:
        where = host_port(address, port)
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"The address {where} is already in use by another program.",
                hint="Stop it, or choose another with --http HOST:PORT (port 0 picks a free one).",
            ) from None
        raise ConfigError(
            f"fleetd cannot listen on {where}: {(error.strerror or str(error)).lower()}.",
            hint=f"Choose an address of this machine with --http, for example 127.0.0.1:{DEFAULT_PORT}.",
            param="http.listen",
        ) from None
    bound = runner.addresses[0]
    return HttpAddress(str(bound[0]), int(bound[1]))


def _exit_after(seconds: float) -> None:
    """End the process by then, whatever hangs: a blocked loop, a thread in a system call, a full pipe."""
    timer = threading.Timer(seconds, os._exit, args=(0,))
    timer.daemon = True  # a process that ends earlier is not kept
    timer.start()


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner
