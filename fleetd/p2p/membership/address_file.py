"""Where members were reached last, kept for the next start: hints, so a lost file costs a second or two."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.errors import FleetError
from fleetd.home import durable

Address = tuple[Annotated[str, Meta(max_length=limits.PEER_NAME_CHARS)], Annotated[int, Meta(ge=1, le=65535)]]
_List = Annotated[list[Address], Meta(max_length=limits.ADDRESSES_PER_PEER)]
_decode = msgspec.json.Decoder(Annotated[dict[str, _List], Meta(max_length=limits.ROSTER_MEMBERS)]).decode


class AddressFile:
    """Both methods block."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> dict[str, list[tuple[str, int]]]:
        try:
            written = durable.read(self._path, limits.ADDRESS_FILE_BYTES)
            found: dict[str, list[tuple[str, int]]] = _decode(written or b"{}")
        except (FleetError, msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return {}
        return found

    def save(self, found: Mapping[str, list[tuple[str, int]]]) -> None:
        """Raises DiskFull or ConfigError."""
        durable.replace(self._path, msgspec.json.format(msgspec.json.encode(found), indent=1))
