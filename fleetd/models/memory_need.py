"""Bytes of memory that a model needs to load: the figure of admission, of routing and of FITS HERE."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from fleetd import limits
from fleetd.errors import ModelCorrupt
from fleetd.limits import MIB
from fleetd.models.catalog import CatalogEntry
from fleetd.models.folder import ModelFolder
from fleetd.models.safetensors_header import TensorInfo, read_header
from fleetd.models.weights import weight_files

# Memory of a forward pass besides weights and KV: activations of one chunk, logits, allocator slack.
WORKING_BYTES = 512 * MIB
# Most models of the catalog have weights of 4 bits.
_CATALOG_BITS = {"quantization": {"bits": 4}}
_FLOATING = frozenset({"F8_E4M3", "F8_E5M2", "F8_E8M0", "F16", "BF16", "F32", "F64"})
# MLX packs no more weights than this with one scale.
_GROUP_MOST = 128
# What each block of 32 weights has besides them, packed for products in int8: scales, sums and a zero point.
_BLOCK_BYTES = 13


def needed_bytes(folder: ModelFolder, accelerator: str) -> int:
    """Bytes that must be free for the weights and the work of a forward pass.

    Args:
        accelerator: metal, cuda or cpu.
    """
    return weights_in_memory(folder.path, folder.weights_bytes, folder.config, accelerator) + WORKING_BYTES


def weights_in_memory(path: Path, on_disk: int, config: Mapping[str, Any], accelerator: str) -> int:
    """Bytes of a folder's weights in memory, by the headers of its files.

    The config decides if the headers cannot be read; such a model is refused when it is loaded.
    """
    if accelerator != "cpu":
        return on_disk
    try:
        states = tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in weight_files(path))
        found = _float32_bytes(states, _groups(config))
    except (ModelCorrupt, OSError):
        return expanded_bytes(on_disk, config, accelerator)
    return max(on_disk, found)


def is_packed(config: Mapping[str, Any]) -> bool:
    """True if a model's weights are quantised, by its config."""
    return bool(_quantizations(config))


def int8_in_memory(path: Path, on_disk: int, config: Mapping[str, Any]) -> int:
    """Bytes of a folder's weights on a CPU that keeps them packed (``engine/cpu``), by the headers of its
    files; by the config if they cannot be read."""
    try:
        tensors = [read_header(file) for file in weight_files(path)]
    except (ModelCorrupt, OSError):
        return 2 * on_disk
    return sum(int8_bytes(each, _groups(config), plain=not is_packed(config)) for each in tensors)


def int8_bytes(tensors: Mapping[str, TensorInfo], groups: GroupSizes, *, plain: bool) -> int:
    """Bytes of the tensors, packed for products, and if ``plain`` those that are not quantised, too.

    Which of them are tables is not known: they count once.
    """
    sizes = dict(groups.named)
    total = 0
    for name, info in tensors.items():
        layer, _, part = name.rpartition(".")
        packed, scales = tensors.get(f"{layer}.weight"), tensors.get(f"{layer}.scales")
        is_packed = packed is not None and packed.dtype == "U32" and scales is not None
        count = math.prod(info.shape)
        if is_packed and scales is not None and part == "weight":
            group = sizes.get(layer, groups.default)
            weights = min(math.prod(scales.shape) * group, 32 * count)
            bits = 4 if 32 * count <= 4 * weights else 8
            total += weights * bits // 8 + weights // 32 * _BLOCK_BYTES
        elif is_packed and part in ("scales", "biases"):
            continue
        elif plain and info.dtype in _FLOATING and len(info.shape) == 2:
            total += count + count // 32 * _BLOCK_BYTES
        else:
            total += 4 * count if info.dtype in _FLOATING else info.end - info.begin
    return total


def build_bytes(weights_bytes: int) -> int:
    """The most bytes of memory that building a model may take, by the bytes of its weights in memory."""
    # While they are converted, weights are there twice.
    return 2 * weights_bytes + WORKING_BYTES + limits.BUILD_BYTES


class GroupSizes(msgspec.Struct, frozen=True):
    """How many packed weights share a scale."""

    # In all modules that are not named.
    default: int = _GROUP_MOST
    # In the modules that the config names.
    named: tuple[tuple[str, int], ...] = ()


@lru_cache(maxsize=256)
def _float32_bytes(states: tuple[tuple[Path, int, int], ...], groups: GroupSizes) -> int:
    """Bytes of these files' tensors as f32, cached by the files' times and sizes. Raises ModelCorrupt."""
    return sum(float32_bytes(read_header(file), groups) for file, _, _ in states)


def float32_bytes(tensors: Mapping[str, TensorInfo], groups: GroupSizes) -> int:
    """Bytes of the tensors if floating ones become f32 and packed ones are unpacked."""
    sizes = dict(groups.named)
    total = 0
    for name, info in tensors.items():
        layer, _, part = name.rpartition(".")
        packed, scales = tensors.get(f"{layer}.weight"), tensors.get(f"{layer}.scales")
        is_packed = packed is not None and packed.dtype == "U32" and scales is not None
        count = math.prod(info.shape)
        if is_packed and scales is not None and part == "weight":
            # At least a bit each, whatever the scales say.
            total += 4 * min(math.prod(scales.shape) * sizes.get(layer, groups.default), 32 * count)
        elif is_packed and part in ("scales", "biases"):
            continue
        else:
            total += 4 * count if info.dtype in _FLOATING else info.end - info.begin
    return total


def _groups(config: Mapping[str, Any]) -> GroupSizes:
    """The group sizes of a config; the most that the format has if the config does not name a size."""

    def size_of(section: Mapping[str, Any]) -> int:
        size = section.get("group_size")
        return size if type(size) is int and 0 < size <= _GROUP_MOST else _GROUP_MOST

    found = _quantizations(config)
    if not found:
        return GroupSizes()
    named = {name: size_of(part) for name, part in found[0].items() if isinstance(part, Mapping)}
    return GroupSizes(size_of(found[0]), tuple(sorted(named.items())))


def estimated_bytes(entry: CatalogEntry, accelerator: str) -> int:
    """Bytes of weights in memory for a model whose files are not on this machine yet."""
    return expanded_bytes(entry.memory_bytes, _CATALOG_BITS, accelerator)


def expanded_bytes(on_disk: int, config: Mapping[str, Any], accelerator: str) -> int:
    """Bytes of weights in memory: the same as on disk, except on a CPU, which computes in f32."""
    if accelerator != "cpu":
        return on_disk
    # The packing comes first: torch_dtype, as publishers write it, is the dtype of the unpacked model.
    if bits := _least_bits(config):
        # Scales and biases add about half a bit per weight.
        return max(on_disk, int(on_disk * 32 / (bits + 0.5)))
    if config.get("torch_dtype", config.get("dtype")) == "float32":
        return on_disk
    return on_disk * 2  # 16 bits in practice


def _least_bits(config: Mapping[str, Any]) -> int:
    """The fewest bits that the quantisation names for a weight; 0 if it names none."""
    widths = [section.get("bits") for section in _quantizations(config)]
    return min((bits for bits in widths if type(bits) is int and 0 < bits <= 32), default=0)


def _quantizations(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The settings of packed weights: those of all, then those of named modules; [] if none is packed."""
    found = config.get("quantization") or config.get("quantization_config")
    if not isinstance(found, Mapping):
        return []
    return [found, *(section for section in found.values() if isinstance(section, Mapping))]
