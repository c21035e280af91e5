"""The wheel that users would get: complete, and nothing beside it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The files inside a wheel built from this tree."""
    out = tmp_path_factory.mktemp("wheel")
    # Without isolation: the backend is among the development tools, and nothing is downloaded.
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(REPO)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("fleetd-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_every_module(names: set[str]) -> None:
    sources = {
        str(path.relative_to(REPO))
        for package in ("fleetd", "fleetctl")
        for path in (REPO / package).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    assert {name for name in names if name.endswith((".py", "py.typed"))} == sources


def test_the_wheel_holds_the_service_files_and_the_licence(names: set[str]) -> None:
    for folder in ("systemd", "launchd"):
        for path in (REPO / folder).iterdir():
            assert f"fleetctl/templates/{folder}/{path.name}" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_the_wheel_holds_no_tests_models_or_caches(names: set[str]) -> None:
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"fleetd", "fleetctl"}
    assert not [name for name in names if "__pycache__" in name or name.endswith((".gguf", ".safetensors"))]
