"""Layers that multiply by packed weights, in place of MLX's, and how a model gets them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import llama
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from fleetd.engine.cpu import computed, products, row_functions
from fleetd.engine.cpu.affine_weights import Affine
from fleetd.engine.cpu.arithmetic import Kernel, kernel_for
from fleetd.engine.cpu.packed_product import (
    Packed,
    PackedProduct,
    each_of,
    free_unused,
    kernels,
    threads,
)
from fleetd.engine.cpu.unread_logits import Unread, are_unread
from fleetd.models.cpu_arithmetic import OWN_BITS, OWN_GROUP, prepared_bytes, weight_bytes
from fleetd.models.memory_need import TOKEN_TABLES

F32 = npt.NDArray[np.float32]

_LINEAR, _TABLE = (nn.Linear, nn.QuantizedLinear), (nn.Embedding, nn.QuantizedEmbedding)


# How mlx-lm calls linear layers of a block that are given the same input.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class PackedLinear(nn.Module):  # type: ignore[misc]
    """``nn.Linear`` and ``nn.QuantizedLinear`` for packed weights.

    ``behind_caches``: what it computes ends in logits, or in the last layer's states, and in no cache.
    """

    def __init__(
        self, products: Together, index: int, bias: mx.array | None, *, behind_caches: Unread = ""
    ) -> None:
        super().__init__()
        self.products, self.index, self.behind_caches = products, index, behind_caches
        if bias is not None:
            self.bias = bias

    def __call__(self, x: mx.array) -> mx.array:
        if are_unread(self.behind_caches):
            return mx.zeros((*x.shape[:-1], self.products.outputs(self.index)))
        out = self.products.of(self.index, x)
        return out + self.bias if "bias" in self else out


class Together:
    """Products of one or several linear layers with the same input, of which one run makes all."""

    def __init__(self, matrices: Sequence[Packed]) -> None:
        self._product = PackedProduct(Packed.stacked(matrices))
        self._ends = list(itertools.accumulate(each.outputs for each in matrices))
        # The last input, and what is not asked for yet. Replaced as one: several threads may compute with it.
        self._last: tuple[mx.array, dict[int, mx.array]] | None = None

    @property
    def nbytes(self) -> int:
        return self._product.nbytes

    def outputs(self, index: int) -> int:
        return self._ends[index] - (self._ends[index - 1] if index else 0)

    def all_of(self, rows: F32) -> F32:
        """rows (rows, K) times all matrices, side by side."""
        return self._product(rows)

    @property
    def count(self) -> int:
        return len(self._ends)

    def of(self, index: int, x: mx.array) -> mx.array:
        """x (..., K) times the matrix at ``index``."""
        if len(self._ends) == 1:
            return _product(self._product, x)
        last = self._last
        if last is None or last[0] is not x or index not in last[1]:
            given = _view(x)
            out = self._product(given.reshape(-1, given.shape[-1])).reshape(*given.shape[:-1], -1)
            each = itertools.pairwise([0, *self._ends])
            last = x, {at: computed.array(out[..., first:end]) for at, (first, end) in enumerate(each)}
        found = last[1].pop(index)
        self._last = last if last[1] else None
        return found


class GatedMlp(nn.Module):  # type: ignore[misc]
    """The class that ``llama.MLP`` and its likes get: the same numbers, without MLX between the products."""

    def __call__(self, x: mx.array) -> mx.array:
        if are_unread(self.down_proj.behind_caches):
            return mx.zeros(x.shape)
        given = _view(x)
        both = self.gate_proj.products.all_of(given.reshape(-1, given.shape[-1]))
        half = both.shape[1] // 2
        gate, up = both[:, :half], both[:, half:]
        out = self.down_proj.products.all_of(row_functions.swiglu(gate, up))
        return computed.array(out.reshape(given.shape))


class PackedExperts(nn.Module):  # type: ignore[misc]
    """``QuantizedSwitchLinear`` for packed weights, a matrix for each expert."""

    def __init__(self, matrices: Sequence[PackedProduct], bias: mx.array | None) -> None:
        super().__init__()
        self.experts = Experts(matrices)
        if bias is not None:
            self.bias = bias

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """x (..., M, K) by the matrices of ``indices`` → (..., M, N); their shapes are broadcast."""
        out = self.experts.product(_view(x), np.array(indices, copy=False))
        return out + mx.expand_dims(self.bias[indices], -2) if "bias" in self else out


class Experts:
    """Matrices of the same shape."""

    def __init__(self, matrices: Sequence[PackedProduct]) -> None:
        self.matrices = matrices

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.matrices)

    def product(self, x: F32, indices: npt.NDArray[Any]) -> mx.array:
        shape = np.broadcast_shapes(x.shape[:-2], indices.shape)
        rows = np.broadcast_to(x, (*shape, *x.shape[-2:])).reshape(-1, *x.shape[-2:])
        chosen = np.broadcast_to(indices, shape).reshape(-1)
        out = np.empty((*rows.shape[:-1], self.matrices[0].outputs), dtype=np.float32)
        for expert in np.unique(chosen):
            places = np.flatnonzero(chosen == expert)
            given = rows[places].reshape(-1, rows.shape[-1])
            out[places] = self.matrices[expert](given).reshape(len(places), *out.shape[1:])
        return computed.array(out.reshape(*shape, *out.shape[1:]))


class PackedEmbedding(nn.Module):  # type: ignore[misc]
    """``nn.Embedding`` and ``nn.QuantizedEmbedding`` for a table that is not unpacked."""

    def __init__(self, layer: nn.Embedding | nn.QuantizedEmbedding) -> None:
        super().__init__()
        self.table = PackedTable(layer)

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.table.rows_of(tokens)

    def as_linear(self, x: mx.array) -> mx.array:
        if are_unread():
            return mx.zeros((*x.shape[:-1], self.table.rows))
        return _product(self.table.matrix, x)


class PackedTable:
    """The table of an embedding: as it is read, and packed once it is multiplied by, as a head."""

    def __init__(self, layer: nn.Embedding | nn.QuantizedEmbedding) -> None:
        self._layer = layer
        self._matrix: PackedProduct | None = None

    @property
    def rows(self) -> int:
        return int(self._layer.weight.shape[0])

    @property
    def nbytes(self) -> int:
        return _nbytes(self._layer) + (0 if self._matrix is None else self._matrix.nbytes)

    def rows_of(self, tokens: mx.array) -> mx.array:
        rows: mx.array = self._layer(tokens).astype(mx.float32)
        return rows

    @property
    def matrix(self) -> PackedProduct:
        if self._matrix is None:
            layer = self._layer
            weights = Affine.of(layer if _is_affine(layer) else _quantized(layer))
            self._matrix = PackedProduct(weights.packed(_kernel_of(layer)))
        return self._matrix


TABLES = (*_TABLE, PackedEmbedding)


def table_rows(table: Any) -> int:
    """How many tokens a table of one of the kinds ``TABLES`` has a row for."""
    return table.table.rows if isinstance(table, PackedEmbedding) else int(table.weight.shape[0])


def to_int8(model: nn.Module, *, plain: bool) -> None:
    """Pack the layers and tables of a model for products in int8, in place, a few at a time.

    What has no exact kernel becomes f32, and so does all else; experts that are not affine stay MLX's.

    Args:
        plain: weights that are not quantised get ``OWN_BITS``. Where others are, their publisher left them
            as they are.
    """
    runs = _runs(_packable(model, plain=plain))
    # Some layers of a model, which are no model to be called, end in layers on other machines.
    behind = partial(_behind_caches, len(getattr(model, "layers", ())) if callable(model) else 0)
    for at in range(0, len(runs), threads()):
        some = runs[at : at + threads()]
        layers = [[_at(model, name) for name in names] for names in some]
        mx.eval([layer.parameters() for each in layers for layer in each])
        # MLX computes in this thread only: it leaves threads behind in any other.
        tasks = [
            partial(_int8, each, [_affine(layer) for layer in each], behind_caches=behind(names[0]))
            for names, each in zip(some, layers, strict=True)
        ]
        for names, made in zip(some, each_of(tasks), strict=True):
            model.update_modules(tree_unflatten(list(zip(names, made, strict=True))))
    for _, module in model.named_modules():
        if _is_gated_mlp(module):
            module.__class__ = GatedMlp
    products.to_float32(model)
    free_unused()


def _is_gated_mlp(module: Any) -> bool:
    """True of a module that computes what ``llama.MLP`` does, with packed weights and no biases."""
    call, known = type(module).__call__, llama.MLP.__call__
    code = getattr(call, "__code__", None)
    if code is None or (code.co_code, code.co_names) != (known.__code__.co_code, known.__code__.co_names):
        return False
    if call.__globals__["swiglu"] is not known.__globals__["swiglu"]:
        return False
    layers = [module.get(name) for name in ("gate_proj", "up_proj", "down_proj")]
    if any(type(layer) is not PackedLinear or "bias" in layer for layer in layers):
        return False
    gate, up, down = layers
    return gate.products is up.products and gate.products.count == 2 and down.products.count == 1


def int8_bytes(model: nn.Module, *, plain: bool, tied: bool) -> int:
    """Bytes that the weights take after ``to_int8``; reads none of them.

    What biases are besides zero points does not count.

    Args:
        plain: as of ``to_int8``.
        tied: the table of tokens is the head, too, and is there twice once that was used.
    """
    found = products.float32_bytes(model)
    for name, layer in _packable(model, plain=plain).items():
        kernel = _kernel_of(layer)
        outputs, inputs = _shape(layer)
        packed = _packed_bytes(layer, outputs * inputs, kernel)
        if isinstance(layer, QuantizedSwitchLinear):
            # The other sum has them as they are, with scales in f32.
            found += packed - layer.weight.nbytes - 4 * (layer.scales.size + layer.biases.size)
        elif isinstance(layer, _TABLE):
            is_head = tied and name.rpartition(".")[2] in TOKEN_TABLES
            found += _nbytes(layer) + packed * is_head - 4 * outputs * inputs
        else:
            found += packed - 4 * outputs * inputs
    return int(found)


def _packed_bytes(layer: Any, weights: int, kernel: Kernel) -> int:
    """The most bytes of a layer's weights, packed for products."""
    if not _is_affine(layer):
        return prepared_bytes(weights, kernel.bits, kernel.block)
    return weight_bytes(weights, bits=layer.bits, group=layer.group_size, block=kernel.block)


def weights_bytes(model: nn.Module) -> int:
    """Bytes of a model's weights as they are now: parameters, and what is packed for products."""
    return _nbytes(model) + sum({id(each): each.nbytes for each in _held(model)}.values())


def _held(model: nn.Module) -> Iterator[Together | PackedTable | Experts]:
    for _, layer in model.named_modules():
        match layer:
            case PackedLinear():
                yield layer.products
            case PackedEmbedding():
                yield layer.table
            case PackedExperts():
                yield layer.experts


def _nbytes(model: nn.Module) -> int:
    return sum(int(array.nbytes) for _, array in tree_flatten(model.parameters()))


def _packable(model: nn.Module, *, plain: bool) -> dict[str, Any]:
    """The layers that are packed, by their names."""
    kinds = (*_LINEAR, *_TABLE, QuantizedSwitchLinear)
    leaves = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    return {
        name: layer
        for name, layer in leaves
        if type(layer) in kinds and (plain or hasattr(layer, "bits")) and _exact_kernel(layer) is not None
    }


def _runs(layers: Mapping[str, Any]) -> list[list[str]]:
    """Names of layers, those together that one run multiplies by."""
    runs, taken = [], set()
    for name in layers:
        block = name.removesuffix(name.rpartition(".")[2])
        names = next(
            (
                found
                for several in _TOGETHER
                if name in (found := [f"{block}{each}" for each in several])
                and all(type(layers.get(each)) in _LINEAR for each in found)
                and len({(_kernel_of(layers[each]), _form(layers[each])) for each in found}) == 1
            ),
            [name],
        )
        if name not in taken:
            runs.append(names)
            taken.update(names)
    return runs


def _form(layer: Any) -> tuple[int, int]:
    """Inputs, and how many of them share a scale."""
    return _shape(layer)[1], int(layer.group_size) if _is_affine(layer) else OWN_GROUP


def _at(model: nn.Module, name: str) -> Any:
    """The module of this name."""
    found: Any = model
    for part in name.split("."):
        found = found[int(part)] if isinstance(found, list) else found[part]
    return found


def _shape(layer: Any) -> tuple[int, int]:
    """Outputs, of all experts, and inputs of a layer or a table."""
    *several, inputs = layer.weight.shape
    outputs = int(np.prod(several))
    return outputs, int(inputs) * 32 // int(layer.bits) if hasattr(layer, "bits") else int(inputs)


def _kernel_of(layer: Any) -> Kernel:
    kernel = _exact_kernel(layer)
    if kernel is None:
        raise ValueError("no exact kernel for these weights")
    return kernel


def _exact_kernel(layer: Any) -> Kernel | None:
    """How a layer is multiplied by in int8; None if there is no exact way."""
    if _is_affine(layer):
        return kernel_for(layer.bits, layer.group_size, kernels())
    if isinstance(layer, QuantizedSwitchLinear) or _shape(layer)[1] % OWN_GROUP:
        return None
    return kernel_for(OWN_BITS, OWN_GROUP, kernels())


def _is_affine(layer: Any) -> bool:
    return hasattr(layer, "bits") and layer.mode == "affine"


def _behind_caches(layers: int, name: str) -> Unread:
    """What a layer of this name computes, in a model of so many, that ends in no cache; "" if nothing."""
    if name.rpartition(".")[2] == "lm_head":
        return "logits"
    return "states" if f"layers.{layers - 1}.mlp." in name else ""


def _int8(
    layers: Sequence[Any], weights: Sequence[Affine | None], *, behind_caches: Unread
) -> list[nn.Module]:
    """The layers that take the place of those of a run; computes nothing with MLX."""
    first, affine = layers[0], [each for each in weights if each is not None]
    if not affine:
        return [PackedEmbedding(first)]
    kernel = _kernel_of(first)
    if isinstance(first, QuantizedSwitchLinear):
        (several,) = affine
        each = (several[at] for at in range(len(several.scales)))
        return [PackedExperts([PackedProduct(one.packed(kernel)) for one in each], first.get("bias"))]
    together = Together([each.packed(kernel) for each in affine])
    return [
        PackedLinear(together, at, layer.get("bias"), behind_caches=behind_caches)
        for at, layer in enumerate(layers)
    ]


def _affine(layer: Any) -> Affine | None:
    """The weights of an evaluated layer; None of a table, which is packed when it is first multiplied by."""
    if isinstance(layer, _TABLE):
        return None
    return Affine.of(layer if _is_affine(layer) else _quantized(layer))


def _quantized(layer: Any) -> nn.QuantizedLinear:
    """A layer whose weights are of another kind than MLX's affine ones, with weights of ``OWN_BITS``."""
    plain = nn.Linear(1, 1, bias=False)
    plain.weight = products.dequantized(layer) if hasattr(layer, "bits") else layer.weight.astype(mx.float32)
    packed: nn.QuantizedLinear = nn.QuantizedLinear.from_linear(plain, OWN_GROUP, OWN_BITS)
    mx.eval(packed.parameters())
    return packed


def _product(matrix: PackedProduct, x: mx.array) -> mx.array:
    """(..., K) → (..., N)."""
    given = _view(x)
    # No operation of MLX's: each would be one more thing to evaluate.
    return computed.array(matrix(given.reshape(-1, given.shape[-1])).reshape(*given.shape[:-1], -1))


def _view(x: mx.array) -> F32:
    """An array as f32, without a copy if it is that; evaluates it."""
    found: F32 = computed.view(x if x.dtype == mx.float32 else x.astype(mx.float32))
    return found
