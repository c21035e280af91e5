"""docs/platforms.md lists every module that knows one system from another, and names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

REPO = Path(__file__).parents[2]
PAGE = (REPO / "docs" / "platforms.md").read_text(encoding="utf-8")
# What a module asks for, or calls, where systems differ.
DIFFERS = re.compile(r"\bsys\.platform\b|\bfcntl\b.*\bF_[A-Z]+|^import ctypes\b", re.MULTILINE)


def test_every_module_that_knows_a_platform_has_a_row() -> None:
    modules = [path for package in ("fleetd", "fleetctl") for path in (REPO / package).rglob("*.py")]
    knowing = {
        str(path.relative_to(REPO)) for path in modules if DIFFERS.search(path.read_text(encoding="utf-8"))
    }
    assert len(knowing) > 15
    assert {name for name in knowing if f"`{name}`" not in PAGE} == set()


def test_every_file_that_a_row_names_is_there() -> None:
    named = set(re.findall(r"`((?:fleetd|fleetctl|tests|systemd|launchd)/[a-z0-9_./-]+\.[a-z]+)`", PAGE))
    assert len(named) > 60
    assert {name for name in named if not (REPO / name).exists()} == set()
