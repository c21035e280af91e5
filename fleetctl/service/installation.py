"""Whether a service could start with this installation, and would go on doing so: where its files lie.

macOS keeps background programs out of a person's own folders and disks, and Homebrew deletes the folder of a
version when it installs the next one.
"""

from __future__ import annotations

import os
import plistlib
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.parsers.expat import ExpatError

# Folders of a home that macOS opens to a background program only with its user's consent.
_PRIVATE = ("Documents", "Desktop", "Downloads", "Library/Mobile Documents")
# Homebrew: .../Cellar/NAME/VERSION/... , and .../opt/NAME/..., which is the newest version.
_CELLAR = re.compile(r"(?P<brew>/.*)/Cellar/(?P<name>[^/]+)/(?P<version>[^/]+)(?P<rest>/.*)?")
_LINKS = 40


@dataclass(frozen=True, slots=True)
class Trouble:
    """``stops``: the service cannot start; otherwise something else may fail, or will one day."""

    what: str
    fix: str
    stops: bool = False


def troubles(program: Path, models: Mapping[str, Path], platform: str, user_home: Path) -> list[Trouble]:
    """What is wrong with running ``program`` in the background.

    Args:
        models: where its models and its home lie, by what they are called.
        user_home: of the user that it runs as.
    """
    parts = [program, *links(python)] if (python := interpreter(program)) is not None else [program]
    gone = next((part for part in parts if not os.path.lexists(part)), None)
    if gone is not None:
        why = f"{program} needs {gone}, which is gone; an update of Python may have moved it."
        return [Trouble(why, "Install fleetd again, then run `fleetctl service install`.", stops=True)]
    found = []
    if (cellar := next((part for part in parts if _CELLAR.fullmatch(str(part))), None)) is not None:
        found.append(
            Trouble(
                f"{program} needs {cellar}, which Homebrew deletes with its next update of it.",
                f"Make the environment with {stable(cellar)}, or install fleetd with `uv tool install`.",
            )
        )
    if platform == "darwin":
        named = {**{f"the program {part}": part for part in parts}, **models}
        for name, path in named.items():
            if where := withheld(path, user_home):
                fix = "Move it to another folder, or give it Full Disk Access in System Settings, Privacy."
                what = f"{name} is {where}, which macOS keeps from programs in the background."
                found.append(Trouble(what[0].upper() + what[1:], fix, stops=path in parts))
    return found


def withheld(path: Path, user_home: Path) -> str:
    """Where a path lies that macOS keeps from background programs, in a few words; "" for other places."""
    volumes = Path("/Volumes")
    for place in (path, path.resolve()):
        for name in _PRIVATE:
            if place.is_relative_to(user_home / name) or place.is_relative_to((user_home / name).resolve()):
                return f"in {user_home / name}"
        # The disk that the system started from has a link there.
        if place.is_relative_to(volumes) and place != volumes and place.resolve().is_relative_to(volumes):
            return f"on the disk {volumes / place.relative_to(volumes).parts[0]}"
    return ""


def stable(path: Path) -> Path:
    """The name under which Homebrew keeps a file through updates; ``path`` itself if there is none."""
    if (found := _CELLAR.fullmatch(str(path))) is None:
        return path
    lasting = Path(found["brew"]) / "opt" / found["name"] / (found["rest"] or "").lstrip("/")
    return lasting if lasting.exists() else path


def interpreter(program: Path) -> Path | None:
    """The Python that a script names in its first lines; None for another program."""
    try:
        with program.open("rb") as file:
            lines = file.read(4096).splitlines()[:2]
    except OSError:
        return None
    if not lines or not lines[0].startswith(b"#!"):
        return None
    if lines[0] == b"#!/bin/sh" and len(lines) > 1 and lines[1].startswith(b"'''exec' "):
        # How pip writes it if the path is long or has spaces.
        return Path(shlex.split(os.fsdecode(lines[1].removeprefix(b"'''exec' ")))[0])
    words = shlex.split(os.fsdecode(lines[0][2:]))
    return Path(words[0]) if words else None


def links(path: Path) -> Iterator[Path]:
    """A path, and what each of its links leads to; the last may be missing."""
    for _ in range(_LINKS):
        yield path
        if not path.is_symlink():
            return
        path = Path(os.path.normpath(path.parent / path.readlink()))


def started_by(file: Path) -> Path | None:
    """The program that a service file of launchd or systemd starts; None if it names none."""
    try:
        content = file.read_bytes()
        if file.suffix == ".plist":
            return Path(plistlib.loads(content)["ProgramArguments"][0])
        found = re.search(r"^ExecStart=(.+)$", content.decode(), re.MULTILINE)
        return Path(shlex.split(found[1])[0].replace("%%", "%")) if found is not None else None
    except (OSError, ValueError, LookupError, ExpatError, plistlib.InvalidFileException):
        return None
