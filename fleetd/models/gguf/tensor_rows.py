"""A tensor's bytes, some rows at a time, from the files that the model is spread over."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import numpy as np

from fleetd import limits
from fleetd.models.gguf.blocks import Bytes
from fleetd.models.gguf.header import GgufHeader, GgufTensor, read_header
from fleetd.models.gguf.packing import Order
from fleetd.models.gguf.refusals import corrupt
from fleetd.models.opening import open_regular

_SPLIT = re.compile(r"(.+)-00001-of-(\d{5})\.gguf", re.IGNORECASE)


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor and the memory map that holds it."""

    tensor: GgufTensor
    # The whole file.
    view: memoryview

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return max(1, self.tensor.size_bytes // self.row_bytes)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.tensor.shape[-1] // self.tensor.block_elements * self.tensor.block_bytes

    def slices(self, order: Order = None) -> Iterator[Bytes]:
        """Rows of bytes (rows, bytes of a row), at most ``limits.GGUF_SLICE_WEIGHTS`` weights at a time. Each
        is a copy, which may outlive the memory map.

        Args:
            order: the rows in the order that is wanted; None for the file's.
        """
        step = max(1, limits.GGUF_SLICE_WEIGHTS // self.tensor.shape[-1])
        for at in range(0, self.rows, step):
            count = min(step, self.rows - at)
            if order is None:
                yield self._read(at, count)
            else:
                yield np.concatenate([self._read(int(row), 1) for row in order[at : at + count]])

    def _read(self, row: int, count: int) -> Bytes:
        offset = self.tensor.offset + row * self.row_bytes
        return np.frombuffer(self.view, np.uint8, count * self.row_bytes, offset).copy().reshape(count, -1)


@contextmanager
def opened(source: Path, what: str) -> Iterator[tuple[GgufHeader, dict[str, StoredTensor]]]:
    """The header of a model's first file, and its tensors by name from all of its files.

    Raises:
        ModelCorrupt: a file is damaged, missing or empty, or two files disagree.
        ModelUnsupported: a tensor's kind or the version of the format cannot be imported.
    """
    with ExitStack() as stack:
        first: GgufHeader | None = None
        tensors: dict[str, StoredTensor] = {}
        for path in parts(source, what):
            try:
                file = stack.enter_context(open_regular(path))
            except OSError as error:
                raise corrupt(what, f"{path.name} cannot be read: {error.strerror}") from None
            if os.fstat(file.fileno()).st_size == 0:
                raise corrupt(what, f"{path.name} is empty")
            mapped = stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            view = stack.enter_context(memoryview(mapped))
            header = read_header(view, path.name if first is not None else what)
            for tensor in header.tensors:
                if tensor.name in tensors:
                    raise corrupt(what, f"the tensor {tensor.name!r} is in two of its files")
                tensors[tensor.name] = StoredTensor(tensor, view)
            first = first or header
        if first is None:
            raise AssertionError("a model has a first file")
        expected = first.metadata.get("split.tensors.count", len(tensors))
        if expected != len(tensors):
            raise corrupt(what, f"it says that it has {expected} tensors and has {len(tensors)}")
        yield first, tensors


def parts(source: Path, what: str) -> list[Path]:
    """The files of a model, by the first one's name. Raises ModelCorrupt if one is missing."""
    match = _SPLIT.fullmatch(source.name)
    if match is None:
        return [source]
    count = int(match[2])
    if count > limits.MODEL_FILES:
        raise corrupt(what, f"its name says that it has {count} parts")
    found = [source.with_name(f"{match[1]}-{number:05}-of-{match[2]}.gguf") for number in range(1, count + 1)]
    missing = [path.name for path in found if not path.is_file()]
    if missing:
        raise corrupt(what, f"its part {missing[0]} is not beside it")
    return found
