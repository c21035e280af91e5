"""`fleetctl completion`: the script of each shell, and what Tab offers with a daemon and without one."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from fake_daemon import FLEET, FLEETCTL, STATUS, FakeDaemon, Reply, Run

from fleetctl.exits import Exit


def tab(env: dict[str, str], *words: str, home: Path) -> list[str]:
    """What bash would offer for the last of the words."""
    line = ["fleetctl", "--home", str(home), *words]
    completing = {
        "_FLEETCTL_COMPLETE": "bash_complete",
        "COMP_WORDS": "\n".join(line).replace("\n", " "),
        "COMP_CWORD": str(len(line) - 1),
    }
    done = subprocess.run(
        FLEETCTL, env=env | completing, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


@pytest.fixture
def served(daemon: FakeDaemon) -> FakeDaemon:
    models = [{"id": "smollm2-135m"}, {"id": "qwen3-4b"}, {"id": "q\x1b[2J"}]
    daemon.on("GET", "/v1/models", Reply({"data": models}))
    daemon.on("GET", "/fleet/v1/peers", Reply(FLEET))
    return daemon


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["sta"], ["status"]),
        (["models", "un"], ["unload", "unpin"]),
        (["chat", "--keep"], ["--keep-ratio"]),
        (["chat", "-m", "q"], ["qwen3-4b"]),
        (["chat", "--model", ""], ["smollm2-135m", "qwen3-4b"]),
        (["models", "load", "smol"], ["smollm2-135m"]),
        (["unpair", "st"], ["studio"]),
        (["peers", "prompts", ""], ["studio", "air"]),
        (["completion", "z"], ["zsh"]),
    ],
)
def test_tab_completes(env: dict[str, str], served: FakeDaemon, words: list[str], offered: list[str]) -> None:
    assert tab(env, *words, home=served.home) == offered


def test_without_a_daemon_no_names_are_offered_and_nothing_is_said(
    env: dict[str, str], short_dir: Path
) -> None:
    assert tab(env, "chat", "-m", "", home=short_dir / "nope") == []
    assert tab(env, "unpair", "", home=short_dir / "nope") == []
    assert tab(env, "unpa", home=short_dir / "nope") == ["unpair"]


def test_an_answer_that_is_something_else_offers_nothing(env: dict[str, str], daemon: FakeDaemon) -> None:
    daemon.on("GET", "/v1/models", Reply(["x"]))
    daemon.on("GET", "/fleet/v1/peers", Reply([STATUS]))
    assert tab(env, "chat", "-m", "", home=daemon.home) == []
    assert tab(env, "unpair", "", home=daemon.home) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_calls_fleetctl_back(run: Run, shell: str) -> None:
    done = run("completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"_FLEETCTL_COMPLETE={shell}_complete" in done.stdout
    assert json.loads(run("completion", shell, "--json").stdout)["script"].strip() == done.stdout.strip()


def test_another_shell_is_refused(run: Run) -> None:
    assert run("completion", "tcsh").returncode == Exit.USAGE


def test_bash_takes_the_script(run: Run, env: dict[str, str]) -> None:
    if (bash := shutil.which("bash")) is None:
        pytest.skip("there is no bash")
    script = run("completion", "bash").stdout
    done = subprocess.run(
        [bash, "--norc", "-c", f"{script}\ncomplete -p fleetctl"],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "fleetctl" in done.stdout
