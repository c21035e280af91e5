"""Figures say when they are older than the code: by commits that touch what they measure."""

from __future__ import annotations

from pathlib import Path

import pytest
from git_repository import Repository

from bench import staleness
from bench.families import FAMILIES
from bench.figures import Figure, Measured, Result
from bench.harness.child import ROOT


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def result(commit: str) -> Result:
    machine = ["A processor", f"{commit} with local changes"]
    return Result("decode", Measured([Figure("a", "x", [1.0])], ""), "", "", machine, 0.0, 1, False)


def test_only_commits_that_touch_what_is_measured_count(repository: Repository) -> None:
    begun = repository.commit("engine/a.py", "1")
    repository.commit("docs/a.md", "1")
    assert staleness.since(repository.root, begun, ["engine"]) == 0
    repository.commit("engine/b.py", "1")
    repository.commit("engine/a.py", "2")
    assert staleness.since(repository.root, begun, ["engine"]) == 2
    repository.write("engine/a.py", "3")
    assert staleness.since(repository.root, begun, ["engine"]) == 3


@pytest.mark.parametrize("commit", ["", "0123456"])
def test_a_commit_that_the_history_lacks_has_no_age(repository: Repository, commit: str) -> None:
    repository.commit("engine/a.py", "1")
    assert staleness.since(repository.root, commit, ["engine"]) is None


def test_a_result_belongs_to_the_commit_beside_its_machine(repository: Repository) -> None:
    begun = repository.commit("engine/a.py", "1")
    repository.commit("engine/a.py", "2")
    results = {"decode": result(f"commit {begun}"), "prefill": result("commit unknown")}
    assert [staleness.measured_at(one.machine) for one in results.values()] == [begun, ""]
    code = {"decode": ["engine"], "prefill": ["engine"], "turns": ["engine"]}
    known = staleness.ages(repository.root, code, results)
    assert known == {"decode": 1, "prefill": None}
    told = list(staleness.lines(list(code), known))
    assert [line.split()[0] for line in told] == ["decode", "prefill", "turns"]
    assert "One later commit" in told[0]
    assert not list(staleness.lines(["decode"], {"decode": 0}))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_path_that_a_family_measures_is_there(name: str) -> None:
    for path in FAMILIES[name].code:
        pattern = path.removeprefix(":(glob)")
        assert list(ROOT.glob(pattern)), f"{name}: nothing matches {path}"


def test_every_room_of_the_engine_makes_some_family_old() -> None:
    named = {path for family in FAMILIES.values() for path in family.code}
    rooms = {path.parent.name for path in (ROOT / "fleetd" / "engine").glob("*/__init__.py")}
    assert "loop" in rooms
    assert not {room for room in rooms if f"fleetd/engine/{room}" not in named}
