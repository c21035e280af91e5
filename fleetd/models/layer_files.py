"""A model's layers as files, each with the tensors of one layer, whichever of the model's files have them.

    model-fleetd-layer-00012.safetensors    the tensors of layer 12
    model-fleetd-ends.safetensors           those of no layer: embedding, norm, head
    fleetd-tensors.json                     dtype and shape of all tensors of the model

No such file lies beside a whole model: its content is put together while it is sent. It depends on the
model's tensors alone, so it is the same however these are spread over files.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from fleetd import limits
from fleetd.errors import ModelCorrupt, ModelUnsupported
from fleetd.models.json_files import PULL_AGAIN
from fleetd.models.opening import open_regular, read_regular
from fleetd.models.safetensors_header import DTYPE_BYTES, TensorInfo, read_header
from fleetd.models.weights import weight_files
from fleetd.text.bounded import UNREADABLE
from fleetd.text.decoding import from_json

#: The folder in the models folder in which parts of models lie, each in a folder of its own.
PARTS = ".parts"
TABLE_NAME = "fleetd-tensors.json"
ENDS_NAME = "model-fleetd-ends.safetensors"
_LAYER_NAME = "model-fleetd-layer-{:05}.safetensors"
# A layer's number in the name of a weight.
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")
# A head that drafts for the model has layers of its own, which its first machine needs.
_HEAD = re.compile(r"(?:^|\.)mtp\.")
# Tensors of no layer from which every layer makes an input of its own: all machines need them.
_PER_LAYER = re.compile(r"per_layer")


class TensorShape(msgspec.Struct, frozen=True, array_like=True):
    """A tensor without its values."""

    # A key of ``safetensors_header.DTYPE_BYTES``.
    dtype: str
    # Its dimensions, rows first.
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class FileContent(msgspec.Struct, frozen=True):
    """What a file consists of: ``head``, then ranges of other files."""

    head: bytes
    # File, first byte, and the byte behind the last.
    ranges: tuple[tuple[Path, int, int], ...] = ()

    @property
    def size_bytes(self) -> int:
        return len(self.head) + sum(end - begin for _, begin, end in self.ranges)

    def pieces(self, offset: int, buffer: memoryview) -> Iterator[memoryview]:
        """The content from ``offset`` on; ``buffer`` has each piece until the next.

        Links are not followed: the paths are resolved, and a link was put there since. Raises OSError.
        """
        if offset < len(self.head):
            yield memoryview(self.head)[offset:]
        offset = max(0, offset - len(self.head))
        for file, begin, end in self.ranges:
            skipped = min(offset, end - begin)
            offset -= skipped
            with open_regular(file, follow=False) as content:
                content.seek(begin + skipped)
                left = end - begin - skipped
                # Not beyond the size that it had: a file that grows would never end.
                while count := content.readinto(buffer[: min(left, len(buffer))]):
                    yield buffer[:count]
                    left -= count


class LayerFiles(msgspec.Struct, frozen=True):
    """The files that a whole model's layers would be."""

    # By name: a file for each layer, for the ends, and the table.
    files: Mapping[str, FileContent]
    layers: int
    # Whether every layer needs the ends, too.
    ends_everywhere: bool


def layer_of(tensor: str) -> int | None:
    """The model's layer that a tensor belongs to, by its name; None for those of no layer."""
    found = None if _HEAD.search(tensor) else _LAYER.search(tensor)
    return int(found[1]) if found else None


def name_of(layer: int) -> str:
    """The name of a layer's file."""
    return _LAYER_NAME.format(layer)


def is_layer_file(name: str) -> bool:
    """True for the names of files that are put together."""
    return name.startswith("model-fleetd-") or name == TABLE_NAME


def files_of(path: Path) -> LayerFiles:
    """The files of a whole model's layers. Only headers are read.

    Raises ModelCorrupt; ModelUnsupported if the names of the weights tell no layers.
    """
    parts: dict[int, dict[str, tuple[Path, TensorInfo]]] = {}
    ends: dict[str, tuple[Path, TensorInfo]] = {}
    for file in weight_files(path):
        resolved = file.resolve()
        for name, info in read_header(file).items():
            layer = layer_of(name)
            (ends if layer is None else parts.setdefault(layer, {}))[name] = (resolved, info)
    check_numbers(path, parts)
    files = {name_of(layer): _content(part) for layer, part in parts.items()}
    shapes = {
        name: TensorShape(info.dtype, info.shape)
        for part in (ends, *parts.values())
        for name, (_, info) in part.items()
    }
    files[TABLE_NAME] = FileContent(msgspec.json.encode(dict(sorted(shapes.items()))))
    files[ENDS_NAME] = _content(ends)
    return LayerFiles(files, len(parts), needed_everywhere(ends))


def needed_everywhere(ends: Iterable[str]) -> bool:
    """Whether every layer needs the tensors of no layer, by their names."""
    return any(_PER_LAYER.search(name) for name in ends)


def check_numbers(path: Path, layers: Mapping[int, object]) -> None:
    """Raises ModelUnsupported unless there are layers, and none is missing."""
    if sorted(layers) != list(range(len(layers))) or not layers:
        raise ModelUnsupported(f"The weights of {path.name} are not named by layers: it runs whole.")


def _content(tensors: Mapping[str, tuple[Path, TensorInfo]]) -> FileContent:
    found, ranges, end = {}, [], 0
    for name, (file, info) in sorted(tensors.items()):
        begin, end = end, end + info.end - info.begin
        found[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [begin, end]}
        ranges.append((file, info.begin, info.end))
    return FileContent(header_bytes(found), tuple(ranges))


def header_bytes(entries: Mapping[str, object]) -> bytes:
    """The head of a safetensors file, by the entries of its tensors."""
    raw = json.dumps({"__metadata__": {"format": "mlx"}, **entries}, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


def table(path: Path) -> dict[str, TensorShape]:
    """All tensors of the model of which a folder has a part; none for a whole model. Raises ModelCorrupt."""
    file = path / TABLE_NAME
    if path.parent.name != PARTS:
        return {}  # what a publisher calls so is no such table
    try:
        raw = read_regular(file, limits.MODEL_JSON_BYTES)
        found = from_json(raw, dict[str, TensorShape])
        sizes = [each.size_bytes if min(each.shape, default=0) >= 0 else -1 for each in found.values()]
    except (OSError, *UNREADABLE, KeyError) as error:
        raise ModelCorrupt(f"{file} cannot be read: {error}.", hint=PULL_AGAIN) from None
    if len(found) > limits.MODEL_TENSORS or min(sizes, default=0) < 0 or sum(sizes) > limits.COPY_BYTES:
        raise ModelCorrupt(f"{file} lists tensors that no model has.", hint=PULL_AGAIN)
    return found


def has_layers(path: Path, first: int, last: int) -> bool:
    """False for a folder with a part of a model in which the file of a layer of [first, last) is missing."""
    if path.parent.name != PARTS:
        return True
    return all((path / name_of(layer)).is_file() for layer in range(first, last))


def absent(path: Path) -> dict[str, TensorShape]:
    """The tensors of the model that a folder with a part of it does not have. Raises ModelCorrupt."""
    found = table(path)
    if not found:
        return {}
    for file in weight_files(path):
        for name, info in read_header(file).items():
            if found.pop(name, None) != TensorShape(info.dtype, info.shape):
                raise ModelCorrupt(f"{name!r} in {file} is not as {TABLE_NAME} says.", hint=PULL_AGAIN)
    return found
