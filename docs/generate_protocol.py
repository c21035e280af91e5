"""Write docs/protocol.md from what fleetd/p2p says of sessions: `python docs/generate_protocol.py`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import msgspec

from fleetd import limits
from fleetd.p2p.session import frames, liveness, outbox, session, stream
from fleetd.p2p.session.frames import PROTOCOL_VERSIONS, Frame
from fleetd.p2p.session.states import SESSION_TABLE, STREAM_TABLE, Act

PAGE = Path(__file__).with_name("protocol.md")

_INTRO = """\
Every two paired machines hold one TLS 1.3 connection, on which both have shown the certificates that were
exchanged at pairing. This page is what they say on it. Bulk data goes over connections of its own."""

_SESSION = """\
What a frame does in each state of the session. To refuse it is to end the session with `protocol_error`."""

_STREAM = """\
What a frame does in each state of its stream, as the side sees it that receives the frame; local is the
direction in which that side sends."""

_BOUND = re.compile(r"(?P<why>(?:# .*\n)*)(?P<name>[A-Z_]+) = .*\n")


def page() -> str:
    """The whole page."""
    oldest, newest = PROTOCOL_VERSIONS
    parts = [
        "<!-- Written by docs/generate_protocol.py; a test fails when it is out of date. -->",
        "# The protocol between machines",
        _INTRO,
        f"This program speaks versions {oldest} to {newest}; two machines use the newest that both speak.",
        "## Frames",
        _body(frames),
        _table(["number", "frame", "fields", "meaning"], [_frame(kind) for kind in get_args(Frame)]),
        "## A session",
        _body(session).rpartition("\n\n")[2],
        _SESSION,
        _states(SESSION_TABLE),
        "## A stream",
        _body(stream),
        _STREAM,
        _states(STREAM_TABLE),
        "## Who goes first",
        _body(outbox),
        "## Who is there",
        _body(liveness),
        "## Bounds",
        _table(["bound", "value", "why"], _bounds("Fleet: control sessions")),
    ]
    return "\n\n".join(parts) + "\n"


def _body(module: ModuleType) -> str:
    """A module's docstring without its first line, which says what the module is."""
    text = inspect.cleandoc(module.__doc__ or "").partition("\n\n")[2]
    return text.replace("Sans-IO. ", "").replace("``", "`")


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _states(table: Mapping[Any, Mapping[type, Act]]) -> str:
    kinds = list(next(iter(table.values())))
    rows = [
        [_name(kind), *(f"**{act.value}**" if act is Act.REFUSE else act.value for act in acts)]
        for kind in kinds
        for acts in [[row[kind] for row in table.values()]]
    ]
    return _table(["frame", *(state.value for state in table)], rows)


def _name(kind: type) -> str:
    """The name of a frame, as the sentences on the page have it: a DataFrame is called Data."""
    return kind.__name__.removesuffix("Frame")


def _frame(kind: type[msgspec.Struct]) -> list[str]:
    info = msgspec.inspect.type_info(kind)
    fields = "<br>".join(f"`{field.name}` {_words(field.type)}" for field in info.fields)  # type: ignore[attr-defined]
    return [str(kind.__struct_config__.tag), _name(kind), fields, _sentence(kind)]


def _sentence(kind: type) -> str:
    return re.sub(r"\s+", " ", inspect.cleandoc(kind.__doc__ or "")).replace("``", "`")


def _words(kind: Any) -> str:
    match kind:
        case msgspec.inspect.IntType(ge=low, le=high):
            top = f"2^{(high + 1).bit_length() - 1} - 1" if high > 65535 else str(high)
            return f"{low} to {top}"
        case msgspec.inspect.FloatType(ge=least, le=most):
            return f"number, {least:g} to {most:g}"
        case msgspec.inspect.StrType() | msgspec.inspect.BytesType():
            word, unit = (
                ("text", "characters") if isinstance(kind, msgspec.inspect.StrType) else ("bytes", "")
            )
            if kind.min_length is not None:
                return f"{word}, {kind.min_length} {unit}".rstrip()
            return f"{word}, at most {kind.max_length}" if kind.max_length is not None else word
        case msgspec.inspect.BoolType():
            return "flag"
        case msgspec.inspect.UnionType(types=types):
            return " or ".join(map(_words, types))
        case msgspec.inspect.NoneType():
            return "nothing"
        case msgspec.inspect.ListType(item_type=item):
            return f"list of {_words(item)}"
        case msgspec.inspect.TupleType(item_types=items):
            return f"{len(items)} numbers, {_words(items[0])}"
    raise TypeError(kind)


def _bounds(section: str) -> list[list[str]]:
    source = inspect.getsource(limits)
    text = re.split(r"^# ---- ", source.partition(f"# ---- {section} ")[2], maxsplit=1, flags=re.MULTILINE)[0]
    return [
        [f"`{bound['name']}`", _value(bound["name"]), " ".join(bound["why"].replace("# ", "").split())]
        for bound in _BOUND.finditer(text)
    ]


def _value(name: str) -> str:
    value = getattr(limits, name)
    if name.endswith("_PER_S"):
        return f"{value:g}"
    if name.endswith("_S"):
        return f"{value:g} s"
    if name.endswith("_BYTES"):
        size, unit = (value // limits.MIB, "MiB") if value >= limits.MIB else (value // limits.KIB, "KiB")
        return f"{size} {unit}" if size else f"{value} bytes"
    return f"{value}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
