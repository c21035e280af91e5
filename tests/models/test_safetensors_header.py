"""The safetensors head: sound files pass, everything else is ModelCorrupt and nothing else."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_files import safetensors_bytes, write_weights
from safetensors.numpy import load_file

from fleetd import limits
from fleetd.errors import ModelCorrupt
from fleetd.models.safetensors_header import header_length, parse, read_header


def entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def check(header: Any, data: bytes) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    parse(raw, 8 + len(raw) + len(data), "x.safetensors")


def test_our_writer_makes_what_the_reference_reader_reads(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_weights(file, "b", "a")
    loaded = load_file(file)
    assert sorted(loaded) == ["a", "b"]
    np.testing.assert_array_equal(loaded["b"], np.arange(64, dtype=np.float32).reshape(2, 32))
    assert sorted(read_header(file)) == ["a", "b"]
    first = file.read_bytes()
    write_weights(file, "a", "b")
    assert file.read_bytes() == first


SOUND = {"a": entry(0, 8, [2]), "b": entry(8, 16, [2, 1])}


@pytest.mark.parametrize(
    ("why", "header", "data"),
    [
        ("overlap", {"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, b"\0" * 12),
        ("hole", {"a": entry(0, 8, [2]), "b": entry(12, 20, [2])}, b"\0" * 20),
        ("past the end", {"a": entry(0, 8, [2])}, b"\0" * 7),
        ("trailing bytes", {"a": entry(0, 8, [2])}, b"\0" * 9),
        ("shape and size disagree", {"a": entry(0, 8, [3])}, b"\0" * 8),
        ("negative dimension", {"a": entry(0, 8, [-1, -2])}, b"\0" * 8),
        ("offsets backwards", {"a": entry(8, 0, [2])}, b"\0" * 8),
        ("offset of true", {"a": {"dtype": "U8", "shape": [1], "data_offsets": [False, True]}}, b"\0"),
        ("unknown dtype", {"a": entry(0, 8, [2], "F4")}, b"\0" * 8),
        ("fraction", {"a": entry(0, 8, [2.0])}, b"\0" * 8),  # type: ignore[list-item]
        ("product overflows 64 bits", {"a": entry(0, 0, [1 << 40, 1 << 40, 0x100])}, b""),
        ("too many dimensions", {"a": entry(0, 4, [1] * (limits.TENSOR_DIMS + 1))}, b"\0" * 4),
        ("not an object", [], b""),
        ("not JSON", b"{]", b""),
        ("deep nesting", b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b""),
        ("name twice", b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},' * 1 + b'"a":{}}', b""),
        ("metadata of numbers", {"__metadata__": {"a": 1}}, b""),
        ("extra field", {"a": entry(0, 8, [2]) | {"pickle": "x"}}, b"\0" * 8),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hostile_header_is_corrupt(why: str, header: Any, data: bytes) -> None:
    with pytest.raises(ModelCorrupt, match=r"x\.safetensors"):
        check(header, data)


def test_sound_header_passes() -> None:
    check(SOUND, b"\0" * 16)
    check({"__metadata__": {"format": "mlx"}, "a": entry(0, 4, [1] * limits.TENSOR_DIMS)}, b"\0" * 4)


def test_header_length_is_bounded_before_anything_is_read() -> None:
    limit = limits.SAFETENSORS_HEADER_BYTES
    assert header_length(struct.pack("<Q", limit), 1 << 40, "x") == limit
    for claimed in (limit + 1, 1 << 63, 0, 1):
        with pytest.raises(ModelCorrupt):
            header_length(struct.pack("<Q", claimed), 1 << 40, "x")


@pytest.mark.parametrize("size", [0, 3, 7, 8, 20])
def test_truncated_head_is_corrupt(tmp_path: Path, size: int) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(safetensors_bytes(SOUND, b"\0" * 16)[:size])
    with pytest.raises(ModelCorrupt, match=r"model\.safetensors"):
        read_header(file)


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_corrupt(raw: bytes) -> None:
    try:
        length = header_length(raw[:8], len(raw), "x")
        parse(raw[8 : 8 + length], len(raw), "x")
    except ModelCorrupt:
        pass


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
_entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "BF16"]) | _json,
        "shape": st.lists(st.integers(-1, 4), max_size=3) | _json,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | _json,
    }
)


@given(st.dictionaries(st.text(max_size=3), _entries | _json, max_size=4), st.integers(0, 64))
def test_any_header_is_corrupt_or_covers_the_data_exactly(header: dict[str, Any], size: int) -> None:
    raw = json.dumps(header).encode()
    try:
        found = parse(raw, 8 + len(raw) + size, "x")
    except ModelCorrupt:
        return
    covered = sorted((info.begin, info.end) for info in found.values())
    assert sum(end - begin for begin, end in covered) == size
    assert all(8 + len(raw) <= begin <= end <= 8 + len(raw) + size for begin, end in covered)
