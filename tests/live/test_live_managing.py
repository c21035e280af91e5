"""The models of one real daemon, managed with fleetctl from another one."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from interrupting import interrupt
from live_daemon import FLEETCTL, REPO, SOON_S, LiveDaemon, until
from live_fleet import SMOL, LiveFleet, senders, stop_in_the_middle

pytestmark = [pytest.mark.model, pytest.mark.one_loop]

MakeFleet = Callable[..., LiveFleet]


@pytest.fixture
def fleet(make_fleet: MakeFleet, live_models: Path) -> LiveFleet:
    """beta has nothing; alpha has a model."""
    found = make_fleet({"alpha": [live_models / SMOL], "beta": []})
    found.until_usable()
    found.until_has("beta", "alpha", SMOL)
    return found


def models(daemon: LiveDaemon, *words: str) -> subprocess.CompletedProcess[str]:
    return daemon.fleetctl("models", *words, "--on", "beta")


def theirs(fleet: LiveFleet) -> list[dict[str, Any]]:
    """What beta has, as alpha is told."""
    listed = models(fleet["alpha"], "--json")
    assert listed.returncode == 0, listed.stderr
    installed: list[dict[str, Any]] = json.loads(listed.stdout)["installed"]
    return installed


def engines(daemon: LiveDaemon) -> list[str]:
    return [engine["state"] for engine in daemon.control("GET", "/fleet/v1/status")["engines"]]


def test_a_model_of_another_machine_is_pulled_loaded_pinned_unloaded_and_removed(fleet: LiveFleet) -> None:
    alpha = fleet["alpha"]
    done = models(alpha, "pull", SMOL)
    assert (done.returncode, done.stdout) == (0, f"{SMOL} on beta is ready to use.\n"), done.stderr
    done = models(alpha, "load", SMOL)
    assert (done.returncode, done.stdout) == (0, f"{SMOL} on beta is loaded.\n"), done.stderr
    assert (engines(fleet["beta"]), engines(alpha)) == (["ready"], [])
    assert models(alpha, "pin", SMOL).returncode == 0
    (model,) = theirs(fleet)
    assert (model["name"], model["loaded"], model["pinned"], model["path"]) == (SMOL, True, True, "")
    page = models(alpha)
    assert "FITS ON BETA" in page.stdout
    assert "fleetctl models pull NAME --on beta" in page.stdout
    for verb in ("unpin", "unload"):
        assert models(alpha, verb, SMOL).returncode == 0
    again = models(alpha, "unload", SMOL)
    assert again.returncode != 0
    assert f"beta: {SMOL} is not loaded." in again.stderr
    assert models(alpha, "remove", SMOL, "--yes").returncode == 0
    assert theirs(fleet) == []
    assert not (fleet.models_dir("beta") / SMOL).exists()
    assert (fleet.models_dir("alpha") / SMOL).exists()


def test_a_setting_refuses_and_the_other_way_round_it_still_works(
    make_fleet: MakeFleet, live_models: Path
) -> None:
    settings = {"beta": {"FLEETD_FLEET_MANAGE": "off"}}
    chain = live_models / "chain"
    fleet = make_fleet({"alpha": [chain], "beta": [chain]}, settings=settings)
    fleet.until_usable()
    for words in (["load", "chain"], ["remove", "chain", "--yes"], ["pull", SMOL], ["list"]):
        refused = models(fleet["alpha"], *words)
        assert refused.returncode != 0
        assert (
            "beta: It refuses to be managed by other machines: fleet.manage is off there." in refused.stderr
        )
    assert (fleet.models_dir("beta") / "chain").exists()
    done = fleet["beta"].fleetctl("models", "load", "chain", "--on", "alpha")
    assert done.returncode == 0, done.stderr
    unknown = fleet["beta"].fleetctl("models", "load", "chain", "--on", "gamma")
    assert "Paired are: alpha." in unknown.stderr


@contextlib.contextmanager
def pulling(fleet: LiveFleet) -> Iterator[subprocess.Popen[str]]:
    """`pull` on beta, stopped in the middle."""
    command = [*FLEETCTL, "--home", str(fleet["alpha"].home), "models", "pull", SMOL, "--on", "beta"]
    running = subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert stop_in_the_middle(fleet, "beta") == "alpha"
        yield running
    finally:
        running.kill()
        running.communicate()


def test_ctrl_c_ends_a_download_on_the_other_machine_and_the_same_command_finishes_it(
    fleet: LiveFleet,
) -> None:
    with pulling(fleet) as running:
        sender = senders(fleet)["alpha"]
        interrupt(running)
        running.communicate(timeout=SOON_S)
        assert running.returncode == 130
    with contextlib.suppress(psutil.NoSuchProcess):
        sender.resume()
    until(lambda: not senders(fleet))
    assert not (fleet.models_dir("beta") / SMOL).exists()
    assert models(fleet["alpha"], "pull", SMOL).returncode == 0
    assert (fleet.models_dir("beta") / SMOL).exists()


def test_a_machine_that_leaves_in_the_middle_ends_the_command_with_its_name(fleet: LiveFleet) -> None:
    with pulling(fleet) as running:
        fleet["beta"].kill()
        _, said = running.communicate(timeout=SOON_S)
        assert running.returncode not in (0, 130)
        assert "beta" in said
