"""Results about a model that cost time to find out, stored on the disk for the next load.

One small file for each result, in the home's cache folder. It names the facts that the result depends on; if
one of them has changed, or the file is damaged, the result is found out again. If the disk refuses it, only
the next load pays for that.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from fleetd import limits
from fleetd.errors import FleetError
from fleetd.storage import durable
from fleetd.text.decoding import from_json

T = TypeVar("T")


class _StoredResult(msgspec.Struct, frozen=True):
    basis: msgspec.Raw
    found: msgspec.Raw


class _File(msgspec.Struct, frozen=True):
    """``sha256``: of ``kept`` as it is written; a flipped bit must not change a result."""

    sha256: str
    kept: msgspec.Raw


class CachedResult(Generic[T]):
    """``basis``: the facts it depends on; equal if finding it out again would give the same.

    ``kind``: the type of the result, with its bounds. A file of over ``most_bytes`` is not read. Without a
    ``file`` nothing is stored.
    """

    def __init__(
        self,
        file: Path | None,
        basis: msgspec.Struct,
        kind: type[T],
        most_bytes: int = limits.FINDING_BYTES,
    ) -> None:
        self._file = file
        self._most_bytes = most_bytes
        self._basis = msgspec.json.encode(basis, order="sorted")
        self._kind = kind

    def find(self) -> T | None:
        """None if it has to be found out."""
        if self._file is None:
            return None
        try:
            raw = durable.read(self._file, self._most_bytes)
            if raw is None or len(raw) > self._most_bytes:
                return None
            file = from_json(raw, _File)
            if hashlib.sha256(file.kept).hexdigest() != file.sha256:
                return None
            kept = from_json(file.kept, _StoredResult)
            if bytes(kept.basis) != self._basis:
                return None
            return from_json(kept.found, self._kind)
        except (FleetError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    def keep(self, found: T) -> None:
        if self._file is None:
            return
        kept = msgspec.json.encode(
            _StoredResult(msgspec.Raw(self._basis), msgspec.Raw(msgspec.json.encode(found)))
        )
        file = _File(hashlib.sha256(kept).hexdigest(), msgspec.Raw(kept))
        with suppress(FleetError):
            durable.private_folder(self._file.parent)
            durable.replace(self._file, msgspec.json.encode(file))
