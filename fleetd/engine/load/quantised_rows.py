"""Keys and values of a model's sequences held quantised: what of them can be, and the caches that do it."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import msgspec
from mlx_lm.models.cache import make_prompt_cache

from fleetd.control.model_facts import KvBits
from fleetd.engine.sequence_state.kinds import kind_of
from fleetd.engine.sequence_state.packed_caches import with_packings
from fleetd.engine.sequence_state.parts import all_parts, parts
from fleetd.engine.sequence_state.row_packing import RowPacking


class RowPrecision(msgspec.Struct, frozen=True):
    """How a model's keys and values are held.

    ``bits`` of a number; 0 if none are quantised. ``text``: a sentence for people, "" if nothing was asked.
    ``unpacking_bytes``: what a token takes besides while one layer attends to it.
    """

    bits: KvBits = 0
    text: str = ""
    unpacking_bytes: int = 0


def quantise_rows(model: Any, bits: KvBits) -> RowPrecision:
    """Let all caches that mlx-lm makes for ``model`` hold rows in ``bits`` bits where they can.

    Windows, running states and rows whose width is no multiple of 32 stay as they are. One token is computed,
    to know widths.
    """
    used: list[Any] = make_prompt_cache(model)
    mx.eval(model(mx.array([[1]]), cache=used))
    found = [packings(layer, bits) for layer in used]
    packed = [packing for layer in found for packing in layer if packing is not None]
    text = _text(bits, len(packed), len(all_parts(used)))
    if not packed:
        return RowPrecision(text=text)
    empty = [with_packings(layer, each) for layer, each in zip(make_prompt_cache(model), found, strict=True)]
    # mlx-lm asks a model for its caches by this name.
    model.make_cache = lambda: copy.deepcopy(empty)
    unpacking = max(
        _unpacking_bytes(packing, part)
        for layer, each in zip(used, found, strict=True)
        for part, packing in zip(parts(layer), each, strict=True)
        if packing is not None
    )
    return RowPrecision(bits, text, unpacking)


def packings(used: Any, bits: int) -> list[RowPacking | None]:
    """How the parts of a layer's cache, in which a token is, can be held in ``bits`` bits; None: as now."""
    return [_packing(part, bits) for part in parts(used)]


def _packing(part: Any, bits: int) -> RowPacking | None:
    if not kind_of(part).plain:
        return None
    return RowPacking.of(bits, part.keys.shape[-1], part.values.shape[-1], part.keys.dtype)


def _unpacking_bytes(packing: RowPacking, part: Any) -> int:
    """Bytes that a token takes while it is unpacked: its numbers, and its words once more."""
    heads, widths = int(part.keys.shape[1]), (packing.key_width, packing.value_width)
    return heads * sum(int(packing.numbers.size) * width + 4 * packing.words(width) for width in widths)


def _text(bits: int, packed: int, total: int) -> str:
    if not packed:
        return f"as computed: none of its {total} caches can hold {bits} bits"
    if packed < total:
        return f"{bits} bits in {packed} of {total} caches; windows, states and odd widths as computed"
    return f"{bits} bits"
