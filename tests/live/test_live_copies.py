"""A model is downloaded once and then copied from machine to machine, whoever ends in the middle of it."""

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
from live_fleet import WEIGHTS, LiveFleet, answer, body, give_model, senders, stop_in_the_middle

pytestmark = [pytest.mark.model, pytest.mark.one_loop]

SMOL = "smollm2-135m"
# No way out: whatever does not come from a peer fails at once.
CUT_OFF = {
    "HTTP_PROXY": "http://127.0.0.1:9",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "ALL_PROXY": "http://127.0.0.1:9",
    "NO_PROXY": "",
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    "PIP_RETRIES": "0",
    "HF_ENDPOINT": "http://127.0.0.1:9",
}

MakeFleet = Callable[..., LiveFleet]


@pytest.fixture
def fleet(make_fleet: MakeFleet, live_models: Path) -> LiveFleet:
    """alpha has nothing and no network but the fleet; beta and gamma have the model."""
    smol = live_models / SMOL
    found = make_fleet({"alpha": [], "beta": [smol], "gamma": [smol]}, settings={"alpha": CUT_OFF})
    found.until_usable()
    for name in ("beta", "gamma"):
        found.until_has("alpha", name, SMOL)
    return found


def digest(fleet: LiveFleet, name: str, seen_by: str) -> str:
    fleet.until_has(seen_by, name, SMOL)
    (found,) = [model for model in fleet.peers(seen_by)[name]["models"] if model["name"] == SMOL]
    return str(found["digest"])


def pull(daemon: LiveDaemon, name: str = SMOL) -> subprocess.CompletedProcess[str]:
    return daemon.fleetctl("models", "pull", name, "--json")


@contextlib.contextmanager
def pulling(daemon: LiveDaemon) -> Iterator[Iterator[dict[str, Any]]]:
    with daemon.control_events("/fleet/v1/models/pull", {"model": SMOL}) as steps:
        yield steps


def test_a_model_comes_from_a_peer_when_there_is_no_other_way(fleet: LiveFleet) -> None:
    said = []
    with pulling(fleet["alpha"]) as steps:
        said = list(steps)
    copying = [step["file"] for step in said if step.get("stage") == "copying"]
    assert {file.partition(" from ")[2] for file in copying} in ({"beta"}, {"gamma"}), said
    assert not any("error" in step for step in said), said
    assert digest(fleet, "alpha", "beta") == digest(fleet, "beta", "alpha")
    theirs, ours = (fleet.models_dir(name) / SMOL / WEIGHTS for name in ("beta", "alpha"))
    assert theirs.read_bytes() == ours.read_bytes()
    assert fleet["alpha"].fleetctl("models", "verify", SMOL).returncode == 0
    # Again is no work.
    done = pull(fleet["alpha"])
    assert done.returncode == 0
    _, headers, _ = answer(
        fleet["alpha"], body(SMOL, "What is the capital of France?", max_tokens=2, local_only=True)
    )
    assert headers["X-Fleet-Plan"] == "local; nodes=this"


def test_a_sender_that_dies_is_followed_by_another_which_goes_on_where_it_stopped(fleet: LiveFleet) -> None:
    with pulling(fleet["alpha"]) as steps:
        first = stop_in_the_middle(fleet, "alpha")
        fleet[first].kill()
        said = list(steps)
    second = {"beta": "gamma", "gamma": "beta"}[first]
    assert not any("error" in step for step in said), said
    assert "copy.failed" in fleet["alpha"].log.read_text()
    came = {
        name: [step["done_bytes"] for step in said if step.get("file") == f"{WEIGHTS} from {name}"]
        for name in (first, second)
    }
    # The second one did not begin anew.
    assert min(came[second]) > max(came[first]) > 0, said
    assert fleet["alpha"].fleetctl("models", "verify", SMOL).returncode == 0
    assert digest(fleet, "alpha", second) == digest(fleet, second, "alpha")


def test_without_a_peer_that_has_it_a_model_comes_from_where_it_is_published(
    make_fleet: MakeFleet, live_models: Path
) -> None:
    fleet = make_fleet({"alpha": [], "beta": [live_models / "chain"]}, settings={"alpha": CUT_OFF})
    fleet.until_usable()
    fleet.until_has("alpha", "beta", "chain")
    # It was asked for there, and there nothing can be reached.
    done = pull(fleet["alpha"])
    assert done.returncode == 5
    told = json.loads(done.stderr.splitlines()[-1])["error"]
    assert told["code"] == "download_failed"
    assert "pip could not download" in told["message"]
    assert not (fleet.models_dir("alpha") / SMOL).exists()
    # Once a peer has it, the same command does it.
    give_model(fleet.models_dir("beta"), live_models / SMOL)
    fleet["beta"].kill()
    fleet.start("beta")
    fleet.until_has("alpha", "beta", SMOL)
    done = pull(fleet["alpha"])
    assert done.returncode == 0, done.stderr


def test_ctrl_c_stops_a_copy_at_both_ends_and_pulling_again_finishes_it(fleet: LiveFleet) -> None:
    command = [*FLEETCTL, "--home", str(fleet["alpha"].home), "models", "pull", SMOL]
    running = subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        name = stop_in_the_middle(fleet, "alpha")
        sender = senders(fleet)[name]
        interrupt(running)
        running.communicate(timeout=SOON_S)
        assert running.returncode == 130
    finally:
        running.kill()
        running.communicate()
    with contextlib.suppress(psutil.NoSuchProcess):
        sender.resume()
    until(lambda: not senders(fleet))
    assert not (fleet.models_dir("alpha") / SMOL).exists()
    assert pull(fleet["alpha"]).returncode == 0
