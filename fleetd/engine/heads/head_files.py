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
from mlx.utils import tree_flatten

from fleetd.engine.heads.mtp_head import MtpHead
from fleetd.engine.layers.stage import Stage, architecture_for
from fleetd.errors import ModelUnsupported
from fleetd.models.heads import FAMILIES, LAYER, LAYERS, MODULES, HeadNames, sidecar
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
        if any(family.module_of(name) for name in tensors):
            try:
                return _made(model, family, tensors, None if beside is not None else _convolution(files))
            except (KeyError, TypeError, ValueError) as error:
                raise ModelUnsupported(
                    f"Its tensors are not those of a head of this model: {error}"
                ) from error
    return None


def read_lone_head(folder: Path, model: Any) -> MtpHead:
    """The head that is all of a folder's weights, read by ``read_drafter``; raises as that.

    Its tensors have their publisher's names, with or without ``mtp.``; those of other publishers than
    Nemotron-H's have Qwen's. Some of those who took them out of a publisher's files left the norms less by
    one, as they are there; others did not. The norms themselves tell.
    """
    found = dict(_tensors(weight_files(folder), re.compile("")))
    tensors = {name.removeprefix("mtp."): array for name, array in found.items()}
    several = (family for family in FAMILIES if family.several and any(map(family.module_of, tensors)))
    family = next(several, FAMILIES[0])
    norms = [array for name, array in tensors.items() if array.ndim == 1 and "norm" in name]
    if not norms:
        raise ValueError("it has no norms")
    raw = float(mx.mean(mx.concatenate([norm.astype(mx.float32) for norm in norms]))) < _RAW_NORM
    return _made(model, family, tensors, mx.zeros(_RAW_CONVOLUTION) if raw else None)


def _made(model: Any, family: HeadNames, tensors: dict[str, mx.array], witness: mx.array | None) -> MtpHead:
    draft_tokens = tensors.pop("draft_tokens", None)
    weights = _as_mlx_has_it(model, _named(family, tensors), witness)
    if family.hidden_first:
        weights = {
            name: _swapped(array) if name.startswith("fc.") else array for name, array in weights.items()
        }
    layers = _like(Stage.of(model), weights) if family.several else None
    head = MtpHead(model, draft_tokens, feeds_normed=family.feeds_normed, layers=layers)
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
        if (module := family.module_of(name)) is not None:
            named[f"{module}.{name.rpartition('.')[2]}"] = array
        elif not name.startswith(_COPIES) and (part := family.layer_part(name)) is not None:
            named[part] = array
    return named


def _like(stage: Stage, weights: Mapping[str, mx.array]) -> list[int]:
    """The model's last layer with the same modules, for each of a head's layers.

    Raises ValueError if there is none.
    """
    theirs: dict[int, set[str]] = {}
    for name in weights:
        if name.startswith(LAYERS):
            number, _, part = name.removeprefix(LAYERS).partition(".")
            theirs.setdefault(int(number), set()).add(part.rpartition(".")[0])
    own = [
        {name.rpartition(".")[0] for name, _ in tree_flatten(layer.parameters())}
        for layer in stage.weights.layers
    ]
    if sorted(theirs) != [*range(len(theirs))] or not all(modules in own for modules in theirs.values()):
        raise ValueError("its layers are not of kinds that the model has")
    return [max(i for i, modules in enumerate(own) if modules == theirs[number]) for number in sorted(theirs)]


def _as_mlx_has_it(
    model: Any, named: Mapping[str, mx.array], witness: mx.array | None
) -> dict[str, mx.array]:
    """What mlx-lm makes of a publisher's tensors, by the model's own ``sanitize``: as if the head's layers
    were its first ones, and the head's norms were such a layer's."""
    if not hasattr(model, "sanitize"):
        return dict(named)
    # Text models within others keep the name of their body.
    body = architecture_for(model).body.rpartition(".")[2] or "model"
    aliases, rest = {}, {}
    for name, array in named.items():
        module, _, part = name.partition(".")
        if name.startswith(LAYERS):
            aliases[f"{body}.{name}"] = array
        elif "norm" in module and part == "weight":
            aliases[f"{body}.{LAYER}{module}{_NORM_SUFFIX}"] = array
        else:
            rest[name] = array
    if witness is not None:
        aliases[f"{body}.{LAYER}conv1d.weight"] = witness
    for name, array in model.sanitize(aliases).items():
        place = name[name.index(LAYERS) :]
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
