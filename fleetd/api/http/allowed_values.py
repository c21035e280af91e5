"""The words that a field of a body may have, for errors that name them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import inspect

# "messages[0].role" → "messages", "[0]", "role"
_STEPS = re.compile(r"\[[^]]*\]|[^.\[\]]+")


def allowed_words(kind: Any, path: str) -> list[str]:
    """The words at ``path`` of a body of type ``kind``, as msgspec names places, sorted; none if any text may
    stand there. An empty text is no word."""
    places: Sequence[inspect.Type] = [inspect.type_info(kind)]
    steps = _STEPS.findall(path)
    for at, step in enumerate(steps):
        if at == len(steps) - 1 and (tags := [*_tags(places, step)]):
            return sorted(tags)
        places = [inner for place in places for inner in _inside(place, step)]
    return sorted({word for place in places for word in _words(place)})


def _parts(place: inspect.Type) -> Iterator[inspect.Type]:
    """The types of a union; of another type, itself."""
    if isinstance(place, inspect.Metadata):
        yield from _parts(place.type)
    elif isinstance(place, inspect.UnionType):
        for part in place.types:
            yield from _parts(part)
    else:
        yield place


def _inside(place: inspect.Type, step: str) -> Iterator[inspect.Type]:
    for part in _parts(place):
        match part:
            case inspect.StructType(fields=fields):
                yield from (field.type for field in fields if field.encode_name == step)
            case inspect.ListType(item_type=item) if step.startswith("["):
                yield item
            case inspect.DictType(value_type=value) if step.startswith("["):
                yield value
            case _:
                pass


def _tags(places: Sequence[inspect.Type], step: str) -> Iterator[str]:
    """The tags of messages whose type stands in the field of this name."""
    for place in places:
        for part in _parts(place):
            if isinstance(part, inspect.StructType) and part.tag_field == step:
                yield str(part.tag)


def _words(place: inspect.Type) -> Iterator[str]:
    for part in _parts(place):
        if isinstance(part, inspect.LiteralType):
            yield from (value for value in part.values if isinstance(value, str) and value)
