"""The result of a check of `fleetctl doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: what was found and, unless it is good, how to fix it."""

    name: str
    level: Level
    what: str
    fix: str = ""


def ok(name: str, what: str) -> Finding:
    return Finding(name, "ok", what)


def warn(name: str, what: str, fix: str) -> Finding:
    return Finding(name, "warn", what, fix)


def fail(name: str, what: str, fix: str) -> Finding:
    return Finding(name, "fail", what, fix)
