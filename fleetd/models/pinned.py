"""Models that a user has told to stay loaded: their names, in one file of the home folder."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec

from fleetd import limits
from fleetd.errors import InvalidValue
from fleetd.process.observe import get_logger
from fleetd.storage import durable
from fleetd.text.decoding import from_json

log = get_logger("fleetd.models")


class PinnedModels:
    """The names. ``pin`` and ``unpin`` block until the file is on the disk; ``names`` never blocks."""

    def __init__(self, path: Path) -> None:
        """Read the names. If the file cannot be decoded, the log says so and nothing is pinned.

        Raises Forbidden or ConfigError if it is not this user's file.
        """
        self._path = path
        self._writing = threading.Lock()
        self._names = frozenset(self._read())

    @property
    def names(self) -> frozenset[str]:
        return self._names

    def pin(self, name: str) -> None:
        """Add a name. Raises InvalidValue for too many names; DiskFull or ConfigError if writing fails."""
        with self._writing:
            self._keep(self._names | {name})

    def unpin(self, name: str) -> None:
        """Take a name out, if it is there. Raises as ``pin``."""
        with self._writing:
            if name in self._names:
                self._keep(self._names - {name})

    def _keep(self, names: frozenset[str]) -> None:
        if len(names) > limits.PINNED_MODELS:
            raise InvalidValue(f"{limits.PINNED_MODELS} models are pinned already.", param="model")
        durable.replace(self._path, msgspec.json.encode(sorted(names)))
        self._names = names

    def _read(self) -> list[str]:
        data = durable.read(self._path, limits.PINNED_MODELS_BYTES) or b"[]"
        try:
            return from_json(data, list[str])[: limits.PINNED_MODELS]
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("pinned.unreadable", file=str(self._path), error=str(error))
            return []
