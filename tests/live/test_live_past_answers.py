"""What one machine answered drafts for another one, both real daemons: through HTTP, session and worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chain_model
import pytest
from live_daemon import LiveDaemon, until
from live_fleet import LiveFleet, answer, body

pytestmark = [pytest.mark.one_loop, pytest.mark.timeout(120)]

MODEL = "target"
TOKENS = 60
WITHIN_S = 20.0


@pytest.fixture
def pair(short_dir: Path, tmp_path: Path) -> Iterator[LiveFleet]:
    model = chain_model.build(tmp_path / MODEL)
    settings = {"FLEETD_SPECULATION_REMEMBER": "true", "FLEETD_SPECULATION_MODE": "on"}
    both = ("alpha", "beta")
    models, options = {name: [model] for name in both}, {name: settings for name in both}  # noqa: C420
    with LiveFleet(short_dir / "pasts", models, settings=options) as fleet:
        fleet.until_usable()
        fleet.load("alpha", MODEL, seen_by="beta")
        fleet.load("beta", MODEL, seen_by="alpha")
        yield fleet


def count(daemon: LiveDaemon, fate: str) -> float:
    """Past answers that were told or heard."""
    lines = daemon.control("GET", "/metrics").splitlines()
    name = f'fleetd_past_answers_total{{fate="{fate}"}}'
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def ask(daemon: LiveDaemon, key: str, **fields: Any) -> tuple[str, int]:
    """The text, and how many drafts were right."""
    asked = body(MODEL, "<count>", max_tokens=TOKENS, speculate={"key": key}, **fields)
    status, _, got = answer(daemon, asked)
    assert status == 200, got
    return got["choices"][0]["message"]["content"], got["timings"].get("draft_n_accepted", 0)


def test_an_answer_here_is_drafted_from_there(pair: LiveFleet) -> None:
    alpha, beta = pair["alpha"], pair["beta"]
    # Numbers do not repeat: without a past nothing of them can be guessed. And what stays, stays.
    text, drafted = ask(alpha, "ours", local_only=True)
    assert drafted == 0
    told = alpha.control("POST", "/fleet/v1/plan", {"model": MODEL, "tokens": 100})["drafts"]
    assert told["remembers"]
    assert told["sources"] == ["suffix", "lookup"]
    assert told["verdict"].startswith("exact")
    assert ask(beta, "ours", local_only=True) == (text, 0)
    assert count(alpha, "sent") == count(beta, "sent") == 0
    ask(alpha, "theirs")
    until(lambda: count(alpha, "sent") + count(beta, "sent") == 1, WITHIN_S)
    until(lambda: count(alpha, "taken") + count(beta, "taken") == 1, WITHIN_S)
    # Whichever of them answered, the other one knows it now; another key knows nothing.
    assert [ask(daemon, "nobody's", local_only=True) for daemon in (alpha, beta)] == [(text, 0)] * 2
    for daemon in (alpha, beta):
        found, drafted = ask(daemon, "theirs", local_only=True)
        assert found == text
        assert drafted > TOKENS // 2
