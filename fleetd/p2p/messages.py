"""How messages of other machines are read: bounded before they are decoded, then checked. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from fleetd.errors import ProtocolError

# What msgspec raises for bytes that are no message, for one nested too deep, and for text that is none.
_BROKEN = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


def reader(kind: Any, what: str, most_bytes: int | None = None) -> Callable[[bytes], Any]:
    """A function that reads messages of a kind (a struct, or a union of them). It raises ProtocolError.

    ``what`` names the message in sentences; a session bounds those that have no bound of their own.
    """
    decode = msgspec.msgpack.Decoder(kind).decode

    def read(body: bytes) -> Any:
        if most_bytes is not None and len(body) > most_bytes:
            raise ProtocolError(f"{what} of {len(body)} bytes is over the limit of {most_bytes}.")
        try:
            return decode(body)
        except _BROKEN as error:
            raise ProtocolError(f"{what} cannot be read: {error}.") from None

    return read
