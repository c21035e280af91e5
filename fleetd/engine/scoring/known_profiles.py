"""Scoring profiles that need no search: those that are shipped with fleetd, and those that were kept here.

    digest ──► shipped_profiles.json of this package ──► the home's cache folder ──► None: to be searched

Neither imports MLX, so the daemon knows before it loads a model whether that model can score at once.
``python -m eval.profile`` writes the shipped ones.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.engine.protocol import Profile
from fleetd.storage.cached_results import CachedResult
from fleetd.text.bounded import Natural, Share
from fleetd.text.decoding import from_json

SHIPPED = "shipped_profiles.json"
# Goes up with whatever makes another profile of the same model.
ALGORITHM = 3
# About how many tokens a search computes, over the layers that it tries.
SEARCH_TOKENS = 6000
DEVICES = ("cpu", "metal", "cuda")
# Libraries whose versions decide what attention computes, and which tokens.
_LIBRARIES = ("mlx", "mlx-lm", "transformers")
_FOLDER = "profiles"


class StoredProfile(msgspec.Struct, frozen=True):
    """A ``Profile`` as it is stored; without heads if the model finds too little for scoring."""

    heads: Annotated[list[tuple[Natural, Natural]], Meta(max_length=limits.SCORE_HEADS)]
    exit_layer: Natural
    layers: Natural
    recall: Share = 0.0

    @classmethod
    def of(cls, found: Profile) -> StoredProfile:
        return cls(found.heads, found.exit_layer, found.layers, found.recall)

    @property
    def profile(self) -> Profile:
        return Profile(self.heads, self.exit_layer, self.layers, self.recall)


class ShippedProfile(msgspec.Struct, frozen=True):
    """``model`` is for people; ``digest`` decides."""

    model: str
    digest: str
    found: StoredProfile


class ShippedProfiles(msgspec.Struct, frozen=True):
    """The file: what was found by this version of the search."""

    algorithm: int
    profiles: list[ShippedProfile]


class ProfileKey(msgspec.Struct, frozen=True):
    """What decides a profile: equal if another search would find the same.

    ``digest`` is the model's; "" if it is unknown, and then nothing is known or stored.
    """

    digest: str
    device: str
    versions: dict[str, str]
    algorithm: int = ALGORITHM


class ProfileStore(msgspec.Struct, frozen=True):
    """The profiles that this machine knows. ``folder``: for those that it found; None stores nothing."""

    folder: Path | None = None

    @classmethod
    def in_home(cls, cache_folder: Path) -> ProfileStore:
        """``cache_folder``: the home's, for what can be found out again."""
        return cls(cache_folder / _FOLDER)

    def find(self, digest: str, device: str = "") -> Profile | None:
        """The profile of a model, as found on this kind of device; "" is any. None if it is not known.

        It has no heads if the model cannot score. Reads files.
        """
        if not digest:
            return None
        if (known := _shipped().get(digest)) is not None:
            return known
        for kind in [device] if device else DEVICES:
            if (found := self._kept(digest, kind).find()) is not None:
                return found.profile
        return None

    def keep(self, digest: str, device: str, profile: Profile) -> None:
        if digest:
            self._kept(digest, device).keep(StoredProfile.of(profile))

    def _kept(self, digest: str, device: str) -> CachedResult[StoredProfile]:
        file = None if self.folder is None else self.folder / f"{digest[:32]}-{device}.json"
        return CachedResult(file, ProfileKey(digest, device, _versions()), StoredProfile)


@cache
def _versions() -> dict[str, str]:
    # Imported late: with zip files and mail headers it is half a megabyte, and a daemon may never score.
    from importlib.metadata import version

    return {name: version(name) for name in _LIBRARIES}


@cache
def _shipped() -> dict[str, Profile]:
    """Shipped profiles by digest; none if the search has changed since they were made."""
    raw = resources.files(__package__).joinpath(SHIPPED).read_bytes()
    file = from_json(raw, ShippedProfiles)
    return {each.digest: each.found.profile for each in file.profiles} if file.algorithm == ALGORITHM else {}
