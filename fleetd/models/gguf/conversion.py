"""Turn a GGUF file into a folder that mlx-lm loads: config, weights, tokenizer, chat template.

Weights stay quantised (packing); what is not quantised gets 16 bits. One slice of a tensor is in memory at a
time. Nothing in the file is believed before header has checked it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from fleetd import limits
from fleetd.errors import FleetError, ModelCorrupt
from fleetd.models.gguf import blocks, families, hf_config, packing
from fleetd.models.gguf import tokenizer as gguf_tokenizer
from fleetd.models.gguf.families import FAMILIES, Family
from fleetd.models.gguf.layouts import Layout, layout_of
from fleetd.models.gguf.packing import HalfType, Packing
from fleetd.models.gguf.refusals import corrupt, unsupported
from fleetd.models.gguf.tensor_rows import StoredTensor, opened
from fleetd.models.safetensors_write import Planned, TensorSpec, write_safetensors

Progress = Callable[[int, int], None]


def import_gguf(
    source: Path,
    target: Path,
    *,
    what: str | None = None,
    generation: Mapping[str, float] = MappingProxyType({}),
    progress: Progress = lambda done, total: None,
) -> None:
    """Write the model in ``source`` into the existing, empty folder ``target``.

    Args:
        source: the file, or the first of the files that the model is spread over.
        what: how messages call the file; its name by default.
        generation: recommended sampling, for generation_config.json.
        progress: called with bytes of weights written and to write.

    Raises:
        ModelCorrupt: the file is damaged or malformed.
        ModelUnsupported: a sound file of something that cannot be imported.
        OSError: reading or writing failed.
    """
    what = what or source.name
    try:
        with opened(source, what) as (header, tensors):
            _write(header.metadata, tensors, target, what, generation, progress)
    except (FleetError, OSError, MemoryError):
        raise
    except Exception as error:  # every number and text in the file is the publisher's
        raise ModelCorrupt(
            f"{what} could not be imported: {error}.", hint="Download the file again."
        ) from error


def _write(
    metadata: Mapping[str, Any],
    tensors: dict[str, StoredTensor],
    target: Path,
    what: str,
    generation: Mapping[str, float],
    progress: Progress,
) -> None:
    arch = hf_config.architecture(metadata, what)
    tokenizer = gguf_tokenizer.build(metadata, what)
    embedding = tensors.get("token_embd.weight")
    shape = embedding.tensor.shape if embedding is not None else ()
    if len(shape) != 2 or shape[0] < tokenizer.vocab_size:
        raise corrupt(what, f"it has no embedding for its {tokenizer.vocab_size} tokens")
    rope = {name: _numbers(tensors[name]) for name in sorted(families.ROPE_TENSORS) if name in tensors}
    facts = hf_config.FileFacts({name: stored.tensor.shape for name, stored in tensors.items()}, rope)
    config = hf_config.build(metadata, facts, what)
    plans = _plans(tensors, FAMILIES[arch], config, hf_config.layers_of(metadata, what), metadata, what)
    config |= _quantisation(plans)
    ending_ids: Any = list(tokenizer.eos_token_ids)
    config |= {"eos_token_id": ending_ids, "bos_token_id": tokenizer.bos_token_id}
    write_safetensors(target / "model.safetensors", plans, progress)
    (target / "tokenizer.json").write_text(tokenizer.tokenizer_json, encoding="utf-8")
    _json(target / "tokenizer_config.json", tokenizer.tokenizer_config)
    _json(
        target / "generation_config.json",
        {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": ending_ids, **generation},
    )
    _json(target / "config.json", config)


def _numbers(stored: StoredTensor) -> list[float]:
    raw = np.concatenate(list(stored.slices()))
    return [float(value) for value in blocks.values(stored.tensor.kind, raw).ravel()]


# ---- The plan --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _PlannedParameter:
    """A tensor of the file on its way to a parameter of mlx-lm.

    Attributes:
        packing: how MLX holds it; None for a parameter of 16 or 32 bits.
    """

    parameter: str
    stored: StoredTensor
    layout: Layout
    dtype: HalfType
    packing: Packing | None

    @property
    def module(self) -> str:
        return self.parameter.rpartition(".")[0]

    @property
    def specs(self) -> Sequence[TensorSpec]:
        shape = self.layout.shape
        if self.packing is None:
            return (TensorSpec(self.parameter, "F32" if self.layout.exact else self.dtype, shape),)
        return [
            TensorSpec(f"{self.module}.{part}", dtype, (*shape[:-1], round(shape[-1] * share)))
            for part, dtype, share in self.packing.parts(self.dtype)
        ]

    def pieces(self) -> Iterator[Sequence[npt.NDArray[Any]]]:
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

    def _plain(self, wide: blocks.Floats) -> npt.NDArray[Any]:
        with np.errstate(over="ignore"):  # what comes of it is looked at
            return self._unpacked(wide)

    def _unpacked(self, wide: blocks.Floats) -> npt.NDArray[Any]:
        if self.layout.columns is not None:
            wide = wide[:, self.layout.columns]
        if self.layout.values is not None:
            wide = self.layout.values(wide)
        if not self.layout.exact:
            return packing.half(wide, self.dtype)
        if not np.isfinite(wide).all():
            raise ValueError("a number is not one")
        return wide


def _plans(
    tensors: Mapping[str, StoredTensor],
    family: Family,
    config: Mapping[str, Any],
    layers: int,
    metadata: Mapping[str, Any],
    what: str,
) -> list[Planned]:
    """What to write, with the most precise packing that keeps the model near the size of its file."""
    found: list[tuple[str, StoredTensor, Layout]] = []
    for name, stored in tensors.items():
        block = families.block_of(name)
        if name in families.ROPE_TENSORS or (block is not None and block >= layers):
            continue  # in the config; or of blocks that predict further tokens
        parameter = families.parameter_of(family, name)
        if parameter is None:
            raise unsupported(
                what, f"has a tensor {name!r} that its architecture is not known to have.", metadata
            )
        layout = layout_of(family, parameter, stored.tensor.shape, config)
        found.append((parameter, stored, layout))
        if name == "token_embd.weight" and family.own_head and "output.weight" not in tensors:
            found.append((f"{family.root}lm_head.weight", stored, layout))
    in_file = sum(stored.tensor.size_bytes for _, stored, _ in found)
    plans: list[_PlannedParameter] = []
    for small in (False, True):
        plans = [_planned(*item, family.dtype, small=small) for item in found]
        size = sum(spec.size_bytes for plan in plans for spec in plan.specs)
        if size <= limits.GGUF_GROWTH * in_file:
            break
    return list(plans)


def _planned(
    parameter: str, stored: StoredTensor, layout: Layout, dtype: HalfType, *, small: bool
) -> _PlannedParameter:
    tensor = stored.tensor
    # A norm or a convolution is no matrix to MLX, whatever it is to the quantiser.
    matrix = parameter.endswith(".weight") and len(tensor.shape) > 1 and layout.values is None
    chosen = None
    if matrix and tensor.kind in packing.PACKED and layout.shape[-1] == tensor.shape[-1]:
        chosen = packing.packing_of(tensor.kind, tensor.shape[-1], small=small)
    return _PlannedParameter(parameter, stored, layout, dtype, chosen)


def _quantisation(plans: Sequence[Any]) -> dict[str, Any]:
    """The commonest packing is the default; the others are named one by one."""
    used = {plan.module: plan.packing for plan in plans if plan.packing is not None}
    if not used:
        return {}
    counts = list(used.values())
    default = max(sorted(set(counts), key=lambda one: one.bits), key=counts.count)
    section: dict[str, Any] = default.settings()
    section |= {module: chosen.settings() for module, chosen in sorted(used.items()) if chosen != default}
    return {"quantization": section}


def _json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
