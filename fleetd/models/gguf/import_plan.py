"""The plan of an import: the config, the parameters and their sizes, from the headers of the files alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from fleetd import limits
from fleetd.models.gguf import blocks, families, hf_config, packing
from fleetd.models.gguf.families import FAMILIES, Family
from fleetd.models.gguf.layouts import Layout, layout_of
from fleetd.models.gguf.packing import HalfType, Packing
from fleetd.models.gguf.refusals import corrupt, unsupported
from fleetd.models.gguf.tensor_rows import StoredTensor
from fleetd.models.safetensors_write import TensorSpec


class PlannedParameter(msgspec.Struct, frozen=True):
    """A tensor of the file that becomes a parameter of mlx-lm."""

    # mlx-lm's name, with ``.weight``, ``.bias`` or neither.
    parameter: str
    # The tensor.
    stored: StoredTensor
    # The order of its numbers in mlx-lm.
    layout: Layout
    # The dtype of scales, and of numbers that are not quantised.
    dtype: HalfType
    # How MLX holds it; None for a parameter of 16 or 32 bits.
    packing: Packing | None

    @property
    def module(self) -> str:
        """mlx-lm's name of the module that has the parameter."""
        return self.parameter.rpartition(".")[0]

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """The tensors that are written for the parameter."""
        shape = self.layout.shape
        if self.packing is None:
            return (TensorSpec(self.parameter, "F32" if self.layout.exact else self.dtype, shape),)
        return [
            TensorSpec(f"{self.module}.{part}", dtype, (*shape[:-1], round(shape[-1] * share)))
            for part, dtype, share in self.packing.parts(self.dtype)
        ]

    def pieces(self) -> Iterator[Sequence[npt.NDArray[Any]]]:
        """Consecutive rows of the tensors of ``specs``. Raises ValueError if a number is not finite."""
        kind = self.stored.tensor.kind
        groups = self.layout.groups() if self.packing is not None else None
        for raw in self.stored.slices(self.layout.rows):
            try:
                if self.packing is not None:
                    yield packing.pack(kind, raw, self.packing, self.dtype, groups)
                else:
                    yield (self._plain(blocks.values(kind, raw)),)
            except ValueError as error:
                raise ValueError(f"the tensor {self.stored.tensor.name!r}: {error}") from None

    @np.errstate(over="ignore", invalid="ignore")  # the result is checked
    def _plain(self, wide: blocks.Floats) -> npt.NDArray[Any]:
        if self.layout.columns is not None:
            wide = wide[:, self.layout.columns]
        if self.layout.values is not None:
            wide = self.layout.values(wide)
        if not self.layout.exact:
            return packing.half(wide, self.dtype)
        if not np.isfinite(wide).all():
            raise ValueError("a number is not one")
        return wide


class ImportPlan(msgspec.Struct, frozen=True):
    """What an import will write."""

    # config.json without the tokens that begin a text and end an answer.
    config: Mapping[str, Any]
    # All parameters of the model.
    parameters: Sequence[PlannedParameter]

    @property
    def size_bytes(self) -> int:
        """Bytes of all parameters together."""
        return sum(spec.size_bytes for planned in self.parameters for spec in planned.specs)


def plan_import(metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor], what: str) -> ImportPlan:
    """The plan with the most precise packing that keeps the model near the size of its file.

    Raises:
        ModelCorrupt: a value or a shape is impossible.
        ModelUnsupported: the architecture, or this variant of it, cannot be imported.
    """
    arch = hf_config.architecture(metadata, what)
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.tensor.shape) != 2:
        raise corrupt(what, "it has no embedding")
    rope = {name: _numbers(tensors[name], what) for name in sorted(families.ROPE_TENSORS & tensors.keys())}
    facts = hf_config.FileFacts({name: stored.tensor.shape for name, stored in tensors.items()}, rope)
    config = hf_config.build(metadata, facts, what)
    family, layers = FAMILIES[arch], hf_config.layers_of(metadata, what)
    placed = list(_placed(tensors, family, config, layers, metadata, what))
    in_file = sum(stored.tensor.size_bytes for _, stored, _ in placed)
    plan = ImportPlan(config, [_planned(*item, family.dtype, small=False) for item in placed])
    if plan.size_bytes > limits.GGUF_GROWTH * in_file:
        plan = ImportPlan(config, [_planned(*item, family.dtype, small=True) for item in placed])
    return ImportPlan({**config, **_quantisation(plan.parameters)}, plan.parameters)


def _placed(
    tensors: Mapping[str, StoredTensor],
    family: Family,
    config: Mapping[str, Any],
    layers: int,
    metadata: Mapping[str, Any],
    what: str,
) -> Iterator[tuple[str, StoredTensor, Layout]]:
    """Each tensor with the name and the layout of its parameter."""
    for name, stored in tensors.items():
        block = families.block_of(name)
        if name in families.ROPE_TENSORS or (block is not None and block >= layers):
            continue  # the config has it; or its block predicts further tokens
        parameter = families.parameter_of(family, name)
        if parameter is None:
            raise unsupported(
                what, f"has a tensor {name!r} that its architecture is not known to have.", metadata
            )
        try:
            layout = layout_of(family, parameter, stored.tensor.shape, config)
        except ValueError as error:
            raise corrupt(what, f"{name!r}: {error}") from None
        yield parameter, stored, layout
        if name == "token_embd.weight" and family.own_head and "output.weight" not in tensors:
            yield f"{family.root}lm_head.weight", stored, layout


def _planned(
    parameter: str, stored: StoredTensor, layout: Layout, dtype: HalfType, *, small: bool
) -> PlannedParameter:
    tensor = stored.tensor
    # A norm or a convolution is no matrix to MLX, whatever it is to the quantiser.
    matrix = parameter.endswith(".weight") and len(tensor.shape) > 1 and layout.values is None
    chosen = None
    if matrix and tensor.kind in packing.PACKED and layout.shape[-1] == tensor.shape[-1]:
        chosen = packing.packing_of(tensor.kind, tensor.shape[-1], small=small)
    return PlannedParameter(parameter, stored, layout, dtype, chosen)


def _numbers(stored: StoredTensor, what: str) -> list[float]:
    if math.prod(stored.tensor.shape) > limits.GGUF_ROPE_FACTORS:
        raise corrupt(what, f"{stored.tensor.name!r} has the shape {stored.tensor.shape}")
    raw = np.concatenate(list(stored.slices()))
    return [float(value) for value in blocks.values(stored.tensor.kind, raw).ravel()]


def _quantisation(parameters: Sequence[PlannedParameter]) -> dict[str, Any]:
    """The commonest packing is the default; the others are named one by one."""
    used = {planned.module: planned.packing for planned in parameters if planned.packing is not None}
    if not used:
        return {}
    counts = list(used.values())
    default = max(sorted(set(counts), key=lambda one: (one.bits, one.group, one.mode)), key=counts.count)
    section: dict[str, Any] = default.settings()
    section |= {module: chosen.settings() for module, chosen in sorted(used.items()) if chosen != default}
    return {"quantization": section}
