"""Layers that multiply by packed weights, in place of MLX's quantised ones."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_unflatten

from fleetd.engine.cpu import products
from fleetd.engine.cpu.arithmetic import OWN_BITS, OWN_GROUP, Kernel, kernel_for
from fleetd.engine.cpu.dequantize import unpack
from fleetd.engine.cpu.packed_product import (
    Packed,
    PackedProduct,
    each_of,
    free_unused,
    kernels,
    prepared_bytes,
    threads,
)

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

# How far a bias may be from a multiple of its scale, as a share of itself, if rounding both to their type
# made it so.
_ROUNDING = {mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7, mx.float32: 2.0**-22}


class PackedMatrix:
    """x (..., K) → (..., N) for weights that are scale · q + bias.

    Where a bias is a whole number of scales, as MLX's quantisation makes it, that is a zero point. Else what
    is left of the biases is multiplied by the sums of x over groups, in f32.
    """

    def __init__(self, layer: Any, kernel: Kernel | None) -> None:
        if kernel is None:
            raise ValueError("no exact kernel for these weights")
        packed, rest = _packed(layer, kernel)
        self._product = PackedProduct(packed, kernel)
        self._group = int(layer.group_size)
        # (groups, N), if there is any.
        self._rest = None if rest is None else mx.array(np.ascontiguousarray(rest.T))

    @property
    def nbytes(self) -> int:
        return self._product.nbytes + (0 if self._rest is None else int(self._rest.nbytes))

    def __call__(self, x: mx.array) -> mx.array:
        rows = np.array(x.astype(mx.float32), copy=False).reshape(-1, x.shape[-1])
        out = mx.array(self._product(rows)).reshape(*x.shape[:-1], -1)
        rest = self._rest
        if rest is None:
            return out
        sums = x.reshape(*x.shape[:-1], -1, self._group).sum(axis=-1)
        return out + products.row_stable(lambda each: each @ rest, sums)


class PackedLinear(nn.Module):  # type: ignore[misc]
    """``nn.Linear`` and ``nn.QuantizedLinear`` for packed weights."""

    def __init__(self, matrix: PackedMatrix, bias: mx.array | None) -> None:
        super().__init__()
        self.matrix = matrix
        if bias is not None:
            self.bias = bias

    def __call__(self, x: mx.array) -> mx.array:
        out = self.matrix(x)
        return out + self.bias if "bias" in self else out


class PackedTable:
    """The table of an embedding: as it is read, and packed once it is multiplied by, as a head."""

    def __init__(self, layer: nn.Embedding | nn.QuantizedEmbedding) -> None:
        mx.eval(layer.parameters())
        self._layer = layer
        self._matrix: PackedMatrix | None = None

    @property
    def rows(self) -> int:
        return int(self._layer.weight.shape[0])

    @property
    def nbytes(self) -> int:
        held = sum(int(array.nbytes) for _, array in tree_flatten(self._layer.parameters()))
        return held + (0 if self._matrix is None else self._matrix.nbytes)

    def rows_of(self, tokens: mx.array) -> mx.array:
        rows: mx.array = self._layer(tokens).astype(mx.float32)
        return rows

    def product(self, x: mx.array) -> mx.array:
        """x times the transposed table."""
        if self._matrix is None:
            self._matrix = _matrix(self._layer)
        return self._matrix(x)


class PackedEmbedding(nn.Module):  # type: ignore[misc]
    """``nn.Embedding`` and ``nn.QuantizedEmbedding`` for a table that is not unpacked."""

    def __init__(self, layer: nn.Embedding | nn.QuantizedEmbedding) -> None:
        super().__init__()
        self.table = PackedTable(layer)

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.table.rows_of(tokens)

    def as_linear(self, x: mx.array) -> mx.array:
        return self.table.product(x)


_LINEAR, _TABLE = (nn.Linear, nn.QuantizedLinear), (nn.Embedding, nn.QuantizedEmbedding)
TABLES = (*_TABLE, PackedEmbedding)


def table_rows(table: Any) -> int:
    """How many tokens a table of one of the kinds ``TABLES`` has a row for."""
    return table.table.rows if isinstance(table, PackedEmbedding) else int(table.weight.shape[0])


def to_int8(model: nn.Module) -> None:
    """Pack the linear layers and tables of a model for int8 products, in place, a few at a time.

    Weights that are not quantised get ``OWN_BITS``. What has no exact kernel becomes f32, and so does all
    else.
    """
    names = [name for name, layer in _leaves(model) if _kernel_of(layer) is not None]
    for at in range(0, len(names), threads()):
        layers = [_at(model, name) for name in names[at : at + threads()]]
        mx.eval([layer.parameters() for layer in layers])
        for name, made in zip(names[at:], each_of([partial(_int8, layer) for layer in layers]), strict=False):
            model.update_modules(tree_unflatten([(name, made)]))
    products.to_float32(model)
    free_unused()


def int8_bytes(model: nn.Module) -> int:
    """Bytes that the weights take after ``to_int8``; reads none of them.

    A table counts twice where there is no other head. What biases are besides zero points does not count.
    """
    leaves = _leaves(model)
    tied = not any(name.rpartition(".")[2] == "lm_head" for name, _ in leaves)
    found = products.float32_bytes(model)
    for _, layer in leaves:
        kernel = _kernel_of(layer)
        if kernel is not None:
            outputs, inputs = _shape(layer)
            prepared = prepared_bytes(outputs, inputs, kernel)
            if isinstance(layer, _TABLE):
                held = sum(int(array.nbytes) for _, array in tree_flatten(layer.parameters()))
                prepared = held + (prepared if tied else 0)
            found += prepared - 4 * outputs * inputs
    return found


def weights_bytes(model: nn.Module) -> int:
    """Bytes of a model's weights as they are now: parameters, and what is packed for products."""
    plain = sum(int(array.nbytes) for _, array in tree_flatten(model.parameters()))
    return plain + sum(each.nbytes for each in _held(model))


def _held(model: nn.Module) -> Iterator[PackedMatrix | PackedTable]:
    for _, layer in model.named_modules():
        if isinstance(layer, PackedLinear):
            yield layer.matrix
        elif isinstance(layer, PackedEmbedding):
            yield layer.table


def _leaves(model: nn.Module) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    return found


def _at(model: nn.Module, name: str) -> Any:
    """The module of this name."""
    found: Any = model
    for part in name.split("."):
        found = found[int(part)] if isinstance(found, list) else found[part]
    return found


def _shape(layer: Any) -> tuple[int, int]:
    """Outputs and inputs of a linear layer or a table."""
    outputs, inputs = layer.weight.shape
    return int(outputs), int(inputs) * 32 // int(layer.bits) if hasattr(layer, "bits") else int(inputs)


def _kernel_of(layer: nn.Module) -> Kernel | None:
    """How a layer is multiplied by in int8; None if it stays as it is."""
    if type(layer) not in (*_LINEAR, *_TABLE):
        return None
    if _is_affine(layer):
        return kernel_for(layer.bits, layer.group_size, kernels())
    if _shape(layer)[1] % OWN_GROUP:
        return None
    return kernel_for(OWN_BITS, OWN_GROUP, kernels())


def _is_affine(layer: Any) -> bool:
    return hasattr(layer, "bits") and layer.mode == "affine"


def _int8(layer: Any) -> nn.Module:
    if isinstance(layer, _TABLE):
        return PackedEmbedding(layer)
    return PackedLinear(_matrix(layer), layer.get("bias"))


def _matrix(layer: Any) -> PackedMatrix:
    """The weights of a linear layer or a table, for products."""
    if not _is_affine(layer):
        layer = _quantized(layer)
    return PackedMatrix(layer, _kernel_of(layer))


def _quantized(layer: Any) -> nn.QuantizedLinear:
    """A layer whose weights are of another kind than MLX's affine ones, with weights of ``OWN_BITS``."""
    wide = products.dequantized(layer) if hasattr(layer, "bits") else layer.weight.astype(mx.float32)
    found = nn.Linear(1, 1, bias=False)
    found.weight = wide
    packed: nn.QuantizedLinear = nn.QuantizedLinear.from_linear(found, OWN_GROUP, OWN_BITS)
    mx.eval(packed.parameters())
    return packed


def _packed(layer: Any, kernel: Kernel) -> tuple[Packed, F32 | None]:
    """The weights of a quantised layer for a kernel, and what its biases are besides zero points
    (N, groups), if anything."""
    scales, biases = (np.array(layer[part].astype(mx.float32)) for part in ("scales", "biases"))
    most = 2**kernel.bits - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        zeros = np.clip(np.rint(np.nan_to_num(-biases / scales)), 0, most).astype(np.float32)
    rest = biases + zeros * scales
    exact = bool((np.abs(rest) <= _ROUNDING[layer.scales.dtype] * np.abs(biases)).all())
    repeats = layer.group_size // kernel.block
    if repeats > 1:
        scales, zeros = np.repeat(scales, repeats, axis=1), np.repeat(zeros, repeats, axis=1)
    weights = np.ascontiguousarray(np.array(layer.weight, copy=False)).view(np.uint8)
    if layer.bits != kernel.bits:
        weights = _widened(weights, layer.bits, kernel.bits)
    packed = Packed(weights.reshape(*scales.shape, -1), scales, _nibbles(zeros.astype(np.uint8), kernel.bits))
    return packed, None if exact else rest


def _widened(weights: U8, bits: int, wider: int) -> U8:
    """Rows of packed integers in wider fields."""
    count = weights.shape[1] * 8 // bits
    q = np.empty((len(weights), count), dtype=np.float32)
    unpack(weights, bits, q)
    return _nibbles(q.astype(np.uint8), wider)


def _nibbles(q: U8, bits: int) -> U8:
    """Integers (N, count) in bytes, of 4 bits two in each, the first lowest."""
    if bits == 8:
        return q
    if q.shape[1] % 2:
        q = np.pad(q, ((0, 0), (0, 1)))
    return np.asarray(q[:, ::2] | q[:, 1::2] << 4, dtype=np.uint8)
