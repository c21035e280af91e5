"""Models that stay loaded because somebody said so: their names, in one file of the home folder."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec

from fleetd import limits
from fleetd.errors import InvalidValue
from fleetd.process.observe import get_logger
from fleetd.storage import durable

log = get_logger("fleetd.models")


class PinnedModels:
    """``pin`` and ``unpin`` block until the file is on the disk; ``names`` never does."""

    def __init__(self, path: Path) -> None:
        """A file that cannot be read or understood is told in the log; nothing is pinned then.

        Raises Forbidden or ConfigError where it is not this user's file.
        """
        self._path = path
        self._writing = threading.Lock()
        self._names = frozenset(self._read())

    @property
    def names(self) -> frozenset[str]:
        return self._names

    def pin(self, name: str) -> None:
        """Raises InvalidValue for too many, DiskFull or ConfigError where it cannot be kept."""
        with self._writing:
            self._keep(self._names | {name})

    def unpin(self, name: str) -> None:
        """Nothing happens to one that is not pinned. Raises as ``pin``."""
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
            return msgspec.json.decode(data, type=list[str])[: limits.PINNED_MODELS]
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("pinned.unreadable", file=str(self._path), error=str(error))
            return []
