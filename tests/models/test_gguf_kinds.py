"""Every quantisation kind: the imported model beside gguf's own dequantisation, its size, and damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples import examples
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st
from model_files import gguf_bytes, tiny_llama
from support import gguf_kinds
from support.gguf_errors import KINDS, measure

from fleetd import limits
from fleetd.errors import ModelCorrupt, ModelUnsupported
from fleetd.models.gguf import packing
from fleetd.models.gguf.conversion import import_gguf
from fleetd.models.gguf.header import KINDS as HEADER_KINDS
from fleetd.models.gguf.header import OTHER_KINDS, read_header


def test_every_packed_kind_is_measured_here() -> None:
    assert set(KINDS) == packing.PACKED
    assert {name for name, _, _ in HEADER_KINDS.values()} == packing.PACKED | {"F32", "F16", "BF16"}
    assert {kind.value: kind.name for kind in Kind} == {
        number: name for number, (name, _, _) in HEADER_KINDS.items()
    } | OTHER_KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_logits_stay_within_the_kinds_own_rounding(tmp_path: Path, kind: str) -> None:
    found = measure(kind, tmp_path)
    assert found.own > 0
    assert found.added <= (0.05 if packing.is_exact(kind) else 1.0) * found.own
    assert found.growth <= limits.GGUF_GROWTH


def test_among_other_kinds_q6_k_has_eight_bits(tmp_path: Path) -> None:
    """In a file of Q6_K alone the model would grow by more than it may, and gets six."""
    (tmp_path / "alone").mkdir()
    (tmp_path / "mixed").mkdir()
    alone = measure("Q6_K", tmp_path / "alone")
    mixed = measure("Q6_K", tmp_path / "mixed", beside="Q4_K")
    assert (alone.stored[0], mixed.stored[0]) == (6, 8)
    assert mixed.growth <= limits.GGUF_GROWTH
    assert mixed.added <= 0.1 * mixed.own


@pytest.mark.parametrize(("kind", "columns"), [(kind, 256) for kind in KINDS] + [("IQ4_NL", 96)])
def test_no_kind_has_a_packing_that_grows_by_more_than_it_may(kind: str, columns: int) -> None:
    in_file = 8 * _block_bytes(kind) / _elements(kind)
    small = packing.packing_of(kind, columns, small=True)
    assert columns % small.group == 0
    stored = sum({"U32": 32, "U8": 8, "F16": 16}[dtype] * share for _, dtype, share in small.parts("F16"))
    assert stored <= limits.GGUF_GROWTH * in_file


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
@pytest.mark.parametrize("kind", sorted(packing.PACKED))
def test_rows_packed_in_slices_are_rows_packed_at_once(kind: str, dtype: packing.HalfType) -> None:
    values = np.random.default_rng(1).standard_normal((6, 256)).astype(np.float32)
    raw = gguf_kinds.encoded(kind, values)
    chosen = packing.packing_of(kind, 256)
    whole = packing.pack(kind, raw, chosen, dtype)
    pieces = [packing.pack(kind, raw[at : at + 2], chosen, dtype) for at in (0, 2, 4)]
    for index, part in enumerate(whole):
        np.testing.assert_array_equal(part, np.concatenate([piece[index] for piece in pieces]))


def _file(kind: str, shape: tuple[int, ...], raw: bytes) -> bytes:
    metadata, tensors = tiny_llama()
    tensors["blk.0.ffn_gate.weight"] = (shape, Kind[kind].value, raw)
    return gguf_bytes(metadata, tensors)


def _imported(tmp_path: Path, raw: bytes) -> None:
    source, target = tmp_path / "in.gguf", tmp_path / "out"
    source.write_bytes(raw)
    target.mkdir()
    import_gguf(source, target)


def _block_bytes(kind: str) -> int:
    return {name: size for name, _, size in HEADER_KINDS.values()}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_block_is_corrupt(tmp_path: Path, kind: str) -> None:
    metadata, tensors = tiny_llama()
    del tensors["blk.0.ffn_gate.weight"]
    last = ((1, 256), Kind[kind].value, b"\0" * (256 * _block_bytes(kind) // _elements(kind)))
    raw = gguf_bytes(metadata, {**tensors, "blk.0.ffn_gate.weight": last}).rstrip(b"\0")
    with pytest.raises(ModelCorrupt, match="truncated"):
        _imported(tmp_path, raw)


def _elements(kind: str) -> int:
    return {name: count for name, count, _ in HEADER_KINDS.values()}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_dimensions_that_no_tensor_has_are_corrupt(kind: str) -> None:
    for shape in [(1, 1), (1, 255), (1 << 49, 256), (1 << 62, 1 << 62), (0, 256)]:
        one = {"t": (shape, Kind[kind].value, b"\0" * _block_bytes(kind))}
        with pytest.raises(ModelCorrupt, match="'t'"):
            read_header(memoryview(gguf_bytes({}, one)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_that_is_no_number_is_corrupt(tmp_path: Path, kind: str) -> None:
    """All of a block's bits are ones: its scale is not a number."""
    raw = b"\xff" * (_block_bytes(kind) * 96 * 256 // _elements(kind))
    with pytest.raises(ModelCorrupt, match="ffn_gate"):
        _imported(tmp_path, _file(kind, (96, 256), raw))


@pytest.mark.parametrize("number", sorted(OTHER_KINDS))
def test_a_kind_that_cannot_be_kept_is_refused_by_name(tmp_path: Path, number: int) -> None:
    metadata, tensors = tiny_llama()
    tensors["blk.0.ffn_gate.weight"] = ((96, 256), number, b"\0")
    with pytest.raises(ModelUnsupported, match=OTHER_KINDS[number]) as caught:
        _imported(tmp_path, gguf_bytes(metadata, tensors))
    assert "Q4_K_M" in caught.value.hint


@examples(30)
@given(st.sampled_from(sorted(packing.PACKED)), st.binary(min_size=210, max_size=210))
def test_any_block_is_packed_or_is_no_number(kind: str, noise: bytes) -> None:
    count = 256 // _elements(kind)
    raw = np.frombuffer((noise * 8)[: count * _block_bytes(kind)], np.uint8).reshape(1, -1)
    try:
        parts: list[Any] = packing.pack(kind, raw, packing.packing_of(kind, 256), "F16")
    except ValueError:
        return
    assert all(np.isfinite(part).all() for part in parts)
