"""What a machine keeps on disk about its fleet: the roster, and the addresses where members were reached.

    roster           fleetd roster 1 | SHA-256 of the rest | MessagePack list of records
    addresses.json   node id → [[host, port], ...]

A write replaces the whole file, so a reader sees the old version or the new one. A damaged roster is an error
that names the file: starting with an empty roster would unpair the machine from every other, and saving the
empty one would make that permanent. Addresses are hints, so a damaged address file counts as an empty one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.errors import FleetError, RosterRefused
from fleetd.p2p.membership.roster_record import RosterRecord
from fleetd.storage import durable
from fleetd.text.decoding import json_decoder, msgpack_decoder

_MAGIC = b"fleetd roster 1\n"
_HASH_BYTES = 32
_decode = msgpack_decoder(list[RosterRecord]).decode

_Host = Annotated[str, Meta(max_length=limits.PEER_NAME_CHARS)]
_Port = Annotated[int, Meta(ge=1, le=65535)]
_Addresses = Annotated[list[tuple[_Host, _Port]], Meta(max_length=limits.ADDRESSES_PER_PEER)]
_decode_addresses = json_decoder(
    Annotated[dict[str, _Addresses], Meta(max_length=limits.ROSTER_MEMBERS)]
).decode


class RosterFile:
    """Both methods block. Only the process that owns the home uses the file."""

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
        """Replace the file; the new version is durable on return. Raises DiskFull or ConfigError, and keeps
        the old version."""
        body = msgspec.msgpack.encode(records)
        durable.replace(self._path, _MAGIC + hashlib.sha256(body).digest() + body)

    def _damaged(self, reason: str) -> RosterRefused:
        return RosterRefused(
            f"The list of paired machines, {self._path}, is damaged: {reason}.",
            hint="Restore it from a backup; or delete it, and pair this machine again.",
        )


class AddressFile:
    """The address file. Both methods block."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> dict[str, list[tuple[str, int]]]:
        """Addresses by node id; empty for a file that is missing or damaged."""
        try:
            written = durable.read(self._path, limits.ADDRESS_FILE_BYTES)
            found: dict[str, list[tuple[str, int]]] = _decode_addresses(written or b"{}")
        except (FleetError, msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return {}
        return found

    def save(self, found: Mapping[str, list[tuple[str, int]]]) -> None:
        """Replace the file. Raises DiskFull or ConfigError."""
        durable.replace(self._path, msgspec.json.format(msgspec.json.encode(found), indent=1))
