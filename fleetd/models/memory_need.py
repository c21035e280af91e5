"""Bytes of memory that a model needs to load: the figure of admission, of routing and of FITS HERE."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from fleetd import limits
from fleetd.control.daemon_status import MemoryBudget
from fleetd.errors import ModelCorrupt
from fleetd.limits import MIB
from fleetd.models.catalog import CatalogEntry
from fleetd.models.cpu_arithmetic import (
    FLOAT_BYTES,
    OWN_BITS,
    OWN_GROUP,
    CpuArithmetic,
    CpuSetting,
    chosen,
    prepared_bytes,
    weight_bytes,
)
from fleetd.models.folder import ModelFolder
from fleetd.models.heads import ROWS, head_tensors
from fleetd.models.layer_files import PARTS, absent, check_numbers, layer_of
from fleetd.models.safetensors_header import TensorInfo, read_header
from fleetd.models.weights import weight_files

# Memory of a forward pass besides weights and KV: activations of one chunk, logits, allocator slack.
WORKING_BYTES = 512 * MIB
# How mlx-lm's models call the embedding of tokens; those of positions have other names.
TOKEN_TABLES = frozenset(
    {"embed_tokens", "word_embeddings", "embeddings", "embedding", "embed", "wte"}
    | {"tok_embeddings", "token_embeddings"}
)
# Most models of the catalog have weights of 4 bits.
_CATALOG_BITS = {"quantization": {"bits": 4}}
_FLOATING = frozenset({"F8_E4M3", "F8_E5M2", "F8_E8M0", "F16", "BF16", "F32", "F64"})
# MLX packs no more weights than this with one scale.
_GROUP_MOST = 128
# Of a model whose files are not here: layers, and bytes that each keeps of a token (8 heads of 128, 16 bits).
_EVEN_LAYERS, _EVEN_ROW_BYTES = 60, 4096
# Of a group that nothing is known of: most have so many weights, and its scale and bias have so many bits.
_GROUP_USUAL, _GROUP_BITS = 64, 32


class WeightRules(msgspec.Struct, frozen=True):
    """What decides how a machine holds the weights of its models."""

    # metal, cuda or cpu.
    accelerator: str = ""
    # ``engine.cpu_arithmetic``.
    setting: CpuSetting = "auto"
    # Whether int8 can be computed here on a CPU.
    available: bool = False
    # Bytes that weights may take while no other model is loaded.
    budget_bytes: int = 0

    @classmethod
    def of(
        cls, accelerator: str, setting: CpuSetting, budget: MemoryBudget, *, available: bool
    ) -> WeightRules:
        return cls(accelerator, setting, available, max(0, budget.largest_bytes - WORKING_BYTES))

    def need(self, on_disk: int, config: Mapping[str, Any], sizes: Callable[[], CpuSizes]) -> WeightNeed:
        """What weights need. ``sizes`` is asked on a CPU only."""
        if self.accelerator != "cpu":
            return WeightNeed("", on_disk)
        found = sizes()
        arithmetic = chosen(
            self.setting,
            quantised=is_quantised(config),
            available=self.available,
            float32_bytes=found.float32,
            budget_bytes=self.budget_bytes,
        )
        return WeightNeed(arithmetic, getattr(found, arithmetic))


class WeightNeed(msgspec.Struct, frozen=True):
    """What a model's weights need of a machine's memory, and the arithmetic that decides it."""

    # Of products with them on a CPU; "" on a GPU.
    arithmetic: CpuArithmetic | Literal[""]
    # Of all of them.
    n_bytes: int


class CpuSizes(msgspec.Struct, frozen=True):
    """Bytes of weights in the memory of a CPU, in each arithmetic."""

    float32: int
    int8: int


class LayerBytes(msgspec.Struct, frozen=True):
    """What a model's layers need of a machine's memory, each for itself, and all that belongs to none."""

    layers: tuple[int, ...]
    outside: int
    # That one layer keeps of a token, about.
    row: int
    # So many layers at the end are on one machine: some of them read what others of them keep.
    together: int = 1


def needed_bytes(folder: ModelFolder, rules: WeightRules) -> int:
    """Bytes that must be free for the weights, the work of a forward pass, and a head beside the weights."""
    weights = weight_need(folder.path, folder.weights_bytes, folder.config, rules)
    return weights.n_bytes + WORKING_BYTES + head_bytes(folder.path, folder.config, weights.arithmetic)


def weight_need(path: Path, on_disk: int, config: Mapping[str, Any], rules: WeightRules) -> WeightNeed:
    """What a folder's weights need, by the headers of its files.

    The config decides if the headers cannot be read; such a model is refused when it is loaded.
    """

    return rules.need(on_disk, config, lambda: cpu_sizes_of(path, on_disk, config))


def cpu_sizes_of(path: Path, on_disk: int, config: Mapping[str, Any]) -> CpuSizes:
    """What a folder's weights take on a CPU, by the headers of its files; by the config if these cannot be
    read."""
    try:
        states = _states(path)
        if states or path.parent.name == PARTS:
            return _sizes_in_files(path, states, _groups(config), plain=not is_quantised(config))
        return sizes_by_config(on_disk, config)
    except (ModelCorrupt, OSError):
        return sizes_by_config(on_disk, config)


def head_bytes(path: Path, config: Mapping[str, Any], arithmetic: CpuArithmetic | Literal[""]) -> int:
    """Bytes of the head that lies beside a model's weights, and of the rows that it keeps of an answer; 0 if
    there is none, or its file is not sound: then it is not loaded."""
    try:
        tensors = head_tensors(path)
    except (ModelCorrupt, OSError):
        return 0
    if not tensors:
        return 0
    rows = ROWS * _row_bytes(config, FLOAT_BYTES if arithmetic else 2)
    if not arithmetic:
        return rows + sum(info.end - info.begin for info in tensors.values())
    # What only drafts is held in int8, as the publisher's own weights are not.
    return rows + int(getattr(cpu_sizes(tensors, _groups(config), plain=True), arithmetic))


def layer_bytes(path: Path, config: Mapping[str, Any], arithmetic: CpuArithmetic | Literal[""]) -> LayerBytes:
    """What layers take one by one, by the headers of files. ``arithmetic``: as ``WeightNeed`` has it.

    Raises ModelCorrupt; ModelUnsupported if the names of the weights tell no layers.
    """
    each, outside = _layers_in_files(
        path, _states(path), _groups(config), plain=not is_quantised(config), arithmetic=arithmetic
    )
    row = _row_bytes(config, FLOAT_BYTES if arithmetic else 2)
    return LayerBytes(each, outside, row, together(config, len(each)))


def even_layer_bytes(weights_bytes: int) -> LayerBytes:
    """The same for a model of which only the bytes of its weights are known: as if it had layers of one size,
    as many and as wide as large models have, and one more for all that belongs to none."""
    each = -(-weights_bytes // (_EVEN_LAYERS + 1))
    return LayerBytes((each,) * _EVEN_LAYERS, each, _EVEN_ROW_BYTES)


def together(config: Mapping[str, Any], layers: int) -> int:
    """How many of a model's last layers have to be on one machine: 1 unless some read what others keep."""
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    shared, kinds = text.get("num_kv_shared_layers"), text.get("layer_types")
    if not isinstance(shared, int) or not 0 < shared < layers:
        return 1
    if not isinstance(kinds, list) or len(kinds) != layers:
        return layers
    kinds = [str(kind) for kind in kinds]
    own = kinds[: layers - shared]
    # Each reads the last one of its kind that keeps something.
    read = [len(own) - 1 - own[::-1].index(kind) for kind in set(kinds[layers - shared :]) if kind in own]
    return layers - min(read, default=0)


def _row_bytes(config: Mapping[str, Any], width: int) -> int:
    """Bytes of a token's keys and values in one layer, of numbers of ``width`` bytes, by the usual names."""
    text = {**config, **(config.get("text_config") or {})}
    heads = int(text.get("num_attention_heads") or 1)
    kept = int(text.get("num_key_value_heads") or heads)
    head = int(text.get("head_dim") or int(text.get("hidden_size") or 0) // heads)
    return max(1, 2 * kept * head * width)


def estimated(entry: CatalogEntry, rules: WeightRules) -> WeightNeed:
    """What a model would need whose files are not on this machine yet, with room for some context."""
    on_disk = entry.download_bytes
    weights = rules.need(on_disk, _CATALOG_BITS, lambda: sizes_by_config(on_disk, _CATALOG_BITS))
    return WeightNeed(weights.arithmetic, weights.n_bytes + entry.memory_bytes - on_disk)


def estimated_files(on_disk: int, config: Mapping[str, Any], rules: WeightRules) -> int:
    """Bytes that files of this size would need, which are not on this machine yet, to load."""
    return rules.need(on_disk, config, lambda: sizes_by_config(on_disk, config)).n_bytes + WORKING_BYTES


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


_States = tuple[tuple[Path, int, int], ...]


def _states(path: Path) -> _States:
    """The files of weights in a folder, with their times and sizes. Raises ModelCorrupt, OSError."""
    return tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in weight_files(path))


@lru_cache(maxsize=64)
def _layers_in_files(
    path: Path,
    states: _States,
    groups: GroupSizes,
    *,
    plain: bool,
    arithmetic: CpuArithmetic | Literal[""],
) -> tuple[tuple[int, ...], int]:
    """Bytes of each layer and of what belongs to none, cached by the files' times and sizes. Raises as
    ``layer_bytes``."""
    layers: dict[int, dict[str, TensorInfo]] = {}
    outside: dict[str, TensorInfo] = {}
    for name, info in _tensors(path, [file for file, _, _ in states]).items():
        layer = layer_of(name)
        (outside if layer is None else layers.setdefault(layer, {}))[name] = info
    check_numbers(path, layers)

    def size(part: Mapping[str, TensorInfo]) -> int:
        if not arithmetic:
            return sum(info.end - info.begin for info in part.values())
        return int(getattr(cpu_sizes(part, groups, plain=plain), arithmetic))

    return tuple(size(layers[index]) for index in range(len(layers))), size(outside)


@lru_cache(maxsize=256)
def _sizes_in_files(path: Path, states: _States, groups: GroupSizes, *, plain: bool) -> CpuSizes:
    """What the headers of these files tell, cached by the files' times and sizes. Raises ModelCorrupt."""
    return cpu_sizes(_tensors(path, [file for file, _, _ in states]), groups, plain=plain)


def _tensors(path: Path, files: Iterable[Path]) -> Mapping[str, TensorInfo]:
    """The tensors of a model's files in a folder, by name. Raises ModelCorrupt.

    Those that a part of a model does not have count as well: a part is held as the whole would be.
    """
    found = ChainMap({}, *(read_header(file) for file in files))
    for name, each in absent(path).items():
        found[name] = TensorInfo(each.dtype, each.shape, 0, each.size_bytes)
    return found


def cpu_sizes(tensors: Mapping[str, TensorInfo], groups: GroupSizes, *, plain: bool) -> CpuSizes:
    """Bytes of a model's tensors in the memory of a CPU.

    Args:
        plain: weights that are not quantised are quantised for products in int8. Where others are, their
            publisher left them as they are.
    """
    sizes = dict(groups.named)
    tied = not any(name.endswith("lm_head.weight") for name in tensors)
    float32 = int8 = 0
    for name, info in tensors.items():
        layer, _, part = name.rpartition(".")
        weight, scales, biases = (tensors.get(f"{layer}.{each}") for each in ("weight", "scales", "biases"))
        stored = _Tensor(info, part, weight, scales, affine=biases is not None)
        group = sizes.get(layer, groups.default)
        # Packed matrices of experts are not unpacked.
        float32 += stored.unpacked_bytes(group) if stored.in_matrix else stored.plain_bytes
        if not stored.stays_packed and not (plain and stored.in_matrix):
            int8 += stored.plain_bytes
            continue
        # A table is read as it is stored, and multiplied by as a head if there is no other.
        is_table = layer.rpartition(".")[2] in TOKEN_TABLES
        int8 += stored.on_disk if is_table else 0
        int8 += stored.product_bytes(group) if tied or not is_table else 0
    return CpuSizes(float32, int8)


class _Tensor(msgspec.Struct, frozen=True):
    """A tensor of a file, and the weights and scales of the layer that it belongs to, if there are any."""

    info: TensorInfo
    # Of the layer: "weight".
    part: str
    weight: TensorInfo | None
    scales: TensorInfo | None
    # Whether the layer has biases beside scales.
    affine: bool

    @property
    def on_disk(self) -> int:
        return self.info.end - self.info.begin

    @property
    def count(self) -> int:
        return math.prod(self.info.shape)

    @property
    def is_packed(self) -> bool:
        """True if it belongs to packed weights, of any shape."""
        packed = self.weight is not None and self.weight.dtype == "U32" and self.scales is not None
        return packed and self.part in ("weight", "scales", "biases")

    @property
    def in_matrix(self) -> bool:
        """True for weights that a CPU multiplies by, and what they are packed with."""
        if self.weight is None or len(self.weight.shape) != 2:
            return False
        floating = self.part == "weight" and self.info.dtype in _FLOATING
        return self.is_packed or (floating and self.weight.shape[1] % OWN_GROUP == 0)

    @property
    def stays_packed(self) -> bool:
        """True for packed weights of one matrix, or affine ones of several, which experts have."""
        dimensions = len(self.weight.shape) if self.weight is not None else 0
        return self.is_packed and (dimensions == 2 or (dimensions == 3 and self.affine))

    @property
    def plain_bytes(self) -> int:
        """Bytes of its elements, as f32 if they are floating."""
        return FLOAT_BYTES * self.count if self.info.dtype in _FLOATING else self.on_disk

    def _weights(self, group: int) -> int:
        """How many weights are packed: at least a bit each, whatever the scales say."""
        scales = self.scales.shape if self.scales is not None else ()
        return min(math.prod(scales) * group, 32 * self.count)

    def unpacked_bytes(self, group: int) -> int:
        """Bytes of a part of a matrix that is held in f32."""
        if not self.is_packed:
            return self.plain_bytes
        return max(self.on_disk, FLOAT_BYTES * self._weights(group)) if self.part == "weight" else 0

    def product_bytes(self, group: int) -> int:
        """Bytes of a part of a matrix that is multiplied by in int8."""
        if self.part != "weight":
            return 0
        if not self.is_packed:
            return prepared_bytes(self.count, OWN_BITS, OWN_GROUP)
        weights = self._weights(group)
        if not self.affine:
            return prepared_bytes(weights, OWN_BITS, OWN_GROUP)
        bits = 32 * self.count // max(1, weights)
        return max(self.on_disk, weight_bytes(weights, bits=bits, group=group))


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


def sizes_by_config(on_disk: int, config: Mapping[str, Any]) -> CpuSizes:
    """Bytes of weights in the memory of a CPU, by the bytes of their files and how they are packed."""
    # The packing comes first: torch_dtype, as publishers write it, is the dtype of the unpacked model.
    if bits := _least_bits(config):
        weights = int(on_disk * 8 / (bits + _GROUP_BITS / _GROUP_USUAL))
        packed = weight_bytes(weights, bits=bits, group=_GROUP_USUAL)
        return CpuSizes(max(on_disk, FLOAT_BYTES * weights), max(on_disk, packed))
    is_float32 = config.get("torch_dtype", config.get("dtype")) == "float32"
    weights = on_disk // (4 if is_float32 else 2)  # 16 bits in practice
    return CpuSizes(FLOAT_BYTES * weights, prepared_bytes(weights, OWN_BITS, OWN_GROUP))


def is_quantised(config: Mapping[str, Any]) -> bool:
    """True if a model's weights are packed, by its config."""
    return bool(_quantizations(config))


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
