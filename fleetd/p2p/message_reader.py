"""Readers for the messages of other machines: they check the size, decode, and check the values. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fleetd.errors import ProtocolError
from fleetd.text.bounded import UNREADABLE
from fleetd.text.decoding import msgpack_decoder


def reader(kind: Any, what: str, most_bytes: int | None = None) -> Callable[[bytes], Any]:
    """A function that decodes messages of a kind (a struct, or a union of structs). It raises ProtocolError.

    ``what`` names the message in errors. Without ``most_bytes`` only the session bounds its size.
    """
    decode = msgpack_decoder(kind).decode

    def read(body: bytes) -> Any:
        if most_bytes is not None and len(body) > most_bytes:
            raise ProtocolError(f"{what} of {len(body)} bytes is over the limit of {most_bytes}.")
        try:
            return decode(body)
        except UNREADABLE as error:
            raise ProtocolError(f"{what} cannot be read: {error}.") from None

    return read
