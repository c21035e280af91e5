"""What the API tells of requests that another machine answered: one picture, by the clock of who asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_programs import Programs
from live_fleet import LiveFleet, answer, body
from test_live_smart import asked, post
from timelines import check_steps

pytestmark = [pytest.mark.model, pytest.mark.one_loop, pytest.mark.timeout(300)]

SMOL = "smollm2-135m"


@pytest.fixture(scope="module")
def fleet(live_models: Path, short_dir: Path, programs: Programs) -> Iterator[LiveFleet]:
    """Only studio has the model."""
    models = {"studio": [live_models / SMOL], "vm": []}
    with LiveFleet(short_dir / "timelines", models, programs=programs) as made:
        made.until_usable()
        # Before it knows that, the machine without the model would fetch it.
        made.until_has("vm", "studio", SMOL)
        yield made


def test_a_remote_request_has_the_load_and_the_reading_there_on_the_clock_of_who_asked(
    fleet: LiveFleet,
) -> None:
    status, headers, got = answer(fleet["vm"], body(SMOL, "What is the capital of France?", max_tokens=8))
    assert status == 200, got
    trace = fleet["vm"].trace(headers["X-Fleet-Request"])
    check_steps(trace)
    assert (trace["answered_by"], trace["machine"]) == ("studio", "vm")
    parents = {
        (step["name"], step["machine"]): trace["steps"][step["parent"]]["name"]
        for step in trace["steps"]
        if step.get("parent") is not None
    }
    assert parents["starting", "studio"] == "loading"
    assert parents["network and rest", "studio"] == "waiting"
    assert parents["computed", "studio"] == "reading"
    assert parents["decoded", "studio"] == "writing"
    assert {step["machine"] for step in trace["steps"]} == {"vm", "studio"}
    # Planned and actual of the first token, the load included.
    assert trace["planned_ttft_s"] > 0
    loading = next(step for step in trace["steps"] if step["name"] == "loading")
    assert loading["planned_s"] > 0
    assert "loading the model on studio" in trace["summary"]


def test_a_smart_request_has_its_scores_inside_of_reading(fleet: LiveFleet) -> None:
    wanted = {"target_ratio": 0.15, "mode": "text", "compressor_model": SMOL}
    headers, reply = post(fleet["vm"], "/v1/chat/completions", asked(smart_prefill=wanted, max_tokens=4))
    assert not reply["smart_prefill"]["skipped"], reply["smart_prefill"]
    trace = fleet["vm"].trace(headers["x-fleet-request"])
    check_steps(trace)
    assert trace["outcome"] == "smart"
    (scored,) = [step for step in trace["steps"] if step["name"] == "scored"]
    assert (scored["machine"], trace["steps"][scored["parent"]]["name"]) == ("studio", "reading")
    parts = [step for step in trace["steps"] if step.get("parent") == trace["steps"].index(scored)]
    assert "computed" in {step["name"] for step in parts}
    assert "what smart prefill kept" in trace["summary"]
