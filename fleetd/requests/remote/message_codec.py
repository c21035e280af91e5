"""What all messages about jobs have in common. Errors and cancellation are their streams' own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.errors import ProtocolError
from fleetd.models import names
from fleetd.p2p.message_reader import reader

# Says that the work still waits or goes on.
ALIVE = b""

ModelName = Annotated[str, Meta(min_length=1, max_length=limits.MODEL_NAME_CHARS)]
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
RequestId = Annotated[str, Meta(min_length=1, max_length=limits.REQUEST_ID_CHARS)]

encode = msgspec.msgpack.Encoder().encode

_T = TypeVar("_T")


class MessageKinds:
    """The messages of one feature, each of at most ``most_bytes``."""

    def __init__(self, most_bytes: int, *kinds: type) -> None:
        self._readers: dict[type, Callable[[bytes], Any]] = {
            kind: reader(kind, f"A peer's {kind.__name__}", most_bytes) for kind in kinds
        }

    def decode(self, body: bytes, kind: type[_T]) -> _T:
        """Raises ProtocolError for anything that is not one honest message of this kind."""
        message: _T = self._readers[kind](body)
        return message


def check_name(model: str) -> None:
    """Raises ProtocolError: others may ask for what this machine calls a model, not for its files."""
    if names.is_path(model):
        raise ProtocolError("A peer asked for a model by a path on this machine.")
