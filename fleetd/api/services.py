"""What the HTTP application needs from the rest of the daemon, and nothing more.

The composition root fills a ``Services``; tests fill one with fakes. Everything is typed by the few methods
that are called here, so this package depends on shapes rather than on modules.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fleetd.api.disabled_fleet import DisabledFleet
from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.control.daemon_status import DaemonStatus
from fleetd.control.fleet_view import FleetView, PeerView
from fleetd.control.network_diagnosis import NetworkDiagnosis
from fleetd.control.pairing_events import PairingEvent, Unpaired
from fleetd.control.prefill_plan import PlanQuestion, PlanView
from fleetd.control.prefill_trace import TracesView
from fleetd.control.usage_report import UsageReport
from fleetd.engine.protocol import Event, Loading
from fleetd.requests.job import Job, Planned
from fleetd.requests.smart_prefill.bill import ScoringBill
from fleetd.requests.smart_prefill.compression_job import CompressionJob


class Runner(Protocol):
    def run(self, job: Job) -> AsyncGenerator[Planned | Loading | Event, None]:
        """Yield where a job runs, then its events; raises FleetError; ``aclose()`` cancels the work."""


class Folder(Protocol):
    """A model on this machine (``fleetd.models.folder.ModelFolder``)."""

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> Path: ...
    @property
    def source(self) -> str: ...
    @property
    def architecture(self) -> str: ...
    @property
    def context_tokens(self) -> int: ...
    @property
    def weights_bytes(self) -> int: ...
    @property
    def created_s(self) -> float: ...


class Models(Protocol):
    """The model store. Everything here blocks, and is called in a thread."""

    def installed(self) -> Sequence[Any]: ...
    def resolve(self, ref: str) -> Any: ...
    def needs_pull(self, ref: str) -> bool: ...
    def remove(self, ref: str) -> None: ...
    def digest(self, folder: Any) -> object:
        """``str()`` of it is the digest."""


class Pool(Protocol):
    async def load(self, folder: Any) -> None: ...
    async def unload(self, name: str) -> bool: ...


class Ledger(Protocol):
    def usage(self, days: int) -> UsageReport: ...


class Metrics(Protocol):
    def render(self, accept: str) -> tuple[bytes, str]:
        """The exposition and its content type, for an Accept header."""

    def auth_failure(self, reason: str) -> None:
        """Count a refusal: token, host, origin, fetch_site or user."""


class Fleet(Protocol):
    """This machine's part in a fleet (``fleetd.p2p.node``)."""

    def view(self) -> FleetView: ...
    def pair(self) -> AsyncGenerator[PairingEvent, None]:
        """Open a pairing window; ``aclose()`` closes it. After ``Meeting`` it waits for ``answer``."""

    def answer(self, node_id: str, *, admit: bool, sees_prompts: bool) -> None:
        """Raises PairingClosed when nobody waits for one."""

    def join(self, code: str, host: str | None, *, sees_prompts: bool) -> AsyncGenerator[PairingEvent, None]:
        """``sees_prompts``: whether the fleet joined may see prompts given to this machine."""

    async def unpair(self, peer: str) -> Unpaired:
        """``peer``: name, short id or id. Raises NotFound with the nearest, InvalidValue if several match."""

    async def allow_prompts(self, peer: str, allowed: bool) -> PeerView: ...
    async def diagnose(self) -> NetworkDiagnosis | None:
        """The network as this process sees it; None where the fleet is off."""


class Compressor(Protocol):
    """``fleetd.requests.smart_prefill.compression_job.CompressionService``."""

    def bill(self, request_id: str) -> ScoringBill: ...
    def run(self, passage: CompressionJob) -> AsyncGenerator[Loading, None]:
        """Yield progress and fill in the passage; raises Skip, FleetError; ``aclose()`` cancels the work."""


@dataclass(frozen=True, slots=True)
class Services:
    """Args:
    token: what TCP clients must show; "" turns the check off.
    status: the body of ``/fleet/v1/status``; ``/health`` reads it too.
    verify: ``fleetd.models.verify.verify(path, full=bool)``; blocks, so it is called in a thread.
    hosts: Host values accepted besides 127.0.0.1, localhost and [::1] at the port of the connection.
    pull: starts or joins the download of a model and yields its progress (``jobs.pulls.Pulls.watch``).
    origins: web origins that may call from a browser. CORS headers exist only when this is not empty.
    catalog: entries of ``fleetd.models.catalog.CATALOG``.
    plan: how a prompt would be prefilled now by one of ``models``; raises ModelNotFound for one that is not
        loaded, NotPaired where there is no fleet.
    traces: the newest so many, or those of one request; blocks, so it is called in a thread.
    smart_defaults: what smart prefill does where a request leaves it open.
    compressing: shortens a prompt for its own sake.
    smart_plan: the same ways as ``plan`` tells, and smart prefill with a share of the tokens among them.
    draft_plan: the same, and how an answer by that model would be drafted for.
    """

    runner: Runner
    models: Models
    pull: Callable[[str], AsyncGenerator[Any, None]]
    pool: Pool
    ledger: Ledger
    metrics: Metrics
    status: Callable[[], DaemonStatus]
    verify: Callable[..., None]
    token: str
    version: str
    default_model: str
    catalog: Sequence[Any] = ()
    hosts: frozenset[str] = field(default_factory=frozenset)
    origins: frozenset[str] = field(default_factory=frozenset)
    fleet: Fleet = field(default_factory=DisabledFleet)
    plan: Callable[[PlanQuestion, Any], PlanView] = DisabledFleet().plan
    traces: Callable[[int, str], TracesView] = lambda last, request_id: TracesView([])
    smart_defaults: SmartPrefillPolicy = field(default_factory=SmartPrefillPolicy)
    compressing: Compressor | None = None
    smart_plan: Callable[[PlanView, float, Any, SmartPrefillPolicy], Awaitable[PlanView]] | None = None
    draft_plan: Callable[[PlanView, Any], Awaitable[PlanView]] | None = None
