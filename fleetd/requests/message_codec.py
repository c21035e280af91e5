"""What all messages about jobs have in common. Errors and cancellation are their streams' own."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.errors import ProtocolError
from fleetd.models import names

# Says that the work still waits or goes on.
ALIVE = b""

ModelName = Annotated[str, Meta(min_length=1, max_length=limits.MODEL_NAME_CHARS)]
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
RequestId = Annotated[str, Meta(min_length=1, max_length=limits.REQUEST_ID_CHARS)]

encode = msgspec.msgpack.Encoder().encode


def check_name(model: str) -> None:
    """Raises ProtocolError: others may ask for what this machine calls a model, not for its files."""
    if names.is_path(model):
        raise ProtocolError("A peer asked for a model by a path on this machine.")
