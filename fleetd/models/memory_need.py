"""How much memory a model needs to load: the figure of admission, of routing and of FITS HERE. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleetd.limits import MIB
from fleetd.models.catalog import CatalogEntry
from fleetd.models.folder import ModelFolder

# What a forward pass needs besides weights and KV: activations of one chunk, logits, allocator slack.
WORKING_BYTES = 512 * MIB
# Most models of the catalog are quantised so.
_CATALOG_BITS = {"quantization": {"bits": 4}}


def needed_bytes(folder: ModelFolder, accelerator: str) -> int:
    """Bytes that must be free for the weights and the work of a forward pass.

    Args:
        accelerator: metal, cuda or cpu.
    """
    return expanded_bytes(folder.weights_bytes, folder.config, accelerator) + WORKING_BYTES


def estimated_bytes(entry: CatalogEntry, accelerator: str) -> int:
    """The same for a model whose files are not here yet."""
    return expanded_bytes(entry.memory_bytes, _CATALOG_BITS, accelerator)


def expanded_bytes(on_disk: int, config: Mapping[str, Any], accelerator: str) -> int:
    """Bytes of weights in memory: as on disk, except on a CPU, where everything becomes f32."""
    if accelerator != "cpu":
        return on_disk
    if config.get("torch_dtype", config.get("dtype")) == "float32":
        return on_disk
    quantization = config.get("quantization") or config.get("quantization_config") or {}
    told = quantization if isinstance(quantization, Mapping) else {}
    bits, group = told.get("bits"), told.get("group_size", 64)
    if not isinstance(bits, int) or not isinstance(group, int) or min(bits, group) <= 0:
        return on_disk * 2  # unquantised weights are 16 bits in practice
    # Each group of weights has a scale and a bias of 16 bits.
    return int(on_disk * 32 / (bits + 32 / group))
