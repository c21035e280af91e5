"""`fleetctl open`: the link is printed, and no other user reads it on its way to the browser."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_daemon import FakeDaemon, Reply, Run

URL = "http://127.0.0.1:8114/#ticket=abc&def"


@pytest.fixture
def served(daemon: FakeDaemon) -> FakeDaemon:
    daemon.on("POST", "/fleet/v1/page/ticket", Reply({"url": URL, "expires_s": 30.0}))
    return daemon


@pytest.fixture
def browsed(env: dict[str, str], tmp_path: Path) -> Path:
    """Where a browser that is only a script writes down what it was started with."""
    program, said = tmp_path / "browser", tmp_path / "said"
    program.write_text(f'#!/bin/sh\necho "$@" > {said}\n')
    program.chmod(0o755)
    env["BROWSER"] = str(program)
    env["DISPLAY"] = ":0"
    return said


def test_the_browser_is_started_with_a_private_file_that_leads_to_the_link(
    served: FakeDaemon, run: Run, browsed: Path
) -> None:
    done = run("open", home=served.home)
    assert (done.returncode, done.stdout) == (0, f"{URL}\n")
    assert done.stderr == "This link works once, within 30 seconds.\n"
    file = served.home / "open.html"
    assert browsed.read_text().strip() == file.as_uri()
    assert file.stat().st_mode & 0o777 == 0o600
    assert "#ticket=abc&amp;def" in file.read_text()


@pytest.mark.parametrize("flag", ["--no-browser", "--json"])
def test_no_browser_is_started_where_none_is_wanted(
    served: FakeDaemon, run: Run, browsed: Path, flag: str
) -> None:
    done = run("open", flag, home=served.home)
    assert URL in (done.stdout if flag != "--json" else json.loads(done.stdout)["url"])
    assert not browsed.exists()


def test_no_text_browser_takes_over_a_terminal_without_a_screen(
    served: FakeDaemon, run: Run, browsed: Path, env: dict[str, str]
) -> None:
    del env["DISPLAY"]
    assert run("open", home=served.home).stdout == f"{URL}\n"
    assert not browsed.exists()
