"""A real daemon whose memory holds one of two models: one scores and gives way to the one that answers."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from live_daemon import LiveDaemon, until
from test_live_smart import SMOL, asked, haystack, post

from fleetd.models.folder import ModelFolder

pytestmark = [pytest.mark.model, pytest.mark.one_loop, pytest.mark.timeout(400)]

TELLER = "teller"
# Weights of 540 MB each and 540 MB to work with: one fits, and its keys and values.
ROOM = {
    "FLEETD_ENGINE_DEVICE": "cpu",
    "FLEETD_ENGINE_CPU_ARITHMETIC": "float32",
    "FLEETD_ENGINE_MAX_MEMORY_BYTES": "1400000000",
    "FLEETD_SMART_PREFILL_MIN_PROMPT_TOKENS": "300",
}


@pytest.fixture
def narrow(
    embedded_model: ModelFolder, live_models: Path, make_daemon: Callable[..., LiveDaemon]
) -> Iterator[LiveDaemon]:
    """It has the default model, and that once more with a context that the longer prompts here exceed."""
    folder = live_models / TELLER
    shutil.copytree(embedded_model.path, folder)
    # It has checksums of the files as they were.
    (folder / "fleetd-manifest.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    yield make_daemon(**ROOM)
    shutil.rmtree(folder)


@contextmanager
def watched(daemon: LiveDaemon) -> Iterator[list[set[str]]]:
    """Which models have workers, at every moment at which the daemon was asked."""
    seen: list[set[str]] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            found = {engine["model"] for engine in daemon.status()["engines"]}
            if not seen or seen[-1] != found:
                seen.append(found)
            stop.wait(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        stop.set()
        watcher.join()


def names(daemon: LiveDaemon) -> set[str]:
    return {engine["model"] for engine in daemon.status()["engines"]}


def body(lines: int, at: int, **fields: Any) -> dict[str, Any]:
    wanted = {"target_ratio": 0.15, "min_prompt_tokens": 300, "compressor_model": SMOL}
    made = asked(model=TELLER, smart_prefill={**wanted, **fields})
    made["messages"][1]["content"] = haystack(lines, at)
    return made


def test_what_scores_and_what_answers_take_turns_in_a_memory_that_holds_one(narrow: LiveDaemon) -> None:
    loaded = narrow.control("POST", "/fleet/v1/models/load", {"model": TELLER})
    assert "error" not in loaded, loaded

    def measured() -> bool:
        view = narrow.control("POST", "/fleet/v1/plan", {"model": TELLER, "tokens": 700, "smart": 0.15})
        return any("place of the model that answers" in option["reason"] for option in view["options"])

    # A plan prices the loads: for a short prompt they take longer than reading it.
    until(measured)
    with watched(narrow) as seen:
        headers, reply = post(narrow, "/v1/chat/completions", body(110, 70))
    loads = reply["smart_prefill"].get("parked")
    assert not reply["smart_prefill"]["skipped"], reply["smart_prefill"]
    assert loads is not None
    assert loads["scorer_s"] > 0 < loads["model_s"]
    assert headers["x-smartprefill-parked"].startswith("scorer=")
    assert headers["x-fleet-exactness"] == "lossy"
    assert "48213" in reply["choices"][0]["message"]["content"]
    assert {SMOL} in seen
    assert {SMOL, TELLER} not in seen
    assert names(narrow) == {TELLER}

    # What is not loaded is not loaded twice: first the scorer, then what answers.
    narrow.control("POST", "/fleet/v1/models/unload", {"model": TELLER})
    with watched(narrow) as seen:
        _, reply = post(narrow, "/v1/chat/completions", body(112, 40))
    assert not reply["smart_prefill"]["skipped"], reply["smart_prefill"]
    assert reply["smart_prefill"]["mode"] == "text"
    assert "48213" in reply["choices"][0]["message"]["content"]
    assert [models for models in seen if models] == [{SMOL}, {TELLER}]

    def told() -> list[dict[str, Any]]:
        traces = narrow.control("GET", "/fleet/v1/traces?last=10")["traces"]
        return [trace for trace in traces if trace["parked"]]

    until(lambda: len(told()) == 2)
    for trace in told():
        assert f"scored and gave way to {TELLER}" in trace["parked"]
        assert "loaded after scoring" in {step["name"] for step in trace["steps"]}
        page = narrow.fleetctl("trace", trace["id"]).stdout
        assert "do not fit together" in page, page

    # A short prompt is read whole, and nothing gives way for it.
    with watched(narrow) as seen:
        headers, reply = post(narrow, "/v1/chat/completions", body(30, 10))
    assert headers["x-smartprefill-skipped"].startswith(("slower: ", "margin: "))
    assert "in place of the model that answers" in headers["x-smartprefill-skipped"]
    assert "x-smartprefill-parked" not in headers
    assert seen == [{TELLER}]
