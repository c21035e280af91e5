"""What one rank of a model takes of a machine's memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from fleetd.models.folder import ModelFolder
from fleetd.models.memory_need import LayerBytes, layer_bytes

# Promises memory for what has a name, so many bytes, out of so many that are free, given what tells the bytes
# that are held of it.
Promise = Callable[[str, int, int, Callable[[], int]], AbstractContextManager[None]]


def sizes_of(folder: ModelFolder, *, on_cpu: bool) -> LayerBytes:
    """The sizes of whole layers as a rank holds them. Reads headers of files; raises as ``layer_bytes``."""
    return layer_bytes(folder.path, folder.config, "float32" if on_cpu else "")


def rank_bytes(folder: ModelFolder, size: int, tokens: int, on_cpu: bool) -> int:
    """Bytes of weights, and of keys and values of ``tokens``, on one of ``size`` ranks; embedding and head
    are whole on each."""
    found = sizes_of(folder, on_cpu=on_cpu)
    return found.outside + (sum(found.layers) + len(found.layers) * found.row * tokens) // size
