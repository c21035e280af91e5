"""The folders show the architecture: few files at the top, and each folder says what may be in it."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from bench import structure

REPO = Path(__file__).parents[2]
WRITTEN_BY_THE_BUILD = "_version.py"


def folders(package: str) -> list[Path]:
    return sorted(path.parent for path in (REPO / package).rglob("__init__.py"))


@pytest.mark.parametrize(("folder", "most"), [("fleetd", 8), ("fleetd/engine", 6), ("fleetctl", 10)])
def test_the_top_of_a_package_has_few_files(folder: str, most: int) -> None:
    files = [path.name for path in (REPO / folder).glob("*.py") if path.name != WRITTEN_BY_THE_BUILD]
    assert 1 < len(files) <= most, files


@pytest.mark.parametrize("package", ["fleetd", "fleetctl", "bench"])
def test_every_folder_says_what_may_be_in_it(package: str) -> None:
    assert len(folders(package)) > 2
    for folder in folders(package):
        text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
        assert text is not None, folder
        assert text.partition("\n")[0].endswith("."), f"{folder}: {text}"


def test_every_folder_of_modules_is_a_package() -> None:
    with_modules = {
        path.parent for package in ("fleetd", "fleetctl") for path in (REPO / package).rglob("*.py")
    }
    assert with_modules == {*folders("fleetd"), *folders("fleetctl")}


def test_every_room_of_the_worker_is_on_its_side_of_the_border() -> None:
    """The contracts name the rooms one by one: a new one must not be left out."""
    with (REPO / "pyproject.toml").open("rb") as file:
        contracts = {each["name"]: each for each in tomllib.load(file)["tool"]["importlinter"]["contracts"]}
    rooms = {f"fleetd.engine.{folder.name}" for folder in folders("fleetd/engine") if folder.name != "engine"}
    rooms -= {"fleetd.engine.daemon_side"}
    worker = contracts["Two processes: a worker knows nothing of the daemon's side"]["source_modules"]
    assert rooms <= set(worker)
    (daemon,) = [each for name, each in contracts.items() if name.startswith("Two processes: the daemon's")]
    # The daemon starts workers by what ``cpu`` knows of this system, and hands them sockets, without mlx.
    shared = {"fleetd.engine.cpu", "fleetd.engine.streams"}
    assert rooms - shared <= set(daemon["forbidden_modules"])


STRUCT = """
class {name}:
    layers: int
    hidden_bytes: int
    weights_bytes: int
    prefill_tok_s: float
    {more}
"""


def test_the_figures_of_the_structure_count_what_they_say() -> None:
    sources = {
        "fleetd/__init__.py": '"""Top."""\n',
        "fleetd/a.py": STRUCT.format(name="Described", more="min_p: float"),
        "fleetd/engine/b.py": "class Nested:\n    layers: int\n    shape: Described\n",
        "fleetd/requests/c.py": (
            "class Step:\n    async def on_event(self): ...\nclass Other:\n    def on_event(self): ...\n"
        ),
        "tests/test_a.py": "min_p = 1\n",
        "docs/contributing.md": (
            "## Add a dialect\n| `fleetd/a.py`, `fleetd/engine/b.py` | and `fleetd/a.py` |\n"
            "## Rules\n| `fleetd/c.py` |\n"
        ),
    }
    rows = structure.rows(sources)
    assert rows["files at the top of fleetd"] == 2
    assert rows["files at the top of fleetd/engine"] == 1
    assert rows["structs that describe a model"] == 1
    assert rows["coroutines awaited for each token in the pipeline"] == 1
    assert rows["files that name the sampling parameter min_p"] == 1
    assert rows["Add a dialect: files"] == 2
    assert "Rules: files" not in rows
    assert rows["lines of tests"] == 1
    # Six lines of Described, three of Nested, four of the steps.
    assert rows["lines of fleetd that are code"] == 6 + 3 + 4
    assert rows["lines of fleetd"] == sum(rows[name] for name in rows if name.startswith("  lines"))
