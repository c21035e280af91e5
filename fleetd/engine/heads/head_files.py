"""The MTP head that lies beside a model's weights: found by the names of its tensors, and read.

mlx-lm drops such tensors when it reads a model. Here they are read apart from it, each when something is
computed from it. A file ``mtp.safetensors`` in the model's folder goes before what is in the model's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from fleetd.engine.heads.mtp_head import MtpHead
from fleetd.errors import ModelUnsupported
from fleetd.models.heads import FAMILIES, LAYER, MODULES, HeadNames, sidecar
from fleetd.models.safetensors_header import read_header
from fleetd.models.weights import weight_files

# A norm's name, by which mlx-lm's ``sanitize`` knows that some publishers write it less by one.
_NORM_SUFFIX = ".input_layernorm.weight"


# Norms begin as 1, and stay near it; less by one they stay near 0. And a convolution as publishers have it.
_RAW_NORM, _RAW_CONVOLUTION = 0.5, (8, 1, 4)
# Copies of the model's own embedding and output head, which some publishers add.
_COPIES = ("shared_head.head.", "embed_tokens.")


def read_head(folder: Path, model: Any) -> MtpHead | None:
    """The head in a model's folder, its weights not read yet; None if there is none.

    Args:
        model: as mlx-lm has built it from the files.

    Raises:
        ModelUnsupported: there is one, and it does not belong to this model, or cannot be called.
        ModelCorrupt: the file of its own cannot be read.
    """
    beside = sidecar(folder)
    files = [beside] if beside is not None else weight_files(folder)
    for family in FAMILIES:
        prefix = family.begins(len(model.layers))
        tensors = {prefix.sub("", name, 1): array for name, array in _tensors(files, prefix)}
        if any(name.startswith(tuple(family.modules)) for name in tensors):
            try:
                return _made(model, family, tensors, None if beside is not None else _convolution(files))
            except (KeyError, TypeError, ValueError) as error:
                raise ModelUnsupported(
                    f"Its tensors are not those of a head of this model: {error}"
                ) from error
    return None


def read_lone_head(folder: Path, model: Any) -> MtpHead:
    """The head that is all of a folder's weights, read by ``read_drafter``; raises as that.

    Its tensors have Qwen's names, with or without ``mtp.``. Some of those who took them out of a publisher's
    files left the norms less by one, as they are there; others did not. The norms themselves tell.
    """
    found = dict(_tensors(weight_files(folder), re.compile("")))
    tensors = {name.removeprefix("mtp."): array for name, array in found.items()}
    norms = [array for name, array in tensors.items() if array.ndim == 1 and "norm" in name]
    if not norms:
        raise ValueError("it has no norms")
    raw = float(mx.mean(mx.concatenate([norm.astype(mx.float32) for norm in norms]))) < _RAW_NORM
    return _made(model, FAMILIES[0], tensors, mx.zeros(_RAW_CONVOLUTION) if raw else None)


def _made(model: Any, family: HeadNames, tensors: dict[str, mx.array], witness: mx.array | None) -> MtpHead:
    draft_tokens = tensors.pop("draft_tokens", None)
    weights = _as_mlx_has_it(model, _named(family, tensors), witness)
    if family.hidden_first:
        weights = {
            name: _swapped(array) if name.startswith("fc.") else array for name, array in weights.items()
        }
    head = MtpHead(model, draft_tokens, feeds_normed=family.feeds_normed)
    nn.quantize(head, class_predicate=lambda name, module: packing(name, module, weights))
    own = {name: array for name, array in weights.items() if not name.startswith("lm_head.")}
    rows = [(f"lm_head.{name}", array) for name, array in head.get("lm_head", {}).items()]
    head.load_weights([*own.items(), *rows], strict=True)
    return head


def _tensors(files: Iterable[Path], prefix: re.Pattern[str]) -> Iterable[tuple[str, mx.array]]:
    """Names and arrays of the tensors of ``files`` that begin so; nothing is read of other files."""
    for file in files:
        found = [name for name in read_header(file) if prefix.match(name)]
        arrays: Any = mx.load(str(file)) if found else {}
        yield from ((name, arrays[name]) for name in found)


def _convolution(files: Iterable[Path]) -> mx.array | None:
    """A convolution of the model, by whose shape mlx-lm tells whether files are the publisher's own."""
    return next((array for _, array in _tensors(files, re.compile(r".*conv1d\.weight$"))), None)


def _named(family: HeadNames, tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """The tensors under the names that ``MtpHead`` has for them."""
    named = {}
    for name, array in tensors.items():
        module, _, part = name.rpartition(".")
        if module in family.modules:
            named[f"{family.modules[module]}.{part}"] = array
        elif name.startswith(family.layer) and not name.startswith(_COPIES):
            named[LAYER + name.removeprefix(family.layer)] = array
    return named


def _as_mlx_has_it(
    model: Any, named: Mapping[str, mx.array], witness: mx.array | None
) -> dict[str, mx.array]:
    """What mlx-lm makes of a publisher's tensors, by the model's own ``sanitize``: as if the head's layer
    were its first one, and the head's norms were such a layer's."""
    if not hasattr(model, "sanitize"):
        return dict(named)
    aliases, rest = {}, {}
    for name, array in named.items():
        module, _, part = name.partition(".")
        if name.startswith(LAYER):
            aliases[f"model.{name}"] = array
        elif "norm" in module and part == "weight":
            aliases[f"model.{LAYER}{module}{_NORM_SUFFIX}"] = array
        else:
            rest[name] = array
    if witness is not None:
        aliases[f"model.{LAYER}conv1d.weight"] = witness
    for name, array in model.sanitize(aliases).items():
        place = name[name.index(LAYER) :]
        if place == f"{LAYER}conv1d.weight":
            continue
        short = place.removeprefix(LAYER).removesuffix(_NORM_SUFFIX)
        rest[f"{short}.weight" if short in MODULES else place] = array
    return rest


def _swapped(array: mx.array) -> mx.array:
    """(D, 2·D) with its halves changed over: packed weights, and what they are packed with, alike."""
    first, second = mx.split(array, 2, axis=-1)
    return mx.concatenate([second, first], axis=-1)


def packing(name: str, module: nn.Module, weights: Mapping[str, mx.array]) -> bool | dict[str, Any]:
    """How a module's weights are packed in the files."""
    scales = weights.get(f"{name}.scales")
    if scales is None or not hasattr(module, "to_quantized"):
        return False
    inputs = int(module.weight.shape[-1])
    bits = int(weights[f"{name}.weight"].shape[-1]) * 32 // inputs
    group = inputs // int(scales.shape[-1])
    if f"{name}.biases" in weights:
        return {"group_size": group, "bits": bits, "mode": "affine"}
    mode = {(32, 4): "mxfp4", (16, 4): "nvfp4", (32, 8): "mxfp8"}[group, bits]
    return {"group_size": group, "bits": bits, "mode": mode}
