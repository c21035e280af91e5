"""What each layer of a stage keeps of a prompt, and how many numbers a token has between layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import mlx.core as mx
import msgspec
from mlx.utils import tree_flatten
from msgspec.structs import replace

from fleetd.engine.layers.stage import Stage
from fleetd.engine.sequence_state.kinds import kind_of
from fleetd.engine.sequence_state.parts import arrays, parts
from fleetd.engine.sequence_state.row_packing import RowPacking
from fleetd.engine.sequence_state.shapes import KvShape, PackedShape, PartShape, RunningShape


class KvLayout(msgspec.Struct, frozen=True):
    """The caches of layers ``first`` and following, and what lies between them, (B, T, width): hidden states,
    or what ``between_layers`` packs."""

    first: int
    layers: tuple[tuple[PartShape, ...], ...]
    width: int
    dtype: mx.Dtype

    @classmethod
    def of(cls, stage: Stage) -> KvLayout:
        """Found out by running one hidden state through the layers; costs what a token costs."""
        stage = stage.prefilling
        if stage.first == 0:
            hidden = stage.embed(mx.array([[0]]))
        else:
            hidden = mx.zeros((1, 1, stage.width), _float_dtype(stage))
        caches = stage.make_caches()
        out = stage.run(hidden, caches, stage.inputs(mx.array([[0]]), 0))
        mx.eval(arrays(caches), out)
        # A stage keeps no quantised rows.
        shapes = tuple(
            tuple(cast("PartShape", kind_of(part).shape(part)) for part in parts(cache)) for cache in caches
        )
        return cls(stage.first, shapes, int(out.shape[-1]), out.dtype)

    def with_kv_bits(self, bits: int) -> KvLayout:
        """The same of caches whose rows are held in ``bits`` bits where they can be; 0 is as computed."""
        return replace(self, layers=tuple(tuple(_held(s, bits) for s in each) for each in self.layers))

    def on_wire(self, bits: int) -> KvLayout:
        """What crosses a link of it if rows are sent in ``bits`` bits; 0 is as they are held.

        Rows that are held quantised, windows and running states are sent as they are held.
        """
        return replace(self, layers=tuple(tuple(_sent(s, bits) for s in each) for each in self.layers))

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's rows, over all layers here."""
        return sum(sum(shape.sizes(1)) for each in self.layers for shape in each if shape.in_rows)

    @property
    def packings(self) -> list[list[RowPacking | None]]:
        """How the rows of each part are held, for each layer that keeps something."""
        return [
            [s.packing if isinstance(s, PackedShape) else None for s in each] for each in self.layers if each
        ]

    def kept_bytes(self, layers: Iterable[int], tokens: int) -> int:
        """Bytes of what these layers keep of ``tokens``."""
        found = 0
        for shape in (shape for index in layers for shape in self.parts(index)):
            if isinstance(shape, RunningShape):
                found += shape.nbytes
            else:
                found += sum(shape.sizes(min(tokens, shape.window) if shape.window else tokens))
        return found

    def parts(self, layer: int) -> tuple[PartShape, ...]:
        """The shapes of what a layer keeps, by its number in the whole model."""
        return self.layers[layer - self.first]

    def keeps_states(self, layers: Iterable[int]) -> bool:
        """True if one of these layers keeps anything without a row per token: it cannot be cut at a token."""
        return any(not shape.in_rows for index in layers for shape in self.parts(index))

    def keeps_running(self, layers: Iterable[int]) -> bool:
        """True if one of these layers keeps a running state: not even its last tokens can be taken back."""
        return any(isinstance(shape, RunningShape) for index in layers for shape in self.parts(index))

    @property
    def state_bytes(self) -> int:
        """Bytes that the layers keep whatever a prompt's length: running states."""
        return sum(shape.nbytes for each in self.layers for shape in each if isinstance(shape, RunningShape))

    def whole_bytes(self, tokens: int) -> int:
        """Bytes of what the layers keep of ``tokens`` without a row for each: running states and windows."""
        found = self.state_bytes
        for shape in (shape for each in self.layers for shape in each):
            if isinstance(shape, KvShape) and shape.window:
                found += sum(shape.sizes(min(tokens, shape.window)))
        return found

    def hidden_bytes(self, tokens: int) -> int:
        return tokens * self.width * int(self.dtype.size)


def _held(shape: PartShape, bits: int) -> PartShape:
    """The shape of the same cache if its rows are held in ``bits`` bits, or as computed if they cannot be."""
    if isinstance(shape, PackedShape):
        own = shape.packing
        shape = KvShape(shape.heads, own.key_width, own.value_width, own.numbers)
    if not isinstance(shape, KvShape) or shape.window:
        return shape
    packing = RowPacking.of(bits, shape.key_width, shape.value_width, shape.dtype)
    return shape if packing is None else PackedShape.of(shape.heads, packing)


def _sent(shape: PartShape, bits: int) -> PartShape:
    return shape if isinstance(shape, PackedShape) else _held(shape, bits)


def _float_dtype(stage: Stage) -> mx.Dtype:
    """The dtype of most of the weights that are not packed integers."""
    nbytes: dict[mx.Dtype, int] = {}
    for _, array in tree_flatten(stage.weights.parameters()):
        if mx.issubdtype(array.dtype, mx.floating):
            nbytes[array.dtype] = nbytes.get(array.dtype, 0) + array.nbytes
    return max(nbytes, key=lambda dtype: nbytes[dtype])
