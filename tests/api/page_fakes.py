"""A scripted daemon whose page is looked at in a real browser, and the fleets that it pretends to have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from api_fakes import MODEL, FakeFleet, FakeLedger, FakeRunner, installed_models, services, status
from browser import Visit
from fakes import FakeModels, FakePool
from live_daemon import until
from msgspec.structs import replace

from fleetd.api.control.settings_file import SettingsFile
from fleetd.api.http.page_sessions import PageSessions
from fleetd.api.http.services import Services
from fleetd.config import Config
from fleetd.control import pairing_events
from fleetd.control.cache_report import CacheReport
from fleetd.control.daemon_status import DaemonStatus, RunningRequest
from fleetd.control.fleet_view import FleetView, PeerModel, PeerView
from fleetd.control.model_facts import MeasuredSpeed
from fleetd.control.prefill_plan import AddedQuestion, AddedView, OptionView, StepView
from fleetd.control.prefill_trace import Trace, TraceStep, TracesView
from fleetd.errors import FleetError
from fleetd.models.hub_search import HubPage

VIEWS = ("fleet", "requests", "history", "models", "chat", "pairing", "clients", "settings")


class WatchedFleet(FakeFleet):
    """Also notes which machine was to be unpaired, and which were to be kept."""

    unpaired: list[str]
    kept: list[str]

    async def unpair(self, peer: str, keep: Iterable[str] = ()) -> pairing_events.Unpaired:
        self.unpaired = [*getattr(self, "unpaired", []), peer]
        self.kept = list(keep)
        return pairing_events.Unpaired(peer, peer)


@dataclass
class FakeDiskCache:
    """Keeps as many bytes."""

    n_bytes: int = 0

    def report(self) -> CacheReport:
        return CacheReport(on=True, n_bytes=self.n_bytes)


def fleet_of(number: int) -> FleetView:
    peers = [
        PeerView(
            node_id=f"node{n:02}",
            short_id=f"n{n:02}",
            name=f"machine-{n:02}",
            state="unreachable" if n % 9 == 8 else "usable",
            reason="Connection refused." if n % 9 == 8 else "",
            tier="standard",
            chip="M4 Max",
            accelerator="metal",
            memory_bytes=(16 << (n % 5)) << 30,
            available_bytes=(8 << (n % 5)) << 30,
            running=n % 3,
            models=[PeerModel(MODEL, "loaded", ["chat"], speed=MeasuredSpeed(900.0, 40.0))],
            rtt_ms=0.4,
            bytes_per_s=1.1e9,
        )
        for n in range(number)
    ]
    return FleetView(True, "me", "me", "mini", peers=peers)


def trace(n: int, **changes: Any) -> Trace:
    chosen = OptionView(
        "layers",
        ["studio", "this"],
        2.0,
        [StepView("computed", 1.5), StepView("exposed hand-off", 0.3)],
        chosen=True,
        cuts=[0, 12, 30],
        chunk=512,
    )
    refused = OptionView("local", ["this"], 3.5, code="slower", reason="It is 75 % slower.")
    steps = [
        TraceStep("request", "mini", 0.0, 3.1, 3.1),
        TraceStep("waiting", "mini", 0.0, 0.1, 0.1, parent=0),
        TraceStep("queued", "mini", 0.0, 0.1, 0.1, parent=1),
        TraceStep("reading", "mini", 0.1, 2.1, 2.0, parent=0, planned_s=2.0),
        TraceStep("computed", "studio", 0.2, 1.9, 1.6, 1 << 20, parent=3),
        TraceStep("computed", "mini", 0.2, 2.0, 1.4, parent=3, planned_s=1.0),
        TraceStep("exposed hand-off", "mini", 2.09, 2.1, 0.01, parent=3),
        TraceStep("writing", "mini", 2.1, 3.1, 1.0, parent=0),
        TraceStep("decoded", "mini", 2.1, 3.1, 1.0, parent=7),
    ]
    given: dict[str, Any] = {
        "id": f"chatcmpl-{n:08}",
        "at_s": 1_700_000_000.0 + n,
        "model": MODEL,
        "prompt_tokens": 4000,
        "cached_tokens": 100,
        "chosen": chosen,
        "losers": [refused],
        "steps": steps,
        "outcome": "shared",
        "exactness": "exact",
        "prefill_s": 1.9,
        "ttft_s": 2.1,
        "completion_tokens": 40,
        "took_s": 3.1,
        "machine": "mini",
        "planned_ttft_s": 2.0,
        "alone_s": 3.5,
        "summary": "2.1 s: 2.0 s reading together. Alone: about 3.5 s. Then 1.0 s writing 40 tokens.",
    }
    return Trace(**{**given, **changes})


@dataclass
class _Newest:
    """What an attribute of the world is when it is asked: tests change it while the daemon runs."""

    world: PageWorld
    attribute: str

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(self.world, self.attribute), name)


@dataclass
class PageWorld:
    """A scripted daemon that tests may change while it runs."""

    chromium: Any
    person: Visit
    runner: FakeRunner = field(default_factory=FakeRunner)
    fleet: WatchedFleet = field(default_factory=WatchedFleet)
    pool: FakePool = field(default_factory=FakePool)
    models: FakeModels = field(default_factory=installed_models)
    traces: list[Trace] = field(default_factory=list)
    requests: list[RunningRequest] = field(default_factory=list)
    # What a search of the hub finds, or the error; and what one more machine would give.
    found: HubPage | FleetError = field(default_factory=lambda: HubPage([]))
    added: AddedView = field(default_factory=AddedView)
    asked: list[Any] = field(default_factory=list)
    ledger: FakeLedger = field(default_factory=FakeLedger)
    disk_cache: FakeDiskCache = field(default_factory=FakeDiskCache)
    settings: SettingsFile = field(default_factory=lambda: SettingsFile(Path("fleetd.toml"), Config()))
    status: Callable[[], DaemonStatus] | None = None
    now_s: float = 0.0
    visits: list[Visit] = field(default_factory=list)
    site: Any = None

    def __post_init__(self) -> None:
        self.page = PageSessions(monotonic=lambda: self.now_s)
        # Its own fleet alone would have no machine to unpair.
        self.fleet.fleet = fleet_of(2)

    def services(self) -> Services:
        return services(
            self.runner,
            fleet=self.fleet,
            pool=self.pool,
            models=self.models,
            status=lambda: self.status() if self.status is not None else status(fleet=self.fleet.fleet),
            ledger=_Newest(self, "ledger"),
            disk_cache=self.disk_cache,  # type: ignore[arg-type]
            settings=lambda: self.settings.view(),
            change_setting=lambda change: self.settings.change(change),
            traces=lambda last, request_id: TracesView(self.traces[:last]),
            running=lambda: self.requests,
            page=self.page,
            search=self._search,
            added=self._added,
        )

    async def _search(self, words: str) -> HubPage:
        self.asked.append(words)
        if isinstance(self.found, FleetError):
            raise self.found
        return self.found

    async def _added(self, question: AddedQuestion) -> AddedView:
        self.asked.append(question)
        return replace(self.added, model=question.model, machine=question.machine, link=question.link)

    @property
    def link(self) -> str:
        return f"{self.site.url}/#ticket={self.page.issue()}"

    def visit(self, **options: Any) -> Visit:
        """Another person's browser."""
        visit = Visit(self.chromium, **options)
        self.visits.append(visit)
        return visit

    def opened(self, view: str = "fleet", **options: Any) -> Any:
        """A page that is logged in and shows a view."""
        page = (self.visit(**options) if options else self.person).open(self.link)
        page.wait_for_selector(".link.live")
        goto(page, view)
        return page


def let_go(event: asyncio.Event) -> None:
    """Set an event for which the daemon's thread waits, once it does: before that, it has no loop."""
    waits: Any = event
    until(lambda: waits._loop is not None)
    waits._loop.call_soon_threadsafe(event.set)


def goto(page: Any, view: str) -> None:
    page.evaluate("view => { location.hash = view; }", view)
    page.wait_for_selector(f"main.view-{view.partition('/')[0]}")
