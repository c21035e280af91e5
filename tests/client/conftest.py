"""Fixtures: a fake daemon, and fleetctl as a real subprocess."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_daemon import FLEETCTL, REPO, FakeDaemon, Run


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A folder with a short path: socket paths are limited to about 100 bytes."""
    path = Path(tempfile.mkdtemp(prefix="fc-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def daemon(short_dir: Path) -> Iterator[FakeDaemon]:
    home = short_dir / "home"
    home.mkdir(mode=0o700)
    fake = FakeDaemon(home)
    yield fake
    fake.stop()


@pytest.fixture
def env(short_dir: Path) -> dict[str, str]:
    """A clean environment whose home folders are the test's own."""
    keep = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ}
    return {
        **keep,
        "HOME": str(short_dir),
        "XDG_STATE_HOME": str(short_dir / "state"),
        "XDG_CONFIG_HOME": str(short_dir / "config"),
        "PYTHONPATH": str(REPO),
        "PYTHONUTF8": "1",
        "TERM": "xterm",
    }


@pytest.fixture
def run(env: dict[str, str]) -> Run:
    """fleetctl as a subprocess: `run("status", home=..., stdin=...)`."""

    def _run(
        *arguments: str, home: Path | None = None, stdin: str | bytes | None = None, timeout_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        given = stdin.encode() if isinstance(stdin, str) else stdin
        where = ["--home", str(home)] if home else []
        with subprocess.Popen(
            [*FLEETCTL, *where, *arguments],
            env=env,
            stdin=subprocess.DEVNULL if given is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            try:
                out, err = process.communicate(given, timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return subprocess.CompletedProcess(
            process.args, process.returncode, out.decode("utf-8", "surrogateescape"), err.decode()
        )

    return _run
