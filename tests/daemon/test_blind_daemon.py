"""A daemon on a kernel that answers no question about the machine: it starts, tells what it knows, and
answers.
"""

from __future__ import annotations

from pathlib import Path

import chain_model
import pytest
from live_daemon import REPO, LiveDaemon

from fleetd import limits


@pytest.mark.one_loop
def test_a_daemon_that_can_read_nothing_serves(tmp_path: Path) -> None:
    chain_model.build(tmp_path / "models" / "chain")
    blind = REPO / "tests/support/blind"
    settings = {"PYTHONPATH": str(blind), "FLEETD_MODELS_DEFAULT": "chain"}
    with LiveDaemon(tmp_path / "home", tmp_path / "models", **settings) as daemon:
        body = {"model": "chain", "messages": [{"role": "user", "content": "<hello>"}]}
        answer = daemon.control("POST", "/v1/chat/completions", body)
        assert answer["choices"][0]["message"]["content"] == "Hello there, world!"
        status = daemon.status()
        assert status["machine"]["free_unknown"]
        assert status["machine"]["memory_bytes"] <= limits.ASSUMED_MEMORY_BYTES
        assert status["memory"]["free_unknown"]
        assert status["memory"]["usable_bytes"] > 0
        assert "fleetd_build_info" in daemon.control("GET", "/metrics")
        said = [line["event"] for line in daemon.lines()]
    # Each once, and no part of it ended.
    assert said.count("memory.unread") == 1
    assert "task.restarts" not in said
