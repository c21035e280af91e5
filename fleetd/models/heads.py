"""Heads that draft for the model in whose folder they lie: how their tensors are named, and where they are.

A file ``mtp.safetensors`` goes before what is in the model's own files. Only headers are read here; the
network itself is ``fleetd.engine.heads``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from fleetd.errors import ModelUnsupported
from fleetd.models.safetensors_header import TensorInfo, read_header, read_notes
from fleetd.models.weights import HEAD_NAME, weight_files

# What a layer's tensors begin with in ``MtpHead``; and those of a head's only layer.
LAYERS = "layers."
LAYER = f"{LAYERS}0."
_NUMBERED = re.compile(r"layers\.\d+\.")
# What a head's file says in its metadata of the model that it was made for: ``ModelDigest.weights``.
TARGET = "fleetd.target"
# Rows of keys and values that a head keeps of an answer at most.
ROWS = 2048


class HeadNames(msgspec.Struct, frozen=True):
    """How a family of models names a head's tensors."""

    # A regular expression of what all of them begin with. {layers} is how many layers the model has.
    prefix: str
    # By what follows: what ``MtpHead`` calls the same module. Other names are the layer's, behind
    # ``layer``.
    modules: Mapping[str, str]
    layer: str = ""
    # The head has several layers, each of a kind of its own. All names have the layer's number, those of
    # ``modules`` too, or these have none.
    several: bool = False
    # Whether the hidden state stands before the embedding in ``fc``.
    hidden_first: bool = False
    # As of ``MtpHead``.
    feeds_normed: bool = False

    def begins(self, layers: int) -> re.Pattern[str]:
        """What the names of a head's tensors begin with, for a model of so many layers."""
        return re.compile(self.prefix.replace("{layers}", str(layers)))

    def module_of(self, name: str) -> str | None:
        """What ``MtpHead`` calls the module of a tensor, by what follows the prefix; None if it is a part of
        a layer."""
        if self.several:
            name = _NUMBERED.sub("", name, 1)
        return self.modules.get(name.rpartition(".")[0])

    def layer_part(self, name: str) -> str | None:
        """What ``MtpHead`` calls a tensor of one of its layers; None if it is none."""
        if self.several:
            return name if _NUMBERED.match(name) else None
        return LAYER + name.removeprefix(self.layer) if name.startswith(self.layer) else None


MODULES = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
# The first that is found counts.
FAMILIES = (
    # Qwen 3.5 and Qwen3-Next; and the file of its own.
    HeadNames(
        r"(?:model\.)?(?:language_model\.)?mtp\.",
        dict(zip(MODULES, MODULES, strict=True)),
        LAYER,
        feeds_normed=True,
    ),
    # DeepSeek V3, GLM 4 MoE, Ling 2: a layer more than the config says.
    HeadNames(
        r"(?:language_model\.)?model\.layers\.{layers}\.",
        {
            "eh_proj": "fc",
            "enorm": "pre_fc_norm_embedding",
            "hnorm": "pre_fc_norm_hidden",
            "shared_head.norm": "norm",
            "final_layernorm": "norm",
        },
    ),
    # MiMo.
    HeadNames(
        r"model\.mtp_layers\.0\.",
        {
            "input_proj": "fc",
            "token_layernorm": "pre_fc_norm_embedding",
            "hidden_layernorm": "pre_fc_norm_hidden",
            "final_layernorm": "norm",
        },
        hidden_first=True,
        feeds_normed=True,
    ),
    # Nemotron-H: an attention and a mixture of experts, which are layers of their own in these models.
    HeadNames(
        r"(?:language_model\.)?mtp\.",
        {
            "eh_proj": "fc",
            "enorm": "pre_fc_norm_embedding",
            "hnorm": "pre_fc_norm_hidden",
            "final_layernorm": "norm",
        },
        several=True,
        feeds_normed=True,
    ),
)


def sidecar(path: Path) -> Path | None:
    """The file of a head beside the weights in a folder; None if there is none."""
    file = path / HEAD_NAME
    return file if file.is_file() else None


def check_target(path: Path, weights_digest: str) -> None:
    """Refuse a head beside the weights that says it was made for other weights than those of this digest
    (``ModelDigest.weights``; "" if that is not known). Most heads say nothing of it.

    Raises ModelUnsupported; ModelCorrupt, OSError.
    """
    if (file := sidecar(path)) is None or not weights_digest:
        return
    target = read_notes(file).get(TARGET, "")
    if target not in ("", weights_digest):
        raise ModelUnsupported(
            f"{file.name} was made for weights with the digest {target[:12]}…; this model's have "
            f"{weights_digest[:12]}…."
        )


def head_file(path: Path, config: Mapping[str, Any]) -> str:
    """The name of the file in which a folder's model has a head, or the first of them; "" if it has none.

    Raises ModelCorrupt, OSError.
    """
    beside = sidecar(path)
    files = [beside] if beside is not None else weight_files(path)
    states = tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    return _head_file(states, _layers(config))


def head_tensors(path: Path) -> Mapping[str, TensorInfo]:
    """The tensors of the file of a head beside the weights; none if there is no such file. Those in the
    model's own files count among its weights. Raises ModelCorrupt, OSError."""
    file = sidecar(path)
    return read_header(file) if file is not None else {}


@lru_cache(maxsize=256)
def _head_file(states: tuple[tuple[Path, int, int], ...], layers: int) -> str:
    for file, _, _ in states:
        if any(_of_head(family, layers, read_header(file)) for family in FAMILIES):
            return file.name
    return ""


def _of_head(family: HeadNames, layers: int, names: Iterable[str]) -> bool:
    begins = family.begins(layers)
    found = (name[match.end() :] for name in names if (match := begins.match(name)))
    return any(family.module_of(name) is not None for name in found)


def _layers(config: Mapping[str, Any]) -> int:
    text = {**config, **(config.get("text_config") or {})}
    found = text.get("num_hidden_layers")
    return found if type(found) is int else 0
