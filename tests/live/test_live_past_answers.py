"""With `speculation.remember` a daemon drafts from its own past answers, apart by key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chain_model
import pytest
from forked_programs import Programs
from live_daemon import LiveDaemon
from live_fleet import LiveFleet, answer, body

pytestmark = [pytest.mark.one_loop, pytest.mark.timeout(120)]

MODEL = "target"
TOKENS = 60


@pytest.fixture
def alpha(short_dir: Path, programs: Programs, tmp_path: Path) -> Iterator[LiveDaemon]:
    model = chain_model.build(tmp_path / MODEL)
    settings = {"FLEETD_SPECULATION_REMEMBER": "true", "FLEETD_SPECULATION_MODE": "on"}
    with LiveFleet(
        short_dir / "pasts", {"alpha": [model]}, settings={"alpha": settings}, programs=programs
    ) as fleet:
        yield fleet["alpha"]


def ask(daemon: LiveDaemon, key: str, **fields: Any) -> tuple[str, int]:
    """The text, and how many drafts were right."""
    asked = body(MODEL, "<count>", max_tokens=TOKENS, speculate={"key": key}, **fields)
    status, _, got = answer(daemon, asked)
    assert status == 200, got
    return got["choices"][0]["message"]["content"], got["timings"].get("draft_n_accepted", 0)


def test_an_answer_is_drafted_from_past_ones_of_the_same_key(alpha: LiveDaemon) -> None:
    # Numbers do not repeat: without a past answer none of them can be guessed.
    text, drafted = ask(alpha, "ours")
    assert drafted == 0
    told = alpha.control("POST", "/fleet/v1/plan", {"model": MODEL, "tokens": 100})["drafts"]
    assert told["remembers"]
    assert told["sources"] == ["suffix", "lookup"]
    assert told["verdict"].startswith("exact")
    assert ask(alpha, "theirs") == (text, 0)
    found, drafted = ask(alpha, "ours")
    assert found == text
    assert drafted > TOKENS // 2
