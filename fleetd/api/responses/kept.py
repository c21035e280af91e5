"""Answers of /v1/responses that a request goes on from by their id, or whose items it names. ``client``, as
``auth.client_of`` has it, finds its own alone."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from fleetd.api.kept_answers import KeptAnswers
from fleetd.api.responses.bodies import InputItem
from fleetd.api.responses.objects import Response
from fleetd.errors import ResponseNotFound
from fleetd.text.decoding import from_plain


class KeptResponse(msgspec.Struct, frozen=True):
    """An answer, and the conversation that it ends."""

    #: The answer as it was sent.
    response: Response
    #: The conversation that its request went on from.
    before: tuple[InputItem, ...]
    #: The items that its request added to that; each has an id.
    asked: tuple[InputItem, ...]
    #: The answer's items.
    said: tuple[InputItem, ...]
    #: About how many bytes all of it takes.
    n_bytes: int

    @property
    def conversation(self) -> tuple[InputItem, ...]:
        """All up to the answer, which is its end."""
        return (*self.before, *self.asked, *self.said)


KeptResponses = KeptAnswers[KeptResponse, InputItem]


def keep(
    kept: KeptResponses,
    client: str,
    response: Response,
    asked: Sequence[InputItem],
    asked_bytes: int,
    previous: KeptResponse | None = None,
) -> None:
    """Keep an answer to ``asked``, a request of so many bytes that went on from ``previous``."""
    # In the ids of all its items, and no client can have put it into one before.
    own = response.id.removeprefix("resp_")
    found = KeptResponse(
        response,
        () if previous is None else previous.conversation,
        tuple(item if item.id else replace(item, id=f"item_{own}_{i}") for i, item in enumerate(asked)),
        tuple(from_plain(msgspec.to_builtins(response.output), list[InputItem])),
        asked_bytes + len(msgspec.json.encode(response)) + (0 if previous is None else previous.n_bytes),
    )
    # A client may send items of earlier answers again; they stay theirs.
    parts = {item.id: item for item in (*found.asked, *found.said) if item.id and own in item.id}
    kept.keep(client, response.id, found, parts, found.n_bytes)


def answer(kept: KeptResponses, client: str, name: str, param: str | None = None) -> KeptResponse:
    """Raises ResponseNotFound."""
    if (found := kept.find(client, name)) is None:
        raise missing("answer", name, param)
    return found


def item(kept: KeptResponses, client: str, name: str, param: str) -> InputItem:
    """An item of an answer, or of what it was asked. Raises ResponseNotFound."""
    if (found := kept.part(client, name)) is None:
        raise missing("item", name, param)
    return found


def missing(what: str, name: str, param: str | None = None) -> ResponseNotFound:
    return ResponseNotFound(
        f"No {what} {name[:100]!r} is kept here.",
        hint="Send the whole conversation in input: answers are kept in this daemon's memory for an hour "
        "after their last use, and those of requests with store false are not.",
        param=param,
    )
