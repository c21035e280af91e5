"""What was found out about a model on this machine, kept on the disk: not to be found out at every load.

One small file for each finding, in the home's cache folder. It says what the finding rests on; where any of
that is other now, or the file is damaged, there is none, and it is found out again. A disk that does not take
it costs the next load just that.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from fleetd import limits
from fleetd.errors import FleetError
from fleetd.home import durable

T = TypeVar("T")


class _StoredResult(msgspec.Struct, frozen=True):
    basis: msgspec.Raw
    found: msgspec.Raw


class _File(msgspec.Struct, frozen=True):
    """``sha256``: of ``kept`` as it is written; a flipped bit must not make another finding."""

    sha256: str
    kept: msgspec.Raw


class CachedResult(Generic[T]):
    """``basis``: what it rests on; equal where finding it out again would find the same.

    ``kind``: T, with its bounds. Without a ``file`` it is kept nowhere.
    """

    def __init__(self, file: Path | None, basis: msgspec.Struct, kind: type[T]) -> None:
        self._file = file
        self._basis = msgspec.json.encode(basis, order="sorted")
        self._kind = kind

    def find(self) -> T | None:
        """None where it has to be found out."""
        if self._file is None:
            return None
        try:
            raw = durable.read(self._file, limits.FINDING_BYTES)
            if raw is None or len(raw) > limits.FINDING_BYTES:
                return None
            file = msgspec.json.decode(raw, type=_File)
            if hashlib.sha256(file.kept).hexdigest() != file.sha256:
                return None
            kept = msgspec.json.decode(file.kept, type=_StoredResult)
            if bytes(kept.basis) != self._basis:
                return None
            return msgspec.json.decode(kept.found, type=self._kind)
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
