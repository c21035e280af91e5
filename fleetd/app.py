"""The daemon: the order in which its parts (``parts``) start and stop.

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
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path

import msgspec
import psutil
import uvloop
from aiohttp import web

from fleetd import __version__, limits
from fleetd.api.app import build_app
from fleetd.api.control.daemon import shown
from fleetd.api.control.settings_file import SettingsFile
from fleetd.api.http.deadlines import BoundedRunner
from fleetd.api.http.disabled_fleet import DisabledFleet
from fleetd.api.http.services import Services
from fleetd.composition import DaemonParts
from fleetd.config import DEFAULT_PORT, Config
from fleetd.control.daemon_status import DaemonStatus, EngineStatus, HttpAddress, RequestCounts
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.errors import ConfigError, FleetError, PortInUse
from fleetd.models import file_threads
from fleetd.models.model_store import ModelStore
from fleetd.models.names import shown_name
from fleetd.models.verify import verify
from fleetd.p2p.membership.new_identity import finish
from fleetd.power.keep_awake import KeepAwake
from fleetd.process.busy_port import port_in_use
from fleetd.process.descriptors import UNSCALED, connection_caps, open_limit, raise_limit
from fleetd.process.notify import Notifier
from fleetd.process.observe import get_logger
from fleetd.process.periodic import keep_running
from fleetd.storage import paths
from fleetd.storage.durable import PRIVATE_FILE
from fleetd.storage.paths import HomeFolder
from fleetd.storage.store import StoreUnavailable
from fleetd.text.host_port import host_port

log = get_logger("fleetd")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_PRUNE_S = 86_400.0


def run(
    config: Config,
    home: HomeFolder,
    new_identity: subprocess.Popen[bytes] | None = None,
    config_file: Path | None = None,
    *,
    greet: Callable[[str], None] | None = None,
) -> None:
    """Run the daemon in a prepared home until a signal ends it; raises FleetError if it cannot start.

    ``new_identity``: a process that makes the home's identity; it is waited for. ``config_file``: where
    ``config`` was read from, if not from the home's own file. ``greet``: is called with the address of the
    API once it is served, in place of the log's line; None logs it.
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
                daemon = Daemon(config, home, new_identity=new_identity, config_file=config_file, greet=greet)
                runner.run(daemon.serve())
        except BaseExceptionGroup as group:
            # The task group wraps even a single failure; people get the failure.
            raise _first(group) from group


class Daemon:
    """One daemon. ``pool`` and ``models``: for tests, instead of those of ``config``."""

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
        config_file: Path | None = None,
        greet: Callable[[str], None] | None = None,
    ) -> None:
        self._config = config
        self._config_file = config_file or home.config
        self._greet = greet
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
        self._parts = DaemonParts(config, home, self._caps.peers_unknown, pool=pool, models=models)
        self._machine, self._runner = self._parts.machine, self._parts.runner
        self._node, self._fleet = self._parts.node, self._parts.fleet
        power = config.power
        self._awake = KeepAwake(
            lambda: self._parts.busy, enabled=power.keep_awake, least_battery=power.least_battery
        )

    def status(self) -> DaemonStatus:
        machine = self._machine.prober.read()
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
            undigested=self._parts.card.undigested if self._parts.card is not None else {},
            machine=machine,
            memory=self._machine.memory_budget(machine, machine.model_available_bytes),
            engines=[self._for_people(engine) for engine in self._machine.pool.status()],
            pulls=self._parts.running_pulls(),
            requests=self._counts(),
            power=self._awake.view,
            fleet=self._fleet.view() if self._fleet is not None else DisabledFleet().view(),
        )

    def _counts(self) -> RequestCounts:
        """Requests of chats, and of vectors and scores, which computes another part of the daemon."""
        counts = self._runner.counts
        return msgspec.structs.replace(counts, running=counts.running + len(self._parts.vectors.running()))

    def _for_people(self, engine: EngineStatus) -> EngineStatus:
        """The engine with its speeds as answers have corrected them since they were measured, and the name
        that its model has on the machine that has all of it."""
        engine = msgspec.structs.replace(engine, part_of=shown_name(engine.part_of))
        speed = self._machine.speeds.of(engine.model)
        if engine.part_of or engine.ranks or not speed.decode_tok_s:
            return engine
        return msgspec.structs.replace(engine, speed=speed)

    async def serve(self) -> None:
        """Start, say READY, run until a signal, stop."""
        if self._config.engine.overcommit:
            log.warning("memory.overcommit", note="models load whatever memory is free; the machine may swap")
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        async with AsyncExitStack() as stack:
            # Closing joins a thread that may be waiting for a disk.
            stack.push_async_callback(asyncio.to_thread, self._machine.store.close)
            await self._open_ledger()
            token = await asyncio.to_thread(paths.load_token, self._home.token)
            stack.push_async_callback(asyncio.to_thread, self._machine.disk_cache.close)
            await asyncio.to_thread(self._machine.disk_cache.start)
            await self._sweep_models()
            if self._new_identity is not None:
                await asyncio.to_thread(finish, self._new_identity)
            if self._node is not None:
                await self._node.open()
            if self._fleet is not None:
                await self._parts.origins.begin(self._fleet.pairings())
            async with asyncio.TaskGroup() as group:
                background = self._begin_background(group)
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

    def _begin_background(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Begin what runs beside requests until the daemon stops."""
        card = self._parts.make_card()
        tasks = [
            group.create_task(keep_running("pool", self._machine.pool.run), name="pool"),
            group.create_task(keep_running("watchdog", self._notifier.watchdog), name="watchdog"),
            group.create_task(keep_running("prune", self._prune_daily), name="prune"),
            group.create_task(keep_running("keep awake", self._awake.run), name="keep awake"),
            group.create_task(keep_running("card", card.run), name="card"),
            group.create_task(keep_running("pinned models", self._load_pinned), name="pinned models"),
        ]
        if self._fleet is not None:
            tasks.append(group.create_task(self._fleet.run(), name="fleet"))
            watch = partial(self._parts.origins.watch, self._fleet.node.changed, self._fleet.pairings)
            tasks.append(group.create_task(keep_running("origins", watch), name="origins"))
        return tasks

    async def _sweep_models(self) -> None:
        """Before any model is looked for: the only copy of one may have to be brought back."""
        try:
            async with asyncio.timeout(limits.STOP_S):
                for folder in await file_threads.look(self._machine.models.sweep):
                    log.warning("models.brought_back", folder=folder)
        except (TimeoutError, OSError) as error:
            log.warning("models.not_swept", error=str(error))

    async def _open_ledger(self) -> None:
        try:
            lost = await asyncio.to_thread(self._machine.ledger.recover)
        except StoreUnavailable as error:
            log.warning(
                "ledger.degraded", error=str(error), note="usage is not recorded; answers are not affected"
            )
        else:
            if lost:
                log.info("ledger.recovered", refunded=lost)

    async def _load_pinned(self) -> None:
        """Load the pinned models one by one: each needs the disk, and its load says what memory is left."""
        for name in sorted(self._machine.pinned.names):
            try:
                await self._machine.pool.load(await file_threads.look(self._machine.models.resolve, name))
            except FleetError as error:
                log.warning("pinned.not_loaded", model=name, code=error.code, error=error.message)

    def _services(self, token: str) -> Services:
        """What the HTTP application needs of this daemon."""
        http, machine, parts = self._config.http, self._machine, self._parts
        settings = SettingsFile(self._config_file, self._config)
        return Services(
            runner=self._runner,
            models=machine.models,
            pull=parts.pull,
            pool=machine.pool,
            ledger=machine.ledger,
            metrics=machine.metrics,
            status=self.status,
            verify=verify,
            token=token if http.require_token else "",
            version=__version__,
            names=self._config.models.names,
            weight_rules=machine.weight_rules,
            hosts=http.hosts,
            origins=frozenset(http.allowed_origins),
            fleet=self._fleet or DisabledFleet(),
            plan=parts.plans.plan,
            added=parts.plans.added,
            over=parts.placer.over,
            together=parts.together,
            pinned=machine.pinned,
            traces=machine.traces.newest,
            smart_defaults=self._config.smart_prefill.policy,
            compressing=parts.compressing,
            vectors=parts.vectors,
            disk_cache=machine.disk_cache,
            fetches=parts.fetch_counts.machines,
            models_changed=parts.models_changed,
            running=parts.running,
            ended=machine.traces.ended,
            answer_tokens=self._config.engine.answer_tokens or None,
            exactness=self._config.fleet.exactness,
            settings=settings.view,
            change_setting=settings.change,
        )

    async def _listen(self, stack: AsyncExitStack, token: str) -> HttpAddress:
        http = self._config.http
        services = self._services(token)
        self._parts.models_shown = partial(shown, services)
        app = build_app(services)
        local = BoundedRunner(app, trusted=True, caps=self._caps)
        stack.push_async_callback(local.cleanup)
        await local.setup()
        try:
            await web.UnixSite(local, self._home.socket).start()
        except OSError as error:  # its disk may have no sockets, as many of the network
            raise paths.unusable(self._home, error) from error
        stack.callback(self._home.socket.unlink, missing_ok=True)
        self._home.socket.chmod(PRIVATE_FILE)

        remote = BoundedRunner(app, trusted=False, caps=self._caps)
        stack.push_async_callback(remote.cleanup)
        await remote.setup()
        listening = await _open_tcp(remote, http.host, http.port)
        if http.ollama_address is not None:
            tokenless = BoundedRunner(app, trusted=False, needs_token=False, caps=self._caps)
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
        if self._greet is not None:
            self._greet(address)
            return
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
                pruned = await asyncio.to_thread(self._machine.ledger.prune, self._config.usage.keep_days)
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
        # Who waits for files until then waits for a disk that does not answer.
        looks = asyncio.get_running_loop().call_later(limits.STOP_S, file_threads.abandon)
        try:
            await asyncio.wait(waits, timeout=limits.DRAIN_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            looks.cancel()
            file_threads.abandon()
            for wait in waits:
                wait.cancel()

    async def _wait_hurry(self) -> None:
        await self._hurry.wait()

    async def _end_engines(self) -> None:
        await self._runner.abandon()
        await self._parts.close()
        within_s = limits.STOP_S / 2 if self._hurry.is_set() else 2 * limits.ENGINE_STOP_S
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._machine.pool.close()
                await self._machine.close()


def _http_sites(config: Config) -> int:
    """The local socket, the port, and the address for clients of Ollama."""
    return 2 if config.http.ollama_address is None else 3


async def _open_tcp(runner: web.AppRunner, host: str, port: int) -> HttpAddress:
    # One family, so that port 0 means one port.
    address = "127.0.0.1" if host == "localhost" else host
    try:
        await web.TCPSite(runner, address, port).start()
    except OSError as error:
        where = host_port(address, port)
        if error.errno == errno.EADDRINUSE:
            raise port_in_use("The address", "http.listen", address, port) from None
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
