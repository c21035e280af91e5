"""One machine drafts for another, both real daemons: the text is the same, and nothing is left behind."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chain_model
import psutil
import pytest
from forked_programs import Programs
from live_daemon import LiveDaemon, frozen, until
from live_fleet import LiveFleet, answer, body, heard, said

pytestmark = pytest.mark.one_loop

TARGET, SMALL = "target", "small"
# More than the model counts before it begins anew.
TOKENS = 160
COUNTED = " ".join(str(1 + number % chain_model.ENDLESS) for number in range(TOKENS))
WITHIN_S = 60.0


@pytest.fixture(scope="module")
def pair(
    short_dir: Path, programs: Programs, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveFleet]:
    """alpha answers, beta has a model that drafts for alpha's."""
    folder = tmp_path_factory.mktemp("drafting")
    models = {name: chain_model.build(folder / name) for name in (TARGET, SMALL)}
    settings = {"FLEETD_SPECULATION_DRAFT_MODEL": SMALL, "FLEETD_SPECULATION_DRAFT_ON": "peers"}
    with LiveFleet(
        short_dir / "drafting",
        {"alpha": [models[TARGET]], "beta": [models[SMALL]]},
        settings={"alpha": settings},
        programs=programs,
    ) as fleet:
        fleet.until_usable()
        fleet.load("alpha", TARGET, seen_by="beta")
        fleet.load("beta", SMALL, seen_by="alpha")
        yield fleet


def count(daemon: LiveDaemon, metric: str) -> float:
    lines = daemon.control("GET", "/metrics").splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(metric))


def ask(daemon: LiveDaemon, **fields: Any) -> tuple[str, str]:
    """The text, and how exact it is."""
    status, headers, got = answer(daemon, body(TARGET, "<count>", max_tokens=TOKENS, **fields))
    assert status == 200, got
    return got["choices"][0]["message"]["content"], headers["X-Fleet-Exactness"]


def free(daemon: LiveDaemon) -> bool:
    """As its workers last told."""
    return all(not engine["assisting"] and not engine["kv_bytes"] for engine in daemon.status()["engines"])


def descriptors(daemon: LiveDaemon) -> int:
    found = 0
    for process in daemon.processes():
        # A short helper of the daemon may have ended meanwhile.
        with contextlib.suppress(psutil.NoSuchProcess):
            found += process.num_fds()
    return found


def worker(daemon: LiveDaemon, model: str) -> psutil.Process:
    (pid,) = [engine["pid"] for engine in daemon.status()["engines"] if engine["model"] == model]
    return psutil.Process(pid)


def test_a_peer_drafts_and_the_text_is_the_models_own(pair: LiveFleet) -> None:
    alpha, beta = pair["alpha"], pair["beta"]
    # On a busy machine an answer may be there before its drafter is.
    done = 'fleetd_drafters_total{outcome="done",where="peer"}'
    until(lambda: ask(alpha) == (COUNTED, "exact") and count(alpha, done), 3 * WITHIN_S)
    until(lambda: count(beta, 'fleetd_served_total{kind="draft",outcome="done"}') >= 1, WITHIN_S)
    until(lambda: free(beta) and free(alpha), WITHIN_S)
    before = descriptors(alpha), descriptors(beta)
    for _ in range(3):
        trace = _drafted(alpha)
        assert (trace["drafter"]["model"], trace["drafter"]["machine"]) == (SMALL, "beta")
        told = {step["name"] for step in trace["steps"] if step["machine"] == "beta"}
        assert {"agreed", "drafted"} <= told
    # Nor need its first draft.
    until(lambda: _drafted(alpha)["speculation"] is not None, 3 * WITHIN_S)
    until(lambda: free(beta) and free(alpha), WITHIN_S)
    _people_are_told(alpha)
    until(lambda: descriptors(alpha) <= before[0] and descriptors(beta) <= before[1], WITHIN_S)


def _drafted(daemon: LiveDaemon) -> dict[str, Any]:
    """The trace of an answer for which only a drafter was asked, and came."""
    found: list[dict[str, Any]] = []

    def drafted() -> bool:
        before = _last_trace(daemon).get("id")
        assert ask(daemon, speculate={"sources": ["drafter"], "draft_model": SMALL}) == (COUNTED, "exact")
        # The trace is written after the answer, which on a busy machine may end before its drafter comes.
        until(lambda: _last_trace(daemon).get("id") != before, WITHIN_S)
        found.append(_last_trace(daemon))
        return any(step["name"] == "drafted" for step in found[-1]["steps"])

    until(drafted, 3 * WITHIN_S)
    return found[-1]


def _last_trace(daemon: LiveDaemon) -> dict[str, Any]:
    traces = daemon.control("GET", "/fleet/v1/traces?last=1")["traces"]
    return next(iter(traces), {})


def _people_are_told(alpha: LiveDaemon) -> None:
    """Who would draft for an answer, and who has drafted for the last one."""
    planned = alpha.control("POST", "/fleet/v1/plan", {"model": TARGET, "tokens": 100})["drafts"]
    assert (planned["draft_model"], planned["drafters"]) == (SMALL, ["beta"])
    assert planned["sources"] == ["drafter", "suffix", "lookup"]
    assert planned["width"] > 1
    counts = _last_trace(alpha)["speculation"]["sources"]["drafter"]
    assert counts["passes"] > 0
    assert counts["accepted"] <= counts["drafted"]


def test_what_has_to_stay_is_not_drafted_for_elsewhere(pair: LiveFleet) -> None:
    until(lambda: free(pair["beta"]) and free(pair["alpha"]), WITHIN_S)
    before = count(pair["beta"], 'fleetd_served_total{kind="draft"')
    assert ask(pair["alpha"], local_only=True) == (COUNTED, "exact")
    asked = 0

    def drafted() -> bool:
        nonlocal asked
        assert ask(pair["alpha"]) == (COUNTED, "exact")
        asked += 1
        return count(pair["beta"], 'fleetd_served_total{kind="draft"') > before

    until(drafted, 3 * WITHIN_S)
    assert count(pair["beta"], 'fleetd_served_total{kind="draft"') <= before + asked


def test_a_client_that_leaves_frees_the_drafter(pair: LiveFleet) -> None:
    with heard(pair["alpha"], TARGET, "<count>", max_tokens=3000) as stream:
        for _ in zip(range(20), stream.events(), strict=False):
            pass
    until(lambda: free(pair["beta"]) and free(pair["alpha"]), WITHIN_S)


def test_a_drafter_that_stops_or_dies_costs_its_drafts(pair: LiveFleet) -> None:
    alpha, beta = pair["alpha"], pair["beta"]
    with heard(alpha, TARGET, "<count>", max_tokens=TOKENS) as stream:
        text = "".join(map(said, itertools.islice(stream.events(), 20)))
        with frozen(beta.process.pid):
            text += stream.text()
    assert text == COUNTED
    pair.until_usable()
    with heard(alpha, TARGET, "<count>", max_tokens=TOKENS) as stream:
        text = "".join(map(said, itertools.islice(stream.events(), 20)))
        worker(beta, SMALL).kill()
        text += stream.text()
    assert text == COUNTED
    until(lambda: free(alpha), WITHIN_S)
    # And with nobody to ask.
    pair["beta"].kill()
    assert ask(alpha) == (COUNTED, "exact")
