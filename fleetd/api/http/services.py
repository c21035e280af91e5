"""What the HTTP application needs from the rest of the daemon. ``fleetd.app`` fills it; tests use fakes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import msgspec

from fleetd.api.http.disabled_fleet import DisabledFleet
from fleetd.api.http.page_sessions import PageSessions
from fleetd.api.kept_answers import KeptAnswers
from fleetd.cache.service import DiskCache
from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.control.cache_report import MachineFetches
from fleetd.control.daemon_status import DaemonStatus
from fleetd.control.fleet_change import RunningRequest
from fleetd.control.prefill_plan import PlanQuestion, PlanView
from fleetd.control.prefill_trace import Trace, TracesView
from fleetd.control.setting_view import SettingView
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.fleet.service import Fleet
from fleetd.models.model_names import ModelNames
from fleetd.models.model_store import ModelStore
from fleetd.models.pinned import PinnedModels
from fleetd.models.pull_lines import PullProgress
from fleetd.requests.ledger import Ledger
from fleetd.requests.metrics import Metrics
from fleetd.requests.runner import RequestRunner
from fleetd.requests.smart_prefill.compression_job import CompressionService


class Services(msgspec.Struct, frozen=True):
    """Parts of the daemon, and the settings of its HTTP API.

    The methods of ``models``, ``ledger.usage``, ``verify`` and ``traces`` block: call them in a thread.

    Args:
        pull: starts or joins the download of a model and yields its progress.
        status: the body of ``/fleet/v1/status``; ``/health`` reads it too.
        verify: ``fleetd.models.verify.verify(path, full=bool)``.
        names: the models of requests that name none, or name one by an alias.
        token: what TCP clients must show; "" turns the check off.
        hosts: Host values accepted besides 127.0.0.1, localhost and [::1], which are at any port.
        origins: web origins that may call from a browser. Without any there are no CORS headers.
        plan: how a prompt would be answered now; raises FleetError where no machine can.
        traces: the newest so many, or those of one request.
        pinned: models that stay loaded; to change them blocks.
        smart_defaults: what smart prefill does where a request leaves it open.
        compressing: shortens a prompt for /v1/compress.
        disk_cache: prompts on the disk; its methods block.
        fetches: prompts that came from other machines' disks, and went there.
        models_changed: told when a model came or went; other machines hear of it at once.
        running: requests that have not ended.
        ended: those that have since a number, and the number for the next time.
        answer_tokens: most tokens of an answer whose request does not say; None is what the context holds.
        settings: as the daemon runs with them.
        page: who has opened the page.
        kept_responses: answers that clients come back to (``responses.kept``).
        listeners: one object for each listener to events.
    """

    runner: RequestRunner
    models: ModelStore
    pull: Callable[[str], AsyncGenerator[PullProgress, None]]
    pool: EnginePool
    ledger: Ledger
    metrics: Metrics
    status: Callable[[], DaemonStatus]
    verify: Callable[..., None]
    token: str
    version: str
    names: ModelNames
    plan: Callable[[PlanQuestion], Awaitable[PlanView]]
    pinned: PinnedModels
    hosts: frozenset[str] = msgspec.field(default_factory=frozenset)
    origins: frozenset[str] = msgspec.field(default_factory=frozenset)
    fleet: Fleet | DisabledFleet = msgspec.field(default_factory=DisabledFleet)
    traces: Callable[[int, str], TracesView] = lambda last, request_id: TracesView([])
    smart_defaults: SmartPrefillPolicy = msgspec.field(default_factory=SmartPrefillPolicy)
    compressing: CompressionService | None = None
    disk_cache: DiskCache | None = None
    fetches: Callable[[], list[MachineFetches]] = list
    models_changed: Callable[[], None] = lambda: None
    running: Callable[[], Sequence[RunningRequest]] = tuple
    ended: Callable[[int], tuple[int, Sequence[Trace]]] = lambda number: (number, ())
    answer_tokens: int | None = None
    settings: Sequence[SettingView] = ()
    page: PageSessions = msgspec.field(default_factory=PageSessions)
    kept_responses: KeptAnswers[Any, Any] = msgspec.field(default_factory=KeptAnswers)
    listeners: set[object] = msgspec.field(default_factory=set)
