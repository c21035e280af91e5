"""A measurement of many hours goes on where it broke off, on the same code alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from git_repository import Repository

from bench.harness.kept_parts import KeptParts
from bench.scenarios.never_slower import Cell, Column

CODE = ["engine"]


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path / "repository")
    made.commit("engine/a.py", "1")
    return made


def parts(repository: Repository) -> KeptParts[Column]:
    return KeptParts("grid", CODE, Column, repository.root.parent / "kept", repository.root)


def broken() -> Column:
    raise RuntimeError("it broke off")


COLUMN = Column([Cell("500 tokens", [1.0, 1.1], [0.2], ["local", "tokens, shared"])], [0.5])


def test_a_finished_part_is_measured_once(repository: Repository) -> None:
    begun = parts(repository)
    begun.measured("a", lambda: COLUMN)
    with pytest.raises(RuntimeError, match="broke off"):
        begun.measured("b", broken)
    again = parts(repository)
    assert again.measured("a", broken) == COLUMN
    assert again.measured("b", Column) == Column()
    again.clear()
    with pytest.raises(RuntimeError, match="broke off"):
        parts(repository).measured("a", broken)


@pytest.mark.parametrize("committed", [True, False])
def test_what_other_code_gave_is_measured_anew(repository: Repository, committed: bool) -> None:
    parts(repository).measured("a", lambda: COLUMN)
    (repository.commit if committed else repository.write)("engine/a.py", "2")
    with pytest.raises(RuntimeError, match="broke off"):
        parts(repository).measured("a", broken)


def test_figures_that_are_committed_meanwhile_change_nothing(repository: Repository) -> None:
    parts(repository).measured("a", lambda: COLUMN)
    repository.commit("docs/benchmarks.md", "1")
    assert parts(repository).measured("a", broken) == COLUMN


def test_what_cannot_be_told_apart_is_not_kept(repository: Repository) -> None:
    repository.write("engine/a.py", "2")
    parts(repository).measured("a", lambda: COLUMN)
    with pytest.raises(RuntimeError, match="broke off"):
        parts(repository).measured("a", broken)
