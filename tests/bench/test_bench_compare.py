"""An earlier tree that this one is compared with is the commit's, not the folder's."""

from __future__ import annotations

from pathlib import Path

import pytest
from git_repository import Repository

from bench.compare import extract


def test_the_tree_of_the_commit_is_put_into_the_folder(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "repository")
    earlier = repository.commit("fleetd/app.py", "earlier")
    repository.commit("fleetd/app.py", "later")
    repository.write("fleetd/app.py", "not committed")
    folder = tmp_path / "tree"
    folder.mkdir()
    extract(repository.root, earlier, folder)
    assert [path.name for path in folder.iterdir()] == ["fleetd"]
    assert (folder / "fleetd" / "app.py").read_text() == "earlier"


def test_a_commit_that_git_does_not_know_is_named(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "repository")
    repository.commit("a", "x")
    with pytest.raises(SystemExit, match="not-a-commit"):
        extract(repository.root, "not-a-commit", tmp_path)
