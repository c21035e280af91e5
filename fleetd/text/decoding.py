"""Bytes and plain values → values of a kind, by msgspec, from any thread.

msgspec learns what a kind consists of when it first decodes one, and keeps that on the class from the moment
it begins. A second thread that decodes the same kind meanwhile, or a kind that shares a struct with it, reads
what is half learned, and the process ends by SIGSEGV (msgspec 0.22: a daemon that began with a pinned model
read its catalog in two threads). So every kind is learned here, under one lock, before its first use.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")
_learning = threading.Lock()


@cache
def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """The decoder of JSON to this kind; threads may share it."""
    with _learning:
        return msgspec.json.Decoder(kind)


@cache
def msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """The decoder of MessagePack to this kind; threads may share it."""
    with _learning:
        return msgspec.msgpack.Decoder(kind)


@overload
def from_json(data: bytes | str, kind: type[T]) -> T: ...
@overload
def from_json(data: bytes | str, kind: Any) -> Any: ...
def from_json(data: bytes | str, kind: Any) -> Any:
    """A value of ``kind``. Raises what ``bounded.UNREADABLE`` names."""
    return json_decoder(kind).decode(data)


@overload
def from_msgpack(data: bytes | bytearray | memoryview, kind: type[T]) -> T: ...
@overload
def from_msgpack(data: bytes | bytearray | memoryview, kind: Any) -> Any: ...
def from_msgpack(data: bytes | bytearray | memoryview, kind: Any) -> Any:
    """A value of ``kind``. Raises what ``bounded.UNREADABLE`` names."""
    return msgpack_decoder(kind).decode(data)


def from_toml(data: bytes, kind: type[T]) -> T:
    """A value of ``kind``. Raises msgspec.DecodeError, msgspec.ValidationError."""
    return from_plain(msgspec.toml.decode(data), kind)


@overload
def from_plain(value: Any, kind: type[T], *, strict: bool = True) -> T: ...
@overload
def from_plain(value: Any, kind: Any, *, strict: bool = True) -> Any: ...
def from_plain(value: Any, kind: Any, *, strict: bool = True) -> Any:
    """A value of ``kind`` out of dicts, lists, texts and numbers. Raises msgspec.ValidationError."""
    # What a decoder has learned of a kind is kept with its classes, for every form of input.
    json_decoder(kind)
    return msgspec.convert(value, kind, strict=strict)
