"""Which weights a drafter's repository had when it was pulled here the last time.

The catalog has no digests of drafters that others publish, so the first pull is believed. If the hub then
lists other weights under the same name, the next pull says so once: who pulls it again wants the new ones.

MODELS/.pulled/FOLDER.json    the commit, and the SHA-256 of each file of weights by its name; outlives the
                              model
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fleetd import limits
from fleetd.errors import ModelRefused
from fleetd.models.hub_parts import RemoteFile
from fleetd.models.weights import WEIGHTS_PATTERN
from fleetd.storage import durable
from fleetd.text.bounded import UNREADABLE
from fleetd.text.decoding import from_json

_FOLDER = ".pulled"


class PulledWeights(msgspec.Struct, frozen=True):
    """A repository's weights as the hub listed them."""

    commit: str
    # In hex, by the file's name; files that the hub gives no SHA-256 of are left out.
    sha256: dict[str, str]

    @classmethod
    def listed(cls, commit: str, files: Sequence[RemoteFile]) -> PulledWeights:
        return cls(
            commit,
            {
                file.name: file.sha256
                for file in files
                if file.sha256 is not None and fnmatch.fnmatchcase(file.name, WEIGHTS_PATTERN)
            },
        )


def keep(models_dir: Path, folder: str, pulled: PulledWeights) -> None:
    """Note what was pulled into ``folder``. Raises DiskFull, ConfigError."""
    place = _place(models_dir, folder)
    place.parent.mkdir(mode=0o700, exist_ok=True)
    durable.replace(place, msgspec.json.encode(pulled))


def refuse_changed(models_dir: Path, folder: str, hub_id: str, listed: PulledWeights) -> None:
    """Raises ModelRefused if other weights were pulled into ``folder`` before, and forgets those."""
    place = _place(models_dir, folder)
    before = _read(place)
    if before is None:
        return
    for name, sha256 in listed.sha256.items():
        if before.sha256.get(name, sha256) != sha256:
            place.unlink(missing_ok=True)
            raise ModelRefused(
                f"{name} of {hub_id} has the SHA-256 {sha256[:12]}… at commit {listed.commit[:12]}. "
                f"When it was pulled here before, at commit {before.commit[:12]}, "
                f"it had {before.sha256[name][:12]}….",
                hint="Its publisher has changed it. If you want the new one, pull it again.",
            )


def _read(place: Path) -> PulledWeights | None:
    """None if nothing was noted, or it is damaged: then the next pull is a first one. Raises Forbidden,
    ConfigError."""
    data = durable.read(place, limits.PULLED_DRAFTER_BYTES)
    try:
        return None if data is None else from_json(data, PulledWeights)
    except UNREADABLE:
        return None


def _place(models_dir: Path, folder: str) -> Path:
    return models_dir / _FOLDER / f"{folder}.json"
