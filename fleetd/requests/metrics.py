"""Figures for Prometheus, under the names that dashboards for vLLM already know.

What is the same thing as in vLLM has vLLM's name (``vllm:…``, label ``model_name``); what only this program
has is called ``fleetd_…``. Label values are bounded: models that are installed, codes and reasons from
closed lists. Engine gauges are read only when they are scraped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, disable_created_metrics
from prometheus_client.exposition import choose_encoder

from fleetd import limits
from fleetd.control.daemon_status import EngineStatus
from fleetd.control.fleet_view import PeerView
from fleetd.control.prefill_trace import Speculated
from fleetd.engine.protocol import Timings, Usage
from fleetd.engine.speculation.local_sources import SOURCE_NAMES
from fleetd.errors import BY_CODE
from fleetd.requests.admission import Kind
from fleetd.requests.smart_prefill.skip import SKIPS

# Prometheus's own buckets end at 10 s; a long prompt on one machine takes minutes to its first token.
TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 180, 300, 600)
ITL_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
LOOKUP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
REQUEST_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 180, 300, 600, 1200, 3600)

# vLLM knows three ends; dashboards select by them.
_FINISHED_AS = {"stop": "stop", "tool_calls": "stop", "length": "length", "cancelled": "abort"}
_AUTH_FAILURES = frozenset(
    {"token", "host", "origin", "user", "fetch_site", "page_site", "page_session", "page_ticket"}
)
_OTHER = "other"
_SPEC_WIDTHS = (2, 3, 4, 6, 8, 12, limits.SPEC_WIDTH)


class _SeriesOf:
    """Makes series in one registry; most of them have a label for the model."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def histogram(
        self, name: str, text: str, buckets: Sequence[float], label: str = "model_name"
    ) -> Histogram:
        return Histogram(name, text, [label], buckets=buckets, registry=self.registry)


class _RequestSeries:
    """How requests went, mostly under vLLM's names."""

    def __init__(self, series: _SeriesOf) -> None:
        gauge, counter, histogram = series.gauge, series.counter, series.histogram
        self.running = gauge(
            "vllm:num_requests_running", "Requests being prefilled or decoded.", "model_name"
        )
        self.waiting = gauge(
            "vllm:num_requests_waiting", "Requests waiting for a model or a turn.", "model_name"
        )
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens processed.", "model_name")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens generated.", "model_name")
        self.success = counter(
            "vllm:request_success", "Requests that ended without error.", "model_name", "finished_reason"
        )
        self.ttft = histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", TTFT_BUCKETS_S
        )
        self.itl = histogram("vllm:inter_token_latency_seconds", "Between two tokens.", ITL_BUCKETS_S)
        self.queue = histogram("vllm:request_queue_time_seconds", "Waiting for a turn.", REQUEST_BUCKETS_S)
        self.prefill = histogram("vllm:request_prefill_time_seconds", "In prefill.", REQUEST_BUCKETS_S)
        self.decode = histogram("vllm:request_decode_time_seconds", "In decode.", REQUEST_BUCKETS_S)
        self.e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to end.", REQUEST_BUCKETS_S)
        self.texts = counter("fleetd_texts", "Texts that got a vector or a score.", "model_name")
        self.failures = counter("fleetd_request_failures", "Requests that ended in an error.", "code")
        self.auth = counter("fleetd_auth_failures", "Requests refused before any work.", "reason")
        self.plans = counter("fleetd_plan", "Plans that ran, and why that kind.", "kind", "reason")
        self.fallbacks = counter(
            "fleetd_fallback", "Requests that moved on after a machine failed them.", "reason"
        )
        self.smart = counter(
            "fleetd_smart", "Prompts that smart prefill was asked for: what came of it.", "outcome", "mode"
        )
        self.smart_tokens = counter(
            "fleetd_smart_tokens", "Tokens of prompts that were shortened, by the compressor's count.", "fate"
        )


class _EngineSeries:
    """What engine workers hold, read when it is scraped."""

    def __init__(self, series: _SeriesOf) -> None:
        gauge, counter = series.gauge, series.counter
        self.kv_usage = gauge(
            "vllm:kv_cache_usage_perc", "Share of the KV cache budget in use, 0 to 1.", "model_name"
        )
        self.memory = gauge("fleetd_engine_memory_bytes", "Memory an engine worker reports.", "model_name")
        self.restarts = counter("fleetd_engine_restarts", "Engine workers started again.", "model_name")
        self.disk_written = counter(
            "fleetd_disk_cache_written_bytes", "Sealed KV written to the disk: its wear.", "model_name"
        )
        self.disk_dropped = counter(
            "fleetd_disk_cache_dropped", "Prompts that were not kept on the disk, or not whole.", "model_name"
        )
        self.disk_queued = gauge(
            "fleetd_disk_cache_queued_bytes", "KV that waits to be written to the disk.", "model_name"
        )


class _KeptSeries:
    """Prompts whose keys and values were there already: in memory, on the disk, on other machines."""

    def __init__(self, series: _SeriesOf) -> None:
        counter, histogram = series.counter, series.histogram
        self.prefix_queries = counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "model_name"
        )
        self.prefix_hits = counter(
            "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", "model_name"
        )
        self.restored_tokens = counter(
            "fleetd_disk_cache_restored_tokens",
            "Prompt tokens whose KV was read from the disk.",
            "model_name",
        )
        self.restored = histogram(
            "fleetd_disk_cache_restore_seconds", "Reading a prompt's KV from the disk.", REQUEST_BUCKETS_S
        )
        self.fetched_tokens = counter(
            "fleetd_fetched_tokens", "Prompt tokens whose KV another machine sent.", "model_name"
        )
        self.fetched = histogram(
            "fleetd_fetch_seconds", "Fetching a prompt's KV from another machine.", REQUEST_BUCKETS_S
        )
        self.looked = histogram(
            "fleetd_kept_lookup_seconds",
            "Looking for a prompt's KV where there is nothing of it, or before the prompt is placed.",
            LOOKUP_BUCKETS_S,
            "where",
        )
        self.fetches = counter(
            "fleetd_fetches", "Prompts whose KV another machine was asked to send.", "outcome"
        )
        self.fetched_bytes = counter("fleetd_fetched_bytes", "KV that other machines sent.")


class _FleetSeries:
    """What machines did for each other, and drafts."""

    def __init__(self, series: _SeriesOf) -> None:
        gauge, counter = series.gauge, series.counter
        self.peers = gauge("fleetd_peers", "Paired machines.", "state")
        self.rtt = gauge("fleetd_peer_rtt_seconds", "Round trip to a peer.", "peer")
        self.shares = counter(
            "fleetd_share",
            "Prompts that others could help with: how, and what came of it.",
            "kind",
            "outcome",
        )
        self.share_bytes = counter("fleetd_share_bytes", "Bytes of shared prompts that came here or left.")
        self.served = counter(
            "fleetd_served",
            "Work for other machines' requests: parts of prompts (assist), drafts, scores.",
            "kind",
            "outcome",
        )
        self.drafters = counter(
            "fleetd_drafters", "Drafters that answers here were given, and how it ended.", "where", "outcome"
        )
        self.spec_tokens = counter(
            "fleetd_spec_tokens",
            "Tokens that drafts guessed, by source and what came of them.",
            "source",
            "fate",
        )
        self.spec_passes = counter("fleetd_spec_passes", "Passes of answers decoded with drafts.")
        self.spec_pass_tokens = counter("fleetd_spec_pass_tokens", "Tokens that those passes gave.")
        self.spec_width = series.histogram(
            "fleetd_spec_width",
            "Tokens of a pass that verified drafts, the one that was due included: of each answer the mean.",
            _SPEC_WIDTHS,
            "source",
        )
        self.spec_saved = gauge(
            "fleetd_spec_saved_seconds",
            "Time that drafts saved, by the measured cost of plain steps; below 0 they lost it.",
        )


class Metrics:
    """All series of one daemon."""

    def __init__(
        self,
        version: str,
        *,
        engines: Callable[[], Iterable[EngineStatus]] = lambda: (),
        peers: Callable[[], Iterable[PeerView]] = lambda: (),
    ) -> None:
        # A creation time per counter and histogram would double what a scrape carries, for no dashboard.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._engines_now = engines
        self._peers_now = peers
        self._models: set[str] = set()
        # What engines reported last, by series and model.
        self._reported: dict[tuple[Counter, str], int] = {}
        series = _SeriesOf(self._registry)
        self._requests = _RequestSeries(series)
        self._engine = _EngineSeries(series)
        self._kept = _KeptSeries(series)
        self._fleet = _FleetSeries(series)
        Info("fleetd_build", "The running program.", registry=self._registry).info({"version": version})

    # ---- what the runner reports -------------------------------------------------------------------------

    def waiting(self, model: str, change: int) -> None:
        self._requests.waiting.labels(self._model(model)).inc(change)

    def running(self, model: str, change: int) -> None:
        self._requests.running.labels(self._model(model)).inc(change)

    def first_token(self, model: str, after_s: float) -> None:
        self._requests.ttft.labels(self._model(model)).observe(after_s)

    def tokens(self, model: str, count: int, elapsed_s: float) -> None:
        """``count`` tokens arrived together, ``elapsed_s`` after the ones before them."""
        series = self._requests.itl.labels(self._model(model))
        for _ in range(count):
            series.observe(elapsed_s / count)

    def finished(self, model: str, reason: str, usage: Usage, timings: Timings, e2e_s: float) -> None:
        model = self._model(model)
        self._requests.success.labels(model, _FINISHED_AS.get(reason, _OTHER)).inc()
        self._requests.prompt_tokens.labels(model).inc(usage.prompt_tokens)
        self._requests.generation_tokens.labels(model).inc(usage.completion_tokens)
        self._kept.prefix_queries.labels(model).inc(usage.prompt_tokens)
        self._kept.prefix_hits.labels(model).inc(usage.cached_tokens)
        if timings.restored_tokens:
            self._kept.restored_tokens.labels(model).inc(timings.restored_tokens)
            self._kept.restored.labels(model).observe(timings.restore_s)
        elif timings.restore_s:
            self.looked("disk", timings.restore_s)
        if timings.fetched_tokens:
            self._kept.fetched_tokens.labels(model).inc(timings.fetched_tokens)
            self._kept.fetched.labels(model).observe(timings.fetch_s)
        elif timings.fetch_s:
            self.looked("machines", timings.fetch_s)
        self._requests.queue.labels(model).observe(timings.queue_s)
        self._requests.prefill.labels(model).observe(timings.prefill_s)
        self._requests.decode.labels(model).observe(timings.decode_s)
        self._requests.e2e.labels(model).observe(e2e_s)

    def texts(self, model: str, reason: str, count: int, tokens: int, e2e_s: float) -> None:
        """A request for vectors or scores has ended; no prefix cache was asked for it."""
        model = self._model(model)
        self._requests.success.labels(model, _FINISHED_AS.get(reason, _OTHER)).inc()
        self._requests.texts.labels(model).inc(count)
        self._requests.prompt_tokens.labels(model).inc(tokens)
        self._requests.e2e.labels(model).observe(e2e_s)

    def failed(self, code: str) -> None:
        self._requests.failures.labels(_outcome(code)).inc()

    def plan(self, kind: str, reason: str) -> None:
        """Count a plan; kind and reason come from the planner's closed lists."""
        self._requests.plans.labels(kind, reason).inc()

    def fallback(self, reason: str) -> None:
        self._requests.fallbacks.labels(_outcome(reason)).inc()

    def share(self, kind: str, outcome: str, n_bytes: int) -> None:
        """Count a shared prefill; kind and outcome come from closed lists."""
        self._fleet.shares.labels(kind, outcome).inc()
        self._fleet.share_bytes.inc(n_bytes)

    def fetched(self, outcome: str, n_bytes: int) -> None:
        """Outcome: "done" or an error's code."""
        self._kept.fetches.labels(_outcome(outcome, "done")).inc()
        self._kept.fetched_bytes.inc(n_bytes)

    def looked(self, where: Literal["placement", "disk", "machines"], seconds: float) -> None:
        """Count the seconds that a prompt waited to hear that nothing of it is kept there; "placement": or
        that something is."""
        self._kept.looked.labels(where).observe(seconds)

    def smart(self, outcome: str, form: str, kept: int, dropped: int) -> None:
        """Outcome: "used", a code of ``SKIPS``, or an error's; form "" where all of it is read."""
        self._requests.smart.labels(_outcome(outcome, "used", *SKIPS), form or "full").inc()
        self._requests.smart_tokens.labels("kept").inc(kept)
        self._requests.smart_tokens.labels("dropped").inc(dropped)

    def served(self, kind: Kind, outcome: str) -> None:
        """Outcome: "done", "cancelled" or an error's code."""
        self._fleet.served.labels(kind, _outcome(outcome, "done", "cancelled")).inc()

    def speculated(self, answer: Speculated) -> None:
        """Count an answer that was decoded here, with drafts."""
        for source, counts in answer.sources.items():
            label = source if source in SOURCE_NAMES else _OTHER
            self._fleet.spec_tokens.labels(label, "accepted").inc(counts.accepted)
            self._fleet.spec_tokens.labels(label, "rejected").inc(max(0, counts.drafted - counts.accepted))
            if counts.passes:
                self._fleet.spec_width.labels(label).observe(1 + counts.drafted / counts.passes)
        self._fleet.spec_passes.inc(answer.passes)
        self._fleet.spec_pass_tokens.inc(answer.tokens)
        self._fleet.spec_saved.inc(answer.saved_s)

    def drafter(self, where: str, outcome: str) -> None:
        """Where: "here" or "peer"; outcome: "done", "cancelled" or an error's code."""
        self._fleet.drafters.labels(where, _outcome(outcome, "done", "cancelled")).inc()

    def auth_failure(self, reason: str) -> None:
        self._requests.auth.labels(reason if reason in _AUTH_FAILURES else _OTHER).inc()

    def _model(self, name: str) -> str:
        """The label for a model; those past the limit share one."""
        if name in self._models:
            return name
        if len(self._models) >= limits.METRIC_MODELS:
            return _OTHER
        self._models.add(name)
        return name

    def _grow(self, series: Counter, model: str, count: int) -> None:
        """Raise a counter to what a model's workers report, those that have ended included."""
        grown = count - self._reported.get((series, model), 0)
        series.labels(model).inc(max(0, grown))
        self._reported[series, model] = count

    # ---- what a scrape sees ------------------------------------------------------------------------------

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The exposition and its content type: OpenMetrics if the Accept header asks, else text 0.0.4."""
        for per_model in (self._engine.kv_usage, self._engine.memory, self._engine.disk_queued):
            per_model.clear()
        for engine in self._engines_now():
            model = self._model(engine.model)
            budget = engine.kv_budget_bytes
            self._engine.kv_usage.labels(model).set(engine.kv_bytes / budget if budget else 0.0)
            self._grow(self._engine.restarts, model, engine.restarts)
            self._grow(self._engine.disk_written, model, engine.disk_written_bytes)
            self._grow(self._engine.disk_dropped, model, engine.disk_dropped)
            self._engine.disk_queued.labels(model).set(engine.disk_queued_bytes)
            self._engine.memory.labels(model).set(engine.memory_bytes)
        self._fleet.peers.clear()
        self._fleet.rtt.clear()
        for peer in self._peers_now():  # no more than a fleet may have members
            self._fleet.peers.labels(peer.state).inc()
            if peer.rtt_ms is not None:
                self._fleet.rtt.labels(peer.short_id).set(peer.rtt_ms / 1000)
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


def _outcome(outcome: str, *besides: str) -> str:
    """The label of an outcome: an error's code or one of ``besides``; all else shares one label."""
    return outcome if outcome in besides or outcome in BY_CODE else _OTHER
