"""Fields of a struct and of the structs in it, named without their way: no two of them have one name."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

S = TypeVar("S", bound=msgspec.Struct)

_PARTS = ("shape", "speed", "sizes")


def changed(struct: S, **fields: Any) -> S:
    """A copy with other values of its own fields, and of those of its shape and its speed.

    Raises TypeError for a name that none of them has.
    """
    own = {name: value for name, value in fields.items() if name in struct.__struct_fields__}
    rest = fields.keys() - own.keys()
    for part in (name for name in struct.__struct_fields__ if name in _PARTS and rest):
        inner = own.get(part, getattr(struct, part))
        theirs = {name: fields[name] for name in rest if _has(inner, name)}
        if theirs:
            own[part] = changed(inner, **theirs)
            rest -= theirs.keys()
    if rest:
        raise TypeError(f"{type(struct).__name__} has no {', '.join(sorted(rest))}")
    return replace(struct, **own)


def _has(struct: msgspec.Struct, name: str) -> bool:
    names = struct.__struct_fields__
    return name in names or any(_has(getattr(struct, part), name) for part in names if part in _PARTS)
