"""What one rank of a model takes of a machine's memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from fleetd.models.folder import ModelFolder
from fleetd.models.memory_need import LayerBytes, layer_bytes
from fleetd.models.model_sizes import Arithmetic

# Promises memory for what has a name, so many bytes, out of so many that are free, given what tells the bytes
# that are held of it.
Promise = Callable[[str, int, int, Callable[[], int]], AbstractContextManager[None]]


def arithmetic(*, on_cpu: bool) -> Arithmetic:
    """The arithmetic in which a rank holds whole layers, of each of which it has a part."""
    return "float32" if on_cpu else ""


def rank_need(folder: ModelFolder, size: int, tokens: int, on_cpu: bool) -> int:
    """What ``rank_bytes`` gives. Reads headers of files; raises as ``layer_bytes``."""
    return rank_bytes(layer_bytes(folder.path, folder.config, arithmetic(on_cpu=on_cpu)), size, tokens)


def rank_bytes(found: LayerBytes, size: int, tokens: int) -> int:
    """Bytes of weights, and of keys and values of ``tokens``, on one of ``size`` ranks; embedding and head
    are whole on each. ``found``: of whole layers."""
    return found.outside + (sum(found.layers) + len(found.layers) * found.row * tokens) // size
