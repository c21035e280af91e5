"""fleetctl and the real daemon, with the real default model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_daemon import FLEETCTL, REPO, Run

from fleetd.models.folder import ModelFolder

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]

QUESTION = ("chat", "--temperature", "0", "What is the capital of France?")


@pytest.fixture(scope="module")
def home(
    embedded_model: ModelFolder, models_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A daemon that already has the model's files."""
    home = tmp_path_factory.mktemp("live") / "h"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("FLEETD_")}
    with (home.parent / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "fleetd", "run", "--home", str(home), "--http", "127.0.0.1:0"],
            cwd=REPO,
            env={
                **clean,
                "FLEETD_MODELS_DIR": str(models_dir),
                "FLEETD_FLEET_LISTEN": "127.0.0.1:0",
                "FLEETD_FLEET_MDNS": "off",
            },
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        until(lambda: (home / "fleetd.sock").exists(), 30)
        yield home
    finally:
        process.terminate()
        try:
            process.wait(45)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def until(condition: Callable[[], Any], limit_s: float) -> None:
    """Another process reaches a state that it cannot signal."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def status(run: Run, home: Path) -> Any:
    return json.loads(run("status", "--json", home=home).stdout)


def test_it_answers(run: Run, home: Path) -> None:
    done = run(*QUESTION, home=home, timeout_s=120)
    assert (done.returncode, done.stdout) == (0, "The capital of France is Paris.\n"), done.stderr
    assert "tok/s" in done.stderr.splitlines()[-1]


def test_the_second_question_reuses_the_first(run: Run, home: Path) -> None:
    run(*QUESTION, home=home, timeout_s=120)
    value = json.loads(run(*QUESTION, "--json", home=home, timeout_s=120).stdout)
    assert value["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert value["exactness"] == "exact"


def test_every_reading_verb_agrees_with_the_daemon(run: Run, home: Path) -> None:
    run("models", "load", "smollm2-135m", home=home, timeout_s=120)
    assert [engine["model"] for engine in status(run, home)["engines"]] == ["smollm2-135m"]
    assert "smollm2-135m  ready" in run("status", home=home).stdout
    models = json.loads(run("models", "--json", home=home).stdout)
    assert [model["loaded"] for model in models["installed"] if model["name"] == "smollm2-135m"] == [True]
    assert "loaded" in run("models", home=home).stdout
    assert "is intact" in run("models", "verify", "smollm2-135m", home=home).stdout
    env = json.loads(run("env", "--json", home=home).stdout)
    assert env["base_url"] == f"http://127.0.0.1:{status(run, home)['http']['port']}/v1"
    assert env["api_key"] == (home / "api-token").read_text().strip()
    assert run("usage", home=home).returncode == 0
    plan = json.loads(run("plan", "--tokens", "4000", "--json", home=home).stdout)
    assert [(option["kind"], option["chosen"]) for option in plan["options"]] == [("local", True)]
    assert re.search(r"^\*  local  this ", run("plan", "--tokens", "4000", home=home).stdout, re.MULTILINE)
    # Nobody could have helped with anything.
    assert "No request has come yet" in run("trace", home=home).stdout
    checks = json.loads(run("doctor", "--json", home=home, timeout_s=120).stdout)["checks"]
    # The machine that runs the tests may itself be short of memory or disk.
    assert {check["name"] for check in checks if check["level"] == "fail"} <= {"disk", "memory"}, checks


def test_ctrl_c_frees_the_slot(run: Run, home: Path, env: dict[str, str]) -> None:
    run(*QUESTION, home=home, timeout_s=120)
    command = [*FLEETCTL, "--home", str(home), "chat", "Tell me a very long story about a fox."]
    with subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        process.stdout.read(5)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    assert process.returncode == 130
    until(lambda: status(run, home)["requests"]["running"] == 0, 15)


def test_unknown_model_is_refused_by_name(run: Run, home: Path) -> None:
    done = run("chat", "--model", "smollm2-135", "hi", home=home)
    assert done.returncode == 4
    assert "smollm2-135m" in done.stderr
