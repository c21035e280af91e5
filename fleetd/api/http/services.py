"""What the HTTP application needs from the rest of the daemon. ``fleetd.app`` fills it; tests use fakes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Literal

import msgspec

from fleetd.api.http.disabled_fleet import DisabledFleet
from fleetd.api.http.page_sessions import PageSessions
from fleetd.api.kept_answers import KeptAnswers
from fleetd.cache.service import DiskCache
from fleetd.compression.policy import SmartPrefillBody, SmartPrefillPolicy, resolve
from fleetd.control.cache_report import MachineFetches
from fleetd.control.daemon_status import DaemonStatus, HardwareReading, RunningRequest
from fleetd.control.group_view import GroupView
from fleetd.control.prefill_plan import AddedQuestion, AddedView, PlanQuestion, PlanView
from fleetd.control.prefill_trace import Trace, TracesView
from fleetd.control.setting_view import SettingChange, SettingsView
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.fleet.service import Fleet
from fleetd.models import hub_search
from fleetd.models.folder import ModelFolder
from fleetd.models.hub_search import HubPage
from fleetd.models.memory_need import WeightRules
from fleetd.models.model_names import ModelNames
from fleetd.models.model_store import ModelStore
from fleetd.models.pinned import PinnedModels
from fleetd.models.pull_lines import PullProgress
from fleetd.requests.ledger import Ledger
from fleetd.requests.managing.operations import ModelOperations, no_plan
from fleetd.requests.metrics import Metrics
from fleetd.requests.runner import RequestRunner
from fleetd.requests.smart_prefill.compression_job import CompressionService
from fleetd.requests.vectors.service import VectorService


class Services(msgspec.Struct, frozen=True):
    """Parts of the daemon, and the settings of its HTTP API.

    The methods of ``models``, ``ledger.usage``, ``verify`` and ``traces`` block: call them in a thread.
    """

    runner: RequestRunner
    models: ModelStore
    #: Starts or joins the download of a model and yields its progress.
    pull: Callable[[str], AsyncGenerator[PullProgress, None]]
    pool: EnginePool
    ledger: Ledger
    metrics: Metrics
    #: The body of ``/fleet/v1/status``; ``/health`` reads it too.
    status: Callable[[], DaemonStatus]
    #: ``fleetd.models.verify.verify(path, full=bool)``.
    verify: Callable[..., None]
    #: The token that TCP clients must show; "" turns the check off.
    token: str
    #: The daemon's version.
    version: str
    #: The model of a request that names none, and the models behind aliases.
    names: ModelNames
    #: How a prompt would be answered now. Raises FleetError if no machine can answer it.
    plan: Callable[[PlanQuestion], Awaitable[PlanView]]
    #: What one more machine would give. Raises FleetError.
    added: Callable[[AddedQuestion], Awaitable[AddedView]]
    #: Models that stay loaded. Changing them blocks.
    pinned: PinnedModels
    #: Names of the other machines that are to hold a model, of those that were named. Raises FleetError.
    over: Callable[[Sequence[str]], tuple[str, ...]] = lambda names: tuple(names[1:])
    #: How machines of these names would hold a model. Reads headers of files. Raises FleetError.
    together: Callable[[ModelFolder, Sequence[str]], Awaitable[GroupView | None]] = no_plan
    #: Host values accepted besides 127.0.0.1, localhost and [::1], which are accepted at any port.
    hosts: frozenset[str] = msgspec.field(default_factory=frozenset)
    #: Web origins that may call from a browser. Without any there are no CORS headers.
    origins: frozenset[str] = msgspec.field(default_factory=frozenset)
    #: Models of the hub by words of their names. Raises DownloadFailed.
    search: Callable[[str], Awaitable[HubPage]] = hub_search.search
    #: What decides how this machine, as it was read, holds the weights of models.
    weight_rules: Callable[[HardwareReading], WeightRules] = lambda machine: WeightRules(machine.accelerator)
    fleet: Fleet | DisabledFleet = msgspec.field(default_factory=DisabledFleet)
    #: The newest traces, at most so many, or those of one request.
    traces: Callable[[int, str], TracesView] = lambda last, request_id: TracesView([])
    #: What smart prefill does if a request leaves it open.
    smart_defaults: SmartPrefillPolicy = msgspec.field(default_factory=SmartPrefillPolicy)
    #: Shortens a prompt for /v1/compress.
    compressing: CompressionService | None = None
    #: Makes vectors of texts, and scores documents; None until the daemon has one.
    vectors: VectorService | None = None
    #: Prompts on the disk. Its methods block.
    disk_cache: DiskCache | None = None
    #: Prompts that came from other machines' disks, and prompts that went there.
    fetches: Callable[[], list[MachineFetches]] = list
    #: Is called when a model came or went; other machines hear of it at once.
    models_changed: Callable[[], None] = lambda: None
    #: Requests that have not ended.
    running: Callable[[], Sequence[RunningRequest]] = tuple
    #: Requests that have ended since a number, and the number for the next call.
    ended: Callable[[int], tuple[int, Sequence[Trace]]] = lambda number: (number, ())
    #: The most tokens of an answer whose request has no bound; None is what the context holds.
    answer_tokens: int | None = None
    #: Whether other machines may round otherwise, if a request does not say.
    exactness: Literal["exact", "equivalent"] = "equivalent"
    #: The settings as the daemon runs with them, and as their file has them by now. Blocks.
    settings: Callable[[], SettingsView] = SettingsView
    #: Changes one of them in their file. Blocks. Raises FleetError.
    change_setting: Callable[[SettingChange], SettingsView] = lambda change: SettingsView()
    #: Sessions of browsers that have the page open.
    page: PageSessions = msgspec.field(default_factory=PageSessions)
    #: Answers that clients come back to (``responses.kept``).
    kept_responses: KeptAnswers[Any, Any] = msgspec.field(default_factory=KeptAnswers)
    #: One object for each listener to events.
    listeners: set[object] = msgspec.field(default_factory=set)

    def smart_policy(
        self, wanted: bool | SmartPrefillBody | None, exactness: Literal["exact", "equivalent"] | None
    ) -> SmartPrefillPolicy | None:
        """How the prompt of a request is shortened; None if it is read whole. Raises InvalidValue.

        Args:
            wanted: what the request says of smart prefill; None leaves it to the settings.
            exactness: what it says of that.
        """
        return resolve(wanted, self.smart_defaults, exact=exactness == "exact")

    @property
    def operations(self) -> ModelOperations:
        """What people do with the models of this machine."""
        return ModelOperations(
            self.models, self.pool, self.pinned, self.pull, self.models_changed, self.together
        )
