"""An earlier tree that this one is compared with is the commit's, not the folder's."""

from __future__ import annotations

from pathlib import Path

import pytest
from git_repository import Repository

from bench.compare import check_out, measured


def test_the_tree_of_the_commit_is_put_into_the_folder(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "repository")
    earlier = repository.commit("fleetd/app.py", "earlier")
    repository.commit("fleetd/app.py", "later")
    repository.write("fleetd/app.py", "not committed")
    folder = check_out(repository.root, earlier, tmp_path / "tree")
    assert sorted(path.name for path in folder.iterdir()) == [".git", "fleetd"]
    assert (folder / "fleetd" / "app.py").read_text() == "earlier"


def test_a_commit_that_git_does_not_know_is_named(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "repository")
    repository.commit("a", "x")
    with pytest.raises(SystemExit, match="not-a-commit"):
        check_out(repository.root, "not-a-commit", tmp_path / "tree")


@pytest.mark.parametrize(("code", "titles"), [("", ["Ready"]), ("raise SystemExit(1)", [])])
def test_the_figures_of_a_family_are_those_of_the_trees_own_bench(
    tmp_path: Path, code: str, titles: list[str]
) -> None:
    kept = tmp_path / "docs" / "benchmarks.json"
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "__init__.py").touch()
    kept.parent.mkdir()
    kept.write_text('{"service": {"measured": {"figures": [{"title": "Of an earlier day"}]}}}')
    (tmp_path / "bench" / "__main__.py").write_text(
        f"""
import json, pathlib, sys
{code}
assert sys.argv[1:] == ["--runs", "1", "service"]
result = {{"measured": {{"figures": [{{"title": "Ready", "unit": "s", "values": [0.5]}}]}}}}
pathlib.Path("docs/benchmarks.json").write_text(json.dumps({{"service": result}}))
"""
    )
    assert [figure["title"] for figure in measured(tmp_path, "service")] == titles
