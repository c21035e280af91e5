"""What all messages about jobs have in common. Errors and cancellation are their streams' own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.engine.protocol import StepTime
from fleetd.errors import ProtocolError
from fleetd.models import names

# Says that the work still waits or goes on.
ALIVE = b""

ModelName = Annotated[str, Meta(min_length=1, max_length=limits.MODEL_NAME_CHARS)]
Digest = Annotated[str, Meta(min_length=64, max_length=64, pattern="^[0-9a-f]*$")]
RequestId = Annotated[str, Meta(min_length=1, max_length=limits.REQUEST_ID_CHARS)]

encode = msgspec.msgpack.Encoder().encode


_STEP_SECONDS = 1e9


def check_steps(steps: Iterable[StepTime]) -> None:
    """What people are shown later; NaN fails every comparison. Raises ProtocolError.

    Their struct is the worker's too, which needs no bounds.
    """
    for step in steps:
        if not (
            len(step.name) <= limits.CARD_TEXT_CHARS
            and 0 <= step.seconds < _STEP_SECONDS
            and step.n_bytes >= 0
        ):
            raise ProtocolError("A peer's account of its steps makes no sense.")


def check_name(model: str) -> None:
    """Raises ProtocolError: others may ask for what this machine calls a model, not for its files."""
    if names.is_path(model):
        raise ProtocolError("A peer asked for a model by a path on this machine.")
