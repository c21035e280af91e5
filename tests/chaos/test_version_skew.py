"""This version and the last one before its packages were renamed: paired by a code, working for each other.

Both run as users start them. The older one comes from the history of the repository.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "live"))

import chain_model
from live_daemon import REPO
from live_fleet import LiveFleet, Verb, answer, body, give_model

from fleetd.models.folder import ModelFolder

pytestmark = [pytest.mark.long, pytest.mark.one_loop, pytest.mark.model, pytest.mark.timeout(600)]

OLD, NEW = "old", "new"
SMOL = "smollm2-135m"
#: A module that the renaming commit deleted.
GONE = "fleetd/jobs/__init__.py"
WORK_S = 60.0


def _git(*arguments: str) -> bytes:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=REPO, capture_output=True, check=True, timeout=60).stdout


@pytest.fixture(scope="module")
def old_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The older version's source."""
    try:
        renaming = _git("log", "--diff-filter=D", "--format=%H", "-1", "--", GONE).decode().strip()
        if not renaming:
            pytest.skip("NO VERSION SKEW IS TESTED: the history has no commit that deleted " + GONE)
        packed = _git("archive", f"{renaming}^", "fleetd", "fleetctl", "systemd", "launchd")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"NO VERSION SKEW IS TESTED: this is no clone with its history ({error})")
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder


class Skewed(LiveFleet):
    """A machine of each version."""

    def __init__(self, root: Path, old_tree: Path, models: dict[str, list[Path]]) -> None:
        self._enter_old = ["env", "-C", str(old_tree), f"PYTHONPATH={old_tree}"]
        super().__init__(root, models, meet="unknown", paired=False)

    def enter(self, name: str) -> Sequence[str]:
        return self._enter_old if name == OLD else ()

    def verb(self, name: str, *arguments: str) -> Verb:
        return Verb(self[name], *arguments, enter=self.enter(name))

    def pair(self, inviter: str) -> None:
        (joiner,) = {OLD, NEW} - {inviter}
        pair = self.verb(inviter, "pair", "--yes")
        code = pair.event("code")["code"]
        host = ":".join(map(str, self.peer_address(inviter)))
        join = self.verb(joiner, "join", code, "--host", host, "--yes")
        assert join.end()[0] == 0
        assert pair.end()[0] == 0
        self.until_usable(limit_s=WORK_S)

    def asked(self, name: str, model: str, prompt: str, **fields: Any) -> tuple[str, Any]:
        """The plan's kind, and text with log probabilities."""
        request = body(model, prompt, logprobs=True, **fields)
        status, headers, got = answer(self[name], request)
        assert status == 200, got
        choice = got["choices"][0]
        return headers["X-Fleet-Plan"].partition(";")[0], (choice["message"]["content"], choice["logprobs"])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="sk-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module", params=[OLD, NEW])
def skewed(
    request: pytest.FixtureRequest, root: Path, old_tree: Path, embedded_model: ModelFolder
) -> Iterator[Skewed]:
    """Paired, at the invitation of each version in turn; each has a model that the other has not."""
    inviter: str = request.param
    chains = {name: chain_model.build(root / inviter / f"of-{name}") for name in (OLD, NEW)}
    small = embedded_model.path
    with Skewed(
        root / f"{inviter}-f", old_tree, {name: [chains[name], small] for name in (OLD, NEW)}
    ) as fleet:
        fleet.pair(inviter)
        yield fleet


@pytest.mark.parametrize(("asks", "has"), [(OLD, NEW), (NEW, OLD)])
def test_each_version_answers_for_the_other(skewed: Skewed, asks: str, has: str) -> None:
    skewed.until_has(asks, has, f"of-{has}")
    alone = skewed.asked(has, f"of-{has}", "<count>", max_tokens=40, local_only=True)
    plan, got = skewed.asked(asks, f"of-{has}", "<count>", max_tokens=40)
    assert plan == "remote"
    assert got == alone[1]


@pytest.mark.parametrize("asks", [OLD, NEW])
def test_a_long_prompt_is_answered_as_by_one_machine(skewed: Skewed, asks: str) -> None:
    """Shared or not: that is the planner's. What counts is that both versions' answers are the same."""
    (other,) = {OLD, NEW} - {asks}
    for name in (OLD, NEW):
        skewed[name].control("POST", "/fleet/v1/models/load", {"model": SMOL})
    skewed.until_has(asks, other, SMOL, "loaded")
    for number in range(2):
        prompt = f"{asks} {number}: " + " ".join(f"stone {word} river" for word in range(70))
        alone = skewed.asked(other, SMOL, prompt, max_tokens=6, local_only=True)
        _, got = skewed.asked(asks, SMOL, prompt, max_tokens=6)
        assert got == alone[1]


@pytest.mark.parametrize(("gets", "has"), [(OLD, NEW), (NEW, OLD)])
def test_each_version_copies_a_model_from_the_other(
    skewed: Skewed, root: Path, gets: str, has: str, request: pytest.FixtureRequest
) -> None:
    name = f"copied-{has}"
    folder = chain_model.build(root / request.node.name / name)
    give_model(skewed.models_dir(has), folder)
    skewed.until_has(gets, has, name)
    exit_code, said = skewed.verb(gets, "models", "pull", name).end()
    assert exit_code == 0, said
    assert (skewed.models_dir(gets) / name / "model.safetensors").exists()


def test_what_people_ask_of_one_names_the_other(skewed: Skewed) -> None:
    for name, other in ((OLD, NEW), (NEW, OLD)):
        done = skewed.verb(name, "peers").end()
        assert done[0] == 0
        assert skewed.states(name)[other] == "usable"
