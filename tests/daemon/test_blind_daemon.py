"""A daemon on a kernel that answers no question about the machine: it starts, tells what it knows, and
answers. And one on a disk that cannot be its home.
"""

from __future__ import annotations

import errno
from pathlib import Path

import chain_model
import pytest
from aiohttp import web
from live_daemon import REPO, LiveDaemon

from fleetd import limits
from fleetd.app import Daemon
from fleetd.config import Config, FleetSettings, HttpSettings
from fleetd.errors import ConfigError
from fleetd.process.notify import Notifier
from fleetd.storage import paths
from fleetd.storage.paths import HomeFolder


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


async def test_a_disk_without_sockets_is_no_place_for_a_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many disks of the network: people get a sentence, not a traceback."""

    async def refuse(_site: web.UnixSite) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(web.UnixSite, "start", refuse)
    home = HomeFolder(tmp_path / "h")
    paths.prepare(home)
    config = Config(http=HttpSettings(listen="127.0.0.1:0"), fleet=FleetSettings(enabled=False))
    with pytest.raises(ExceptionGroup) as caught:
        await Daemon(config, home, notifier=Notifier({}), exit_after=lambda seconds: None).serve()
    (error,) = caught.value.exceptions
    assert isinstance(error, ConfigError)
    assert "operation not supported" in error.message
    assert "--home" in error.hint
