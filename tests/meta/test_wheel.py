"""The wheel that users would get: complete, and nothing beside it; built as a release is, from the sdist."""

from __future__ import annotations

import email
import importlib.util
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

REPO = Path(__file__).parents[2]
VERSION_FILE = REPO / "fleetd" / "_version.py"


@dataclass
class Built:
    """The files of the wheel and of the sdist, and what the wheel says of itself."""

    sdist: Path
    names: set[str] = field(default_factory=set)
    sources: set[str] = field(default_factory=set)
    metadata: Message = field(default_factory=Message)
    version_file: str = ""
    dates: set[Any] = field(default_factory=set)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    out = tmp_path_factory.mktemp("dist")
    before = VERSION_FILE.stat().st_mtime_ns
    # Without isolation: the backend is among the development tools, and nothing is downloaded.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(REPO)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert VERSION_FILE.stat().st_mtime_ns == before, "a build must not change what runs from this tree"
    (wheel,), (sdist,) = out.glob("fleetd-*.whl"), out.glob("fleetd-*.tar.gz")
    found = Built(sdist)
    with zipfile.ZipFile(wheel) as archive:
        found.names = set(archive.namelist())
        found.dates = {info.date_time for info in archive.infolist()}
        found.version_file = archive.read("fleetd/_version.py").decode()
        (about,) = [name for name in found.names if name.endswith(".dist-info/METADATA")]
        found.metadata = email.message_from_bytes(archive.read(about))
    with tarfile.open(sdist) as archive:
        found.sources = {name.partition("/")[2] for name in archive.getnames()}
    return found


def test_the_wheel_holds_every_file_of_the_packages(built: Built) -> None:
    sources = {
        str(path.relative_to(REPO))
        for package in ("fleetd", "fleetctl")
        for path in (REPO / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    inside = {name for name in built.names if name.startswith(("fleetd/", "fleetctl/"))}
    assert {name for name in inside if not name.startswith("fleetctl/templates/")} == sources
    data = {"engine/scoring/shipped_profiles.json", "compression/gate_signs.txt", "models/catalog.toml"}
    assert {f"fleetd/{name}" for name in data} <= inside


def test_the_wheel_holds_the_service_files_and_the_licence(built: Built) -> None:
    for folder in ("systemd", "launchd"):
        for path in (REPO / folder).iterdir():
            assert f"fleetctl/templates/{folder}/{path.name}" in built.names
    assert any(name.endswith("/licenses/LICENSE") for name in built.names)


def test_the_wheel_holds_no_tests_models_or_caches(built: Built) -> None:
    tops = {name.partition("/")[0] for name in built.names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"fleetd", "fleetctl"}
    assert not [n for n in built.names if "__pycache__" in n or n.endswith((".gguf", ".safetensors"))]


def test_the_sdist_can_be_developed_from(built: Built) -> None:
    needed = {"Makefile", "Dockerfile", ".dockerignore", "pyproject.toml", "uv.lock"}
    needed |= {"demo/run.py", ".ci/run", "tests/conftest.py"}
    assert needed <= built.sources
    assert not [name for name in built.sources if name.startswith((".venv", ".cache", "dist"))]


def test_the_wheel_says_the_version_of_its_tree(built: Built) -> None:
    version = built.metadata["Version"]
    assert f'__version__ = "{version}"' in built.version_file
    assert version in built.sdist.name


def test_no_time_of_the_build_is_in_the_wheel(built: Built) -> None:
    assert len(built.dates) == 1


@pytest.mark.parametrize(
    ("system", "machine", "extra", "expected"),
    [
        ("darwin", "arm64", "", ["mlx"]),
        ("linux", "x86_64", "", ["mkl", "mlx[cpu]"]),
        ("linux", "aarch64", "", ["mlx[cpu]"]),
        ("linux", "x86_64", "cuda", ["mkl", "mlx[cpu]", "mlx[cuda13]"]),
        ("linux", "aarch64", "cuda", ["mlx[cpu]", "mlx[cuda13]"]),
        # MLX has no build for it.
        ("darwin", "x86_64", "", []),
    ],
)
def test_markers_alone_choose_the_build_of_mlx(
    built: Built, system: str, machine: str, extra: str, expected: list[str]
) -> None:
    environment = {"sys_platform": system, "platform_machine": machine}
    wanted = set()
    for line in built.metadata.get_all("Requires-Dist", []):
        needed = Requirement(line)
        given = any(
            needed.marker is None or needed.marker.evaluate({**environment, "extra": name})
            for name in {"", extra}
        )
        if given and needed.name in ("mlx", "mkl"):
            wanted.add(needed.name + "".join(f"[{name}]" for name in sorted(needed.extras)))
    assert sorted(wanted) == expected


def test_the_formula_is_of_that_sdist(built: Built) -> None:
    file = REPO / "packaging" / "homebrew" / "formula.py"
    spec = importlib.util.spec_from_file_location("formula", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.formula(module.TEMPLATE.read_text(encoding="utf-8"), built.sdist, "https://example.org")
    assert text.startswith("class Fleetd < Formula")
    assert built.sdist.name in text
    assert "@" not in text.replace("python@3.13", "").replace('"$@"', "")
