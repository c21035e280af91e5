"""The Makefile under make 3.81, which Apple ships: what a pipe hides must not count as done."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fleetd.process.supported import unsupported

MAKE = shutil.which("make") or "make"
REPO = Path(__file__).parents[2]
# Stands for every Python: its pip fails as it does without a network.
PYTHON = """#!/bin/sh
case "$*" in *"pip install"*) echo "Downloading wheel-1.2-py3-none-any.whl (3.1 MB)"; exit 3;; esac
exec {python} "$@"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "fleetd/process/supported.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, tmp_path / name)
    return tmp_path


def python(path: Path, script: str = PYTHON) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script.format(python=sys.executable))
    path.chmod(0o755)


def make(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """With the shell's options of make 3.81, whatever this make could do."""
    return subprocess.run(
        [MAKE, ".SHELLFLAGS=-c", "EXTRA=cpu", *arguments],
        cwd=checkout,
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": f"{checkout / 'bin'}:{os.environ['PATH']}"},
        check=False,
    )


@pytest.mark.parametrize("stamp", [".venv/.run-cpu", ".venv/.dev-cpu"])
def test_an_installation_that_failed_is_not_marked_as_done(checkout: Path, stamp: str) -> None:
    python(checkout / ".venv/bin/python")
    done = make(checkout, stamp)
    assert done.returncode == 2
    assert "wheel 1.2 (3.1 MB)" in done.stdout
    assert not (checkout / stamp).exists()


def test_an_environment_that_failed_is_not_marked_as_done(checkout: Path) -> None:
    python(
        checkout / "bin/python3",
        PYTHON.replace("{python}", "mkdir -p .venv/bin; cp $0 .venv/bin/python; true"),
    )
    done = make(checkout, ".venv/bin/python", f"PYTHON={checkout}/bin/python3")
    assert done.returncode == 2, done.stdout + done.stderr
    assert not (checkout / ".venv/bin/python").exists()


# An Intel Mac, as Python's platform module tells of one.
INTEL = """
import platform, runpy, sys
platform.system, platform.machine = lambda: "Darwin", lambda: "x86_64"
"""


def test_an_intel_mac_is_told_before_anything_is_installed(checkout: Path) -> None:
    (checkout / "intel.py").write_text(f"{INTEL}\nrunpy.run_path(sys.argv[1], run_name='__main__')\n")
    python(checkout / "bin/python3", f'#!/bin/sh\nexec {sys.executable} {checkout}/intel.py "$@"\n')
    done = make(checkout, "demo", f"PYTHON={checkout}/bin/python3")
    assert done.returncode == 2
    assert "Intel processor" in done.stderr
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    ("sysctl", "words"), [("exit 1", "Intel processor"), ("echo 1", "built for Intel Macs")]
)
def test_an_installed_fleetd_says_so_too(tmp_path: Path, sysctl: str, words: str) -> None:
    """The second one: a Python for Intel on an Apple chip, as sysctl.proc_translated tells."""
    python(tmp_path / "sysctl", f"#!/bin/sh\n{sysctl}\n")
    told = (
        f"{INTEL}\nfrom fleetd.cli import main\nsys.argv[1:] = ['run', '--home', '{tmp_path}/home']\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", told],
        capture_output=True,
        text=True,
        cwd=REPO,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr
    assert not (tmp_path / "home").exists()


def test_which_machines_have_no_build() -> None:
    assert unsupported("Darwin", "arm64") == unsupported("Linux", "x86_64") == ("", "")
    assert "Intel processor" in unsupported("Darwin", "x86_64")[0]
    what, fix = unsupported("Darwin", "x86_64", translated=True)
    assert "This Python was built for Intel" in what
    assert "Apple silicon" in fix
