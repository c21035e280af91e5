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
    # What the weights are packed in comes first: a publisher's torch_dtype is that of the unpacked model.
    if bits := _least_bits(config):
        # Scales and biases add about half a bit per weight.
        return max(on_disk, int(on_disk * 32 / (bits + 0.5)))
    if config.get("torch_dtype", config.get("dtype")) == "float32":
        return on_disk
    return on_disk * 2  # 16 bits in practice


def _least_bits(config: Mapping[str, Any]) -> int:
    """The fewest bits per weight that the quantisation names, for all weights or for some; 0 for none."""
    found = config.get("quantization") or config.get("quantization_config")
    if not isinstance(found, Mapping):
        return 0
    sections = [found, *(section for section in found.values() if isinstance(section, Mapping))]
    widths = [section.get("bits") for section in sections]
    return min((bits for bits in widths if type(bits) is int and 0 < bits <= 32), default=0)
