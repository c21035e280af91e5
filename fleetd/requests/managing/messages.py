"""How a person at one machine manages the models of another: a request for each operation.

    → RUN    ManageQuestion        one verb on one model
    ← (b"" | ManageTold)*          how far it is; the last one names the model
    → LOOK   LookQuestion          what is there, and what fits there
    ← LookTold

Errors and cancellation are the stream's own: a request that is cancelled ends its operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.control.model_change import ModelDone, ModelProgress, Verb
from fleetd.control.model_listing import FoundModels, ModelListing
from fleetd.errors import InvalidValue, ProtocolError
from fleetd.models import names
from fleetd.requests.remote import message_codec
from fleetd.requests.remote.message_codec import ModelName
from fleetd.text.bounded import Text

RUN, LOOK = "models.manage", "models.look"


class ManageQuestion(msgspec.Struct, frozen=True):
    """Asks a machine to do something with one of its models."""

    verb: Verb
    model: ModelName


class ManageTold(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far it is, or that it is done."""

    progress: ModelProgress | None = None
    # The model's name there; "" until it is done.
    name: Text = ""

    @property
    def event(self) -> ModelProgress | ModelDone:
        """The same as the API tells it."""
        return self.progress if self.progress is not None else ModelDone(name=self.name)


class LookQuestion(msgspec.Struct, frozen=True):
    """Asks a machine for its models or, with words, what the hub has and whether it fits there."""

    words: Annotated[str, Meta(max_length=limits.HUB_SEARCH_CHARS)] = ""


class LookTold(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer; one of the two."""

    listing: ModelListing | None = None
    found: FoundModels | None = None


_T = TypeVar("_T")
_kinds = message_codec.MessageKinds(
    limits.MODELS_MESSAGE_BYTES, ManageQuestion, ManageTold, LookQuestion, LookTold
)


def encode(message: ManageQuestion | ManageTold | LookQuestion | LookTold) -> bytes:
    return message_codec.encode(message)


def told(event: ModelProgress | ModelDone) -> ManageTold:
    """An event as another machine is told it."""
    return ManageTold(name=event.name) if isinstance(event, ModelDone) else ManageTold(event)


def decode(body: bytes, kind: type[_T]) -> _T:
    """Raises ProtocolError for anything that is not one honest message of this kind."""
    message = _kinds.decode(body, kind)
    match message:
        case ManageQuestion(model=model) if not names.is_name(model):
            raise ProtocolError("A peer named a model by what is no model's name.")
        case LookTold(listing=listing):
            if listing is not None and not all(names.is_name(model.name) for model in listing.installed):
                raise ProtocolError("A peer's list has models by what are no models' names.")
            if not all(text.isprintable() for text in _texts(msgspec.to_builtins(message))):
                raise ProtocolError("A peer's list has texts that cannot be shown.")
        case _:
            pass
    return message


def _texts(value: Any) -> Iterator[str]:
    """Every text in a message, as builtins; people are shown it."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def checked_name(model: str) -> str:
    """The name, if other machines may be asked for it. Raises InvalidValue."""
    if names.is_path(model):
        raise InvalidValue(
            "A path names a model of this machine alone.",
            hint="Name the model as that machine does; `fleetctl models --on MACHINE` lists them.",
            param="model",
        )
    return names.check(model)
