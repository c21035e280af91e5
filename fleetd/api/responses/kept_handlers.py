"""GET and DELETE /v1/responses/ID, GET /v1/responses/ID/input_items: answers that are kept."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from fleetd import limits
from fleetd.api.auth import client_of
from fleetd.api.http.body import json_answer
from fleetd.api.http.context import SERVICES
from fleetd.api.responses import kept
from fleetd.api.responses.bodies import InputItem, InputPart
from fleetd.api.responses.objects import DeletedResponse, InputItemList
from fleetd.errors import InvalidValue, UnsupportedParameter


async def show(request: web.Request) -> web.StreamResponse:
    """Raises ResponseNotFound, UnsupportedParameter."""
    if request.query.get("stream", "false") != "false":
        raise UnsupportedParameter(
            "An answer is not streamed a second time.", hint="Leave stream out.", param="stream"
        )
    return json_answer(_kept(request).response)


async def delete(request: web.Request) -> web.StreamResponse:
    """Raises ResponseNotFound."""
    name = request.match_info["id"]
    if not request.app[SERVICES].kept_responses.remove(client_of(request), name):
        raise kept.missing("answer", name)
    return json_answer(DeletedResponse(name))


async def input_items(request: web.Request) -> web.StreamResponse:
    """A page of what an answer was asked, the last item first unless ``order`` is asc. Raises FleetError."""
    found = [_listed(item) for item in _kept(request).asked]
    if _word(request, "order", ("desc", "asc")) == "desc":
        found.reverse()
    after = request.query.get("after")
    if after is not None:
        places = [i for i, item in enumerate(found) if item["id"] == after]
        if not places:
            raise InvalidValue(f"after: no item {after[:100]!r} was asked.", param="after")
        found = found[places[0] + 1 :]
    page = found[: _limit(request)]
    ids = [item["id"] for item in page] or [""]
    return json_answer(InputItemList(page, ids[0], ids[-1], has_more=len(page) < len(found)))


def _kept(request: web.Request) -> kept.KeptResponse:
    return kept.answer(request.app[SERVICES].kept_responses, client_of(request), request.match_info["id"])


def _word(request: web.Request, name: str, words: tuple[str, ...]) -> str:
    given = request.query.get(name, words[0])
    if given not in words:
        raise InvalidValue(f"{name} has to be one of {', '.join(words)}.", param=name)
    return given


def _limit(request: web.Request) -> int:
    given = request.query.get("limit", str(limits.ITEMS_LISTED_BY_DEFAULT))
    if not (given.isascii() and given.isdecimal() and 1 <= int(given[:9]) <= limits.ITEMS_LISTED):
        raise InvalidValue(f"limit has to be between 1 and {limits.ITEMS_LISTED}.", param="limit")
    return int(given)


def _listed(item: InputItem) -> dict[str, Any]:
    """An item as OpenAI's libraries read it: without the fields that its type does not have."""
    kind = item.kind or "message"
    plain: dict[str, Any] = {"type": kind, "status": "completed", **_said(item)}
    if kind == "message":
        text = "output_text" if item.role == "assistant" else "input_text"
        parts = [InputPart(text, item.content)] if isinstance(item.content, str) else item.content or ()
        plain["content"] = [_part(part) for part in parts]
    elif kind == "reasoning":
        plain |= {"summary": [_part(part) for part in item.summary or ()]}
    return plain


def _part(part: InputPart) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": []} if part.kind == "output_text" else {}
    return {**_said(part), **more}


def _said(value: msgspec.Struct) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(value)
    return {name: each for name, each in found.items() if each is not None}
