"""Every number that another machine can send has a range in its type; each is fed its extremes."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

import fleetd
from fleetd.cache.block_file import BlockHeader
from fleetd.engine import protocol
from fleetd.engine.sequence_state.rings import RingState
from fleetd.errors import ProtocolError
from fleetd.fleet.service import ClockReading
from fleetd.p2p.link_prober import Invitation
from fleetd.p2p.membership.cards import Card
from fleetd.p2p.membership.gossip import AddressHint
from fleetd.p2p.membership.roster_record import RosterRecord
from fleetd.p2p.message_reader import reader
from fleetd.p2p.session import frames
from fleetd.requests.remote.messages import JobEvent, RunJob

EXTREMES = (-1, -(2**63), 2**63 - 1, 2**64 - 1, float("nan"), float("inf"), float("-inf"), -1e308, 1e308)


# Modules that decode only what this machine's own processes and files say, or name no kind.
OWN = {
    "fleetd.p2p.message_reader": "the reader itself",
    "fleetd.requests.remote.message_codec": "the readers of the kinds that it is given",
    "fleetd.engine.protocol": "daemon and worker",
    "fleetd.engine.streams.channel": "daemon and worker",
    "fleetd.models.copy.receive": "daemon and its copying process",
    "fleetd.models.copy.receive_part": "daemon and its copying process",
    "fleetd.models.copy.send": "daemon and its copying process",
    "fleetd.requests.traces": "the own database",
    "fleetd.p2p.membership.roster_file": "the own disk",
    "fleetd.text.decoding": "those who call it",
}


# Modules whose kinds are of other modules, which are walked.
ELSEWHERE = {
    "fleetd.cache.block_stream": BlockHeader,
    "fleetd.engine.sequence_state.blocks": RingState,
}


def structs_of(module: str) -> list[type[msgspec.Struct]]:
    found = vars(importlib.import_module(module)).values()
    return [
        kind
        for kind in found
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module
    ]


KINDS: list[Any] = [
    RunJob,
    *JobEvent.__args__,
    protocol.Scored,
    Card,
    AddressHint,
    RosterRecord,
    Invitation,
    *structs_of("fleetd.models.copy.messages"),
    *structs_of("fleetd.requests.smart_prefill.messages"),
    *structs_of("fleetd.requests.prefill_sharing.messages"),
    *structs_of("fleetd.requests.drafting.messages"),
    *structs_of("fleetd.requests.groups.messages"),
    *structs_of("fleetd.requests.ranks.messages"),
    *structs_of("fleetd.requests.managing.messages"),
    *structs_of("fleetd.requests.vectors.messages"),
    protocol.TextsEmbedded,
    protocol.TextsReranked,
    *structs_of("fleetd.engine.groups.messages"),
    *structs_of("fleetd.requests.kv_fetching.messages"),
    *structs_of("fleetd.requests.model_copies"),
    *structs_of("fleetd.p2p.pairing.messages"),
    *frames.Frame.__args__,
    BlockHeader,
    RingState,
    ClockReading,
]


@dataclass(frozen=True)
class StructPlace:
    """A step into a struct that is written as an array."""

    place: int


def places(kind: inspect.StructType) -> list[str] | list[StructPlace]:
    """Where the fields of a struct are."""
    if not kind.array_like:
        return [field.encode_name for field in kind.fields]
    return [
        StructPlace(place) for place in range(kind.tag is not None, len(kind.fields) + (kind.tag is not None))
    ]


def numbers(kind: inspect.Type, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], inspect.Type]]:
    """Every number in a type, and the way to it: field names, 0 for an item, "" for a value."""
    match kind:
        case inspect.IntType() | inspect.FloatType():
            yield path, kind
        case inspect.StructType():
            for field, place in zip(kind.fields, places(kind), strict=True):
                yield from numbers(field.type, (*path, place))
        case inspect.DataclassType():
            for field in kind.fields:
                yield from numbers(field.type, (*path, field.encode_name))
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType():
            yield from numbers(kind.item_type, (*path, 0))
        case inspect.TupleType():
            for item in kind.item_types:
                yield from numbers(item, (*path, 0))
        case inspect.DictType():
            yield from numbers(kind.key_type, (*path, "key"))
            yield from numbers(kind.value_type, (*path, ""))
        case inspect.UnionType():
            for each in kind.types:
                yield from numbers(each, path)


def sample(kind: inspect.Type) -> Any:
    """The least value of a type, as plain objects."""
    match kind:
        case inspect.StructType() if kind.array_like:
            tag = [] if kind.tag is None else [kind.tag]
            return tag + [sample(field.type) for field in kind.fields]
        case inspect.DataclassType():
            return {field.encode_name: sample(field.type) for field in kind.fields}
        case inspect.StructType():
            fields = {field.encode_name: sample(field.type) for field in kind.fields}
            return {kind.tag_field: kind.tag, **fields} if kind.tag_field else fields
        case inspect.IntType() | inspect.FloatType():
            return max(kind.ge or 0, 1 if kind.gt is not None else 0)
        case inspect.StrType():
            return "0" * max(kind.min_length or 0, 1)
        case inspect.BytesType():
            return b"0" * (kind.min_length or 0)
        case inspect.BoolType():
            return False
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType():
            return [sample(kind.item_type)]
        case inspect.TupleType():
            return [sample(item) for item in kind.item_types]
        case inspect.DictType():
            return {sample(kind.key_type): sample(kind.value_type)}
        case inspect.UnionType():
            return sample(next(each for each in kind.types if not isinstance(each, inspect.NoneType)))
    return None


def decodes(code: str) -> bool:
    """True if a module decodes MessagePack, by a reader, by ``MessageKinds`` or by itself."""
    calls = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call))
    names = [ast.unparse(call.func) for call in calls]
    decoder = re.compile(
        r"^(reader|msgpack_decoder|from_msgpack)$|\bMessageKinds$|msgpack\.(decode|Decoder)$"
    )
    return any(decoder.search(name) for name in names)


def test_every_module_that_reads_messages_of_machines_is_walked() -> None:
    folder = Path(fleetd.__file__).parent
    reads = {
        ".".join(("fleetd", *file.relative_to(folder).with_suffix("").parts))
        for file in folder.rglob("*.py")
        if decodes(file.read_text())
    }
    assert len(reads) >= 16
    walked = {kind.__module__ for kind in KINDS} | ELSEWHERE.keys()
    assert reads - walked - OWN.keys() == set()
    assert walked.isdisjoint(OWN.keys() - {"fleetd.engine.protocol"})


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_number_has_a_least_and_a_most(kind: Any) -> None:
    for path, number in numbers(inspect.type_info(kind), ()):
        low = number.ge if number.ge is not None else number.gt  # type: ignore[attr-defined]
        high = number.le if number.le is not None else number.lt  # type: ignore[attr-defined]
        assert low is not None, path
        assert high is not None, path


def patterns(kind: inspect.Type) -> Iterator[str]:
    match kind:
        case inspect.StrType(pattern=str(pattern)):
            yield pattern
        case inspect.StructType() | inspect.DataclassType():
            for field in kind.fields:
                yield from patterns(field.type)
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType():
            yield from patterns(kind.item_type)
        case inspect.TupleType():
            for item in kind.item_types:
                yield from patterns(item)
        case inspect.DictType():
            yield from patterns(kind.key_type)
            yield from patterns(kind.value_type)
        case inspect.UnionType():
            for each in kind.types:
                yield from patterns(each)


def test_no_pattern_admits_a_newline_at_the_end() -> None:
    """A dollar sign would; ``\\Z`` does not."""
    found = [pattern for kind in KINDS for pattern in patterns(inspect.type_info(kind))]
    assert len(found) > 10
    assert [pattern for pattern in found if not pattern.endswith(r"\Z")] == []


def replaced(value: Any, path: tuple[Any, ...], number: Any) -> Any:
    """The sample with a number put at the end of a path. Raises LookupError where the sample has none."""
    if not path:
        return number
    step, rest = path[0], path[1:]
    match value:
        case list() if isinstance(step, StructPlace):
            if step.place >= len(value):
                raise LookupError(path)
            return [replaced(x, rest, number) if i == step.place else x for i, x in enumerate(value)]
        case dict() if step == "key":
            return dict.fromkeys([number], next(iter(value.values())))
        case dict() if step == "":
            return {key: replaced(each, rest, number) for key, each in value.items()}
        case dict():
            return {**value, step: replaced(value[step], rest, number)}
        case list():
            return [replaced(each, rest, number) for each in value]
    raise LookupError(path)


def allowed(number: inspect.Type, value: float) -> bool:
    assert isinstance(number, inspect.IntType | inspect.FloatType)
    if isinstance(number, inspect.IntType) and isinstance(value, float):
        return False
    low, high = number.ge, number.le
    return (low is None or low <= value) and (high is None or value <= high)


def test_attack_numbers_out_of_their_range() -> None:
    refused = 0
    for kind in KINDS:
        read, info = reader(kind, "It"), inspect.type_info(kind)
        honest = sample(info)
        for path, number in numbers(info, ()):
            for extreme in EXTREMES:
                if allowed(number, extreme):
                    continue
                try:
                    hostile = msgspec.msgpack.encode(replaced(honest, path, extreme))
                except LookupError:  # in an alternative that the sample did not take
                    continue
                with pytest.raises(ProtocolError):
                    read(hostile)
                refused += 1
    assert refused > 800
