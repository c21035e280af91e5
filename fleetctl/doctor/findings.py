"""What a check of `fleetctl doctor` says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what is so, and what to do about it where it is not well."""

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
