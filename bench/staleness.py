"""How old figures are: the commits since then that touched what it measures."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.figures import Result

_COMMIT = re.compile(r"\bcommit ([0-9a-f]{7,40})\b")


def measured_at(machine: Sequence[str]) -> str:
    """The commit that is named beside the machine of a measurement; "" if none was kept."""
    found = next(filter(None, map(_COMMIT.search, machine)), None)
    return found.group(1) if found else ""


def since(root: Path, commit: str, paths: Sequence[str]) -> int | None:
    """How many commits after ``commit`` touch ``paths``, git's pathspecs from ``root`` on; a change that is
    not committed counts as one more. None where the history does not have ``commit``.
    """
    if not commit or _git(root, "merge-base", "--is-ancestor", commit, "HEAD") is None:
        return None
    later = _git(root, "rev-list", "--count", "--no-merges", f"{commit}..HEAD", "--", *paths)
    changed = _git(root, "status", "--porcelain", "--", *paths)
    return None if later is None else int(later) + bool(changed)


def version(root: Path, paths: Sequence[str]) -> str:
    """The last commit that touched ``paths``; "" if there is none, or a change that is not committed."""
    if _git(root, "status", "--porcelain", "--", *paths):
        return ""
    return _git(root, "log", "-1", "--format=%h", "--", *paths) or ""


def ages(
    root: Path, paths: Mapping[str, Sequence[str]], results: Mapping[str, Result]
) -> dict[str, int | None]:
    """``since`` of every family that has a result."""
    return {
        name: since(root, measured_at(results[name].machine), measures)
        for name, measures in paths.items()
        if name in results
    }


def said(commits: int | None) -> str:
    """What the page says beside a family's table."""
    match commits:
        case None:
            return "How old this is cannot be told: its commit is not in this history."
        case 0:
            return "No later commit touched what it measures."
        case 1:
            return "**One later commit touched what it measures.**"
        case more:
            return f"**{more} later commits touched what it measures.**"


def briefly(commits: int | None) -> str:
    """The same beside a date."""
    return "of unknown age" if commits is None else f"{commits} later" if commits else "current"


def lines(families: Sequence[str], known: Mapping[str, int | None]) -> Iterator[str]:
    """For a terminal: the families that are older than the code, or have no figures at all."""
    width = max(map(len, families))
    for name in families:
        if name not in known:
            yield f"{name:<{width}}  not measured yet"
        elif known[name] != 0:
            yield f"{name:<{width}}  {said(known[name]).strip('*')}"


def _git(root: Path, *args: str) -> str | None:
    """What git prints; None if it fails, or is not there."""
    try:
        done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, check=False)  # noqa: S607
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
