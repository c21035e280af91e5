"""The roster on disk: always one whole version of it, and never silently none.

    fleetd roster 1 | SHA-256 of the rest | MessagePack list of records

A roster that cannot be read is an error that names the file: starting with an empty one would unpair the
machine from everybody, and saving that would make it final.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fleetd import limits
from fleetd.errors import RosterRefused
from fleetd.home import durable
from fleetd.p2p.membership.roster_record import RosterRecord

_MAGIC = b"fleetd roster 1\n"
_HASH_BYTES = 32
_decode = msgspec.msgpack.Decoder(list[RosterRecord]).decode


class RosterFile:
    """Both methods block. One process at a time has the file: the one that owns the home."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> tuple[RosterRecord, ...]:
        """The records saved last; none if nothing was ever saved.

        Raises:
            RosterRefused: the file is damaged; it is left as it is.
            Forbidden, ConfigError: it is not this user's, or cannot be read.
        """
        durable.sweep(self._path)
        written = durable.read(self._path, limits.ROSTER_FILE_BYTES)
        if written is None:
            return ()
        if len(written) > limits.ROSTER_FILE_BYTES:
            raise self._damaged(f"it is larger than {limits.ROSTER_FILE_BYTES} bytes")
        if not written.startswith(_MAGIC):
            raise self._damaged("it does not begin as a roster does")
        checksum, body = written[len(_MAGIC) :][:_HASH_BYTES], written[len(_MAGIC) + _HASH_BYTES :]
        if hashlib.sha256(body).digest() != checksum:
            raise self._damaged("its checksum is wrong")
        try:
            return tuple(_decode(body))
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise self._damaged(str(error)) from None

    def save(self, records: Sequence[RosterRecord]) -> None:
        """On the disk when this returns. Raises DiskFull or ConfigError, and keeps the old version."""
        body = msgspec.msgpack.encode(records)
        durable.replace(self._path, _MAGIC + hashlib.sha256(body).digest() + body)

    def _damaged(self, reason: str) -> RosterRefused:
        return RosterRefused(
            f"The list of paired machines, {self._path}, is damaged: {reason}.",
            hint="Restore it from a backup; or delete it, and pair this machine again.",
        )
