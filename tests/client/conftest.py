"""Fixtures: a fake daemon, and fleetctl as a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked_programs
import pytest
from fake_daemon import FLEETCTL, REPO, FakeDaemon, Run
from forked_programs import Programs

from fleetctl.cli import VERBS


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


@pytest.fixture(scope="session")
def fleetctl_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """Forks fleetctl, as an interpreter in UTF-8 mode would run it."""
    made = Programs(
        tmp_path_factory.mktemp("fleetctl") / "log",
        imports=["fleetctl.cli", *(f"fleetctl.verbs.{verb}" for verb in VERBS)],
        enter=["env", "PYTHONUTF8=1"],
    )
    yield made
    made.close()


@pytest.fixture
def run(env: dict[str, str], fleetctl_programs: Programs) -> Run:
    """fleetctl to its end: `run("status", home=..., stdin=...)`."""

    def _run(
        *arguments: str, home: Path | None = None, stdin: str | bytes | None = None, timeout_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        given = stdin.encode() if isinstance(stdin, str) else stdin
        where = ["--home", str(home)] if home else []
        if forked_programs.AVAILABLE:
            command = [sys.executable, "-m", "fleetctl", *where, *arguments]
            done = fleetctl_programs.run(command, env=env, given=given, timeout_s=timeout_s)
        else:
            reads: dict[str, Any] = {"stdin": subprocess.DEVNULL} if given is None else {"input": given}
            done = subprocess.run(
                [*FLEETCTL, *where, *arguments],
                env=env,
                capture_output=True,
                timeout=timeout_s,
                check=False,
                **reads,
            )
        return subprocess.CompletedProcess(
            done.args, done.returncode, done.stdout.decode("utf-8", "surrogateescape"), done.stderr.decode()
        )

    return _run
