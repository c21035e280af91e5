"""The exposition: names that dashboards know, bounded labels, both formats."""

from __future__ import annotations

import re

from msgspec.structs import replace
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from fleetd import limits
from fleetd.control.daemon_status import EngineStatus
from fleetd.control.fleet_view import PeerView
from fleetd.control.prefill_trace import SourceCounts, Speculated
from fleetd.engine.protocol import Timings, Usage
from fleetd.requests.metrics import Metrics

ENGINE = EngineStatus("m", kv_bytes=25, kv_budget_bytes=100, memory_bytes=7)


def text(metrics: Metrics, accept: str = "") -> str:
    return metrics.render(accept)[0].decode()


def value(metrics: Metrics, sample: str, **labels: str) -> float | None:
    for family in text_string_to_metric_families(text(metrics)):
        for found in family.samples:
            if found.name == sample and found.labels == labels:
                return found.value
    return None


def exercised() -> Metrics:
    metrics = Metrics("1.2.3", engines=lambda: [ENGINE])
    metrics.waiting("m", +1)
    metrics.waiting("m", -1)
    metrics.running("m", +1)
    metrics.first_token("m", 400.0)
    metrics.tokens("m", 4, 0.2)
    metrics.finished("m", "tool_calls", Usage(10, 4, 5), Timings(0.1, 0.2, 0.3, 3, 0.4, 1, 0.05), 0.6)
    metrics.failed("engine_died")
    metrics.plan("local", "only")
    metrics.auth_failure("host")
    metrics.fetched("done", 1000)
    metrics.fetched("made up by another machine", 0)
    return metrics


def test_fetches_are_counted_by_outcome_and_only_known_ones() -> None:
    shown = exercised()
    assert value(shown, "fleetd_fetches_total", outcome="done") == 1
    assert value(shown, "fleetd_fetches_total", outcome="other") == 1
    assert value(shown, "fleetd_fetched_bytes_total") == 1000
    assert value(shown, "fleetd_fetched_tokens_total", model_name="m") == 1


def test_looking_in_vain_is_counted_by_where() -> None:
    metrics = exercised()
    # What was restored and fetched was not looked for in vain.
    assert value(metrics, "fleetd_kept_lookup_seconds_count", where="disk") is None
    metrics.finished("m", "stop", Usage(10, 0, 5), Timings(restore_s=0.25, fetch_s=0.5), 0.6)
    metrics.finished("m", "stop", Usage(10, 0, 5), Timings(), 0.6)
    metrics.looked("placement", 0.125)
    for where, seconds in (("disk", 0.25), ("machines", 0.5), ("placement", 0.125)):
        assert value(metrics, "fleetd_kept_lookup_seconds_count", where=where) == 1
        assert value(metrics, "fleetd_kept_lookup_seconds_sum", where=where) == seconds


def test_every_name_of_the_contract_is_there() -> None:
    shown = text(exercised())
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "fleetd_disk_cache_restored_tokens_total",
        "fleetd_disk_cache_restore_seconds_bucket",
        "fleetd_disk_cache_written_bytes_total",
        "fleetd_fetched_tokens_total",
        "fleetd_fetch_seconds_bucket",
        "fleetd_disk_cache_dropped_total",
        "fleetd_disk_cache_queued_bytes",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:request_queue_time_seconds_bucket",
        "vllm:request_prefill_time_seconds_bucket",
        "vllm:request_decode_time_seconds_bucket",
        "vllm:e2e_request_latency_seconds_bucket",
    ):
        assert re.search(rf'^{name}{{.*model_name="m"', shown, re.MULTILINE), name
    assert 'fleetd_build_info{version="1.2.3"} 1.0' in shown
    assert "_created" not in shown


def test_the_figures_are_what_was_reported() -> None:
    metrics = exercised()
    assert value(metrics, "vllm:num_requests_running", model_name="m") == 1
    assert value(metrics, "vllm:num_requests_waiting", model_name="m") == 0
    assert value(metrics, "vllm:kv_cache_usage_perc", model_name="m") == 0.25
    assert value(metrics, "vllm:prefix_cache_queries_total", model_name="m") == 10
    assert value(metrics, "vllm:prefix_cache_hits_total", model_name="m") == 4
    assert value(metrics, "vllm:generation_tokens_total", model_name="m") == 5
    assert value(metrics, "vllm:inter_token_latency_seconds_count", model_name="m") == 4
    assert value(metrics, "vllm:request_success_total", model_name="m", finished_reason="stop") == 1
    assert value(metrics, "fleetd_request_failures_total", code="engine_died") == 1
    assert value(metrics, "fleetd_auth_failures_total", reason="host") == 1
    assert value(metrics, "fleetd_plan_total", kind="local", reason="only") == 1


def test_a_ten_minute_first_token_is_in_a_bucket() -> None:
    metrics = Metrics("0")
    metrics.first_token("m", 599.0)
    name = "vllm:time_to_first_token_seconds_bucket"
    assert value(metrics, name, model_name="m", le="300.0") == 0
    assert value(metrics, name, model_name="m", le="600.0") == 1


def test_a_restarted_engine_never_makes_the_counter_fall() -> None:
    engines = [replace(ENGINE, restarts=2)]
    metrics = Metrics("0", engines=lambda: engines)
    assert value(metrics, "fleetd_engine_restarts_total", model_name="m") == 2
    engines[0] = replace(ENGINE, restarts=0)  # unloaded, and loaded anew
    assert value(metrics, "fleetd_engine_restarts_total", model_name="m") == 2
    engines[0] = replace(ENGINE, restarts=1)
    assert value(metrics, "fleetd_engine_restarts_total", model_name="m") == 3


def test_an_unloaded_engine_leaves_the_gauges() -> None:
    engines = [ENGINE]
    metrics = Metrics("0", engines=lambda: engines)
    assert value(metrics, "fleetd_engine_memory_bytes", model_name="m") == 7
    engines.clear()
    assert value(metrics, "fleetd_engine_memory_bytes", model_name="m") is None


def test_labels_stay_bounded_whatever_comes_in() -> None:
    metrics = Metrics("0")
    for number in range(limits.METRIC_MODELS + 50):
        metrics.first_token(f"model-{number}", 1.0)
        metrics.failed(f"code {number}")
        metrics.auth_failure(f"reason {number}")
    names = set(re.findall(r'model_name="([^"]+)"', text(metrics)))
    assert len(names) == limits.METRIC_MODELS + 1
    assert value(metrics, "fleetd_request_failures_total", code="other") == limits.METRIC_MODELS + 50
    assert value(metrics, "fleetd_auth_failures_total", reason="other") == limits.METRIC_MODELS + 50


def test_the_format_follows_the_accept_header() -> None:
    metrics = exercised()
    assert metrics.render("")[1].startswith("text/plain; version=0.0.4")
    body, content_type = metrics.render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert body.endswith(b"# EOF\n")
    families = openmetrics.text_string_to_metric_families(body.decode())  # type: ignore[no-untyped-call]
    assert list(families)


def test_peers_by_state_and_how_far_they_are() -> None:
    peers = [
        PeerView("n1", "n1", "studio", "usable", rtt_ms=0.5),
        PeerView("n2", "n2", "mini", "usable"),
        PeerView("n3", "n3", "air", "unreachable"),
    ]
    metrics = Metrics("0", peers=lambda: peers)
    text = metrics.render()[0].decode()
    assert 'fleetd_peers{state="usable"} 2.0' in text
    assert 'fleetd_peers{state="unreachable"} 1.0' in text
    assert 'fleetd_peer_rtt_seconds{peer="n1"} 0.0005' in text
    del peers[0]
    assert "n1" not in metrics.render()[0].decode()


def test_drafts_are_counted_by_sources_that_are_known() -> None:
    metrics = Metrics("0")
    sources = {"lookup": SourceCounts(8, 5, 2), "a stranger's": SourceCounts(4, 0, 1)}
    metrics.speculated(Speculated(16, 12, 5, 10, 15, -0.5, sources))
    for source, fate, count in (
        ("lookup", "accepted", 5),
        ("lookup", "rejected", 3),
        ("other", "rejected", 4),
    ):
        assert value(metrics, "fleetd_spec_tokens_total", source=source, fate=fate) == count
    assert value(metrics, "fleetd_spec_passes_total") == 10
    assert value(metrics, "fleetd_spec_pass_tokens_total") == 15
    assert value(metrics, "fleetd_spec_saved_seconds") == -0.5
    # Four drafts a pass, and the token that was due.
    assert value(metrics, "fleetd_spec_width_sum", source="lookup") == 5
    assert value(metrics, "fleetd_spec_width_count", source="other") == 1


def test_how_drafters_end_is_counted() -> None:
    metrics = Metrics("0")
    for outcome in ("done", "peer_lost", "a stranger's"):
        metrics.drafter("peer", outcome)
        metrics.served("draft", outcome)
    for outcome in ("done", "peer_lost", "other"):
        assert value(metrics, "fleetd_drafters_total", where="peer", outcome=outcome) == 1
        assert value(metrics, "fleetd_served_total", kind="draft", outcome=outcome) == 1
