"""The GGUF head against the reference reader, and against hostile files."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_files import F32, gguf_bytes, tiny_llama

from fleetd import limits
from fleetd.errors import ModelCorrupt, ModelUnsupported
from fleetd.models.gguf.header import read_header


def read(raw: bytes) -> Any:
    return read_header(memoryview(raw), "x.gguf")


def test_agrees_with_the_reference_reader(tmp_path: Path) -> None:
    raw = gguf_bytes(*tiny_llama())
    file = tmp_path / "x.gguf"
    file.write_bytes(raw)
    theirs, ours = gguf.GGUFReader(file), read(raw)
    assert {tensor.name: (tensor.offset, tensor.size_bytes, tensor.shape) for tensor in ours.tensors} == {
        tensor.name: (tensor.data_offset, tensor.n_bytes, tuple(reversed(tensor.shape.tolist())))
        for tensor in theirs.tensors
    }
    for key, value in ours.metadata.items():
        expected = theirs.fields[key].contents()
        assert (value if isinstance(value, list | str | int | float) else value.tolist()) == expected


ONE: dict[str, tuple[tuple[int, ...], int, bytes]] = {"t": ((2, 4), F32, b"\0" * 32)}


def patched(raw: bytes, at: int, code: str, value: int) -> bytes:
    piece = struct.pack("<" + code, value)
    return raw[:at] + piece + raw[at + len(piece) :]


SOUND = gguf_bytes({"k": 7}, ONE)
# 24 bytes of head, then "k" (9 bytes), type and value (8): the tensor table starts at 41.
NAME, DIMS, DIM0, KIND, OFFSET = 41, 50, 54, 70, 74


@pytest.mark.parametrize(
    ("why", "raw"),
    [
        ("magic", b"GGML" + SOUND[4:]),
        ("tensor count of 2^60", patched(SOUND, 8, "Q", 1 << 60)),
        ("one tensor too many", patched(SOUND, 8, "Q", limits.GGUF_TENSORS + 1)),
        ("key count of 2^60", patched(SOUND, 16, "Q", 1 << 60)),
        ("key of 2^63 bytes", patched(SOUND, 24, "Q", 1 << 63)),
        ("unknown value type", patched(SOUND, 33, "I", 99)),
        ("array of 2^62 items", SOUND[:33] + struct.pack("<IIQ", 9, 4, 1 << 62) + SOUND[41:]),
        ("array of arrays", SOUND[:33] + struct.pack("<IIQ", 9, 9, 1) + SOUND[41:]),
        ("no dimensions", patched(SOUND, DIMS, "I", 0)),
        ("five dimensions", patched(SOUND, DIMS, "I", 5)),
        ("dimension of 0", patched(SOUND, DIM0, "Q", 0)),
        (
            "dimension product over 64 bits",
            patched(patched(SOUND, DIM0, "Q", 1 << 40), DIM0 + 8, "Q", 1 << 40),
        ),
        ("offset past the end", patched(SOUND, OFFSET, "Q", 1 << 40)),
        ("offset of 2^64-32", patched(SOUND, OFFSET, "Q", (1 << 64) - 32)),
        ("truncated data", SOUND[:-1]),
        ("alignment of 3", gguf_bytes({"general.alignment": 3}, ONE)),
        ("alignment of 0", gguf_bytes({"general.alignment": 0}, ONE)),
        ("alignment of text", gguf_bytes({"general.alignment": "32"}, ONE)),
        ("key twice", gguf_bytes({"k": 7, "j": 7}, ONE).replace(b"j", b"k")),
        ("name not UTF-8", SOUND.replace(b"t", b"\xff", 1)),
        ("name twice", gguf_bytes({}, {"t": ONE["t"], "u": ONE["t"]}).replace(b"u", b"t")),
        ("quantised row of 4", patched(SOUND, KIND, "I", 2)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hostile_head_is_corrupt(why: str, raw: bytes) -> None:
    read(SOUND)
    with pytest.raises(ModelCorrupt, match=r"x\.gguf"):
        read(raw)


def test_two_tensors_on_the_same_bytes_are_corrupt() -> None:
    raw = gguf_bytes({}, {"t": ONE["t"], "u": ONE["t"]})
    second = raw.index(struct.pack("<Q", 32), raw.index(b"u"))
    with pytest.raises(ModelCorrupt, match="overlaps"):
        read(patched(raw, second, "Q", 0))


def test_other_versions_and_kinds_are_unsupported() -> None:
    with pytest.raises(ModelUnsupported, match="version 1"):
        read(patched(SOUND, 4, "I", 1))
    with pytest.raises(ModelUnsupported, match="kind 4242"):
        read(patched(SOUND, KIND, "I", 4242))


@given(st.integers(0, len(SOUND) - 1), st.binary(min_size=1, max_size=8))
def test_any_damage_is_read_or_typed(at: int, piece: bytes) -> None:
    raw = (SOUND[:at] + piece + SOUND[at + len(piece) :])[: len(SOUND)]
    try:
        for tensor in read(raw).tensors:
            assert 0 <= tensor.offset <= tensor.offset + tensor.size_bytes <= len(raw)
    except (ModelCorrupt, ModelUnsupported):
        pass


@given(st.integers(0, len(SOUND) - 1))
def test_any_truncation_is_corrupt(size: int) -> None:
    with pytest.raises(ModelCorrupt):
        read(SOUND[:size])
