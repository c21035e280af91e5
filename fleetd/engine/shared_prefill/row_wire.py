"""Rows that cross a link in fewer bits than they are held in: packed at one end, numbers again at the other.

    rows of numbers ─► RowPacking.pack ─► frame of words ─► RowPacking.unpack ─► rows of rounded numbers

A scale and a bias belong to each group of numbers of a row, as in ``row_packing``. Every row is packed alone:
its words do not depend on chunks. What has no row for each token (windows, running states) and hidden states
are sent as they are held.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import mlx.core as mx
import numpy as np

from fleetd.engine.sequence_state.array_bytes import all_finite, as_bytes, empty_bytes, pieces
from fleetd.engine.sequence_state.row_memory import RowBuffer
from fleetd.engine.sequence_state.row_packing import RowPacking
from fleetd.engine.sequence_state.shapes import PackedShape
from fleetd.engine.shared_prefill.frame_payloads import Place
from fleetd.engine.shared_prefill.kv_layout import KvLayout
from fleetd.engine.streams.frames import Frame, FrameHeader, Kind
from fleetd.errors import PeerWrong


class RowWire:
    """``layout``: of rows as they are held. ``bits``: in which they are sent; 0 is as they are held.

    ``sent``: the same layout as it is on the wire, from which the sizes of frames follow.
    """

    def __init__(self, layout: KvLayout, bits: int = 0) -> None:
        self.layout, self.sent = layout, layout.on_wire(bits)

    def packing(self, head: FrameHeader) -> RowPacking | None:
        """How the rows of a frame are packed on the wire alone; None if it is sent as it is held."""
        if head.kind is not Kind.ROWS:
            return None
        shape = self.sent.parts(head.layer)[head.part]
        held = self.layout.parts(head.layer)[head.part]
        return shape.packing if isinstance(shape, PackedShape) and shape != held else None

    def payload(self, packing: RowPacking, keys: mx.array, values: mx.array) -> list[memoryview]:
        """(1, heads, T, width) each, packed."""
        words = [packing.pack(keys), packing.pack(values)]
        mx.eval(words)
        return [piece for each in words for piece in pieces(as_bytes(each)[0])]

    def memory(self, head: FrameHeader) -> list[memoryview] | None:
        """Memory for the words of an expected frame, a buffer per head; None for a frame of no words."""
        if self.packing(head) is None or not head.count:
            return None
        heads = self.sent.parts(head.layer)[head.part].heads  # type: ignore[union-attr]  # they have rows
        return [memoryview(each) for size in head.sizes if size for each in empty_bytes(heads, size // heads)]

    def unpack(self, frame: Frame, row_buffers: Mapping[Place, RowBuffer]) -> None:
        """Write the rows of a frame that is packed to their places; nothing for any other frame.

        Raises PeerWrong if a row is not finite: then none of the frame is written.
        """
        head = frame.head
        if (packing := self.packing(head)) is None or not head.count:
            return
        buffers, rows = iter(frame.buffers), []
        heads = self.sent.parts(head.layer)[head.part].heads  # type: ignore[union-attr]  # they have rows
        for width in filter(None, (packing.key_width, packing.value_width)):
            data = np.stack([np.frombuffer(one, np.uint32) for one in itertools.islice(buffers, heads)])
            words = mx.array(data.reshape(1, heads, head.count, -1))
            rows.append(mx.contiguous(packing.unpack(words, width)))
        mx.eval(rows)
        if not all(all_finite(each, 0, head.count) for each in rows):
            raise PeerWrong(f"Rows of layer {head.layer} came with scales that make no numbers of them.")
        places = row_buffers[head.layer, head.part].rows(head.start, head.end)
        whole = itertools.chain.from_iterable(as_bytes(each)[0] for each in rows)
        for place, numbers in zip(places, whole, strict=True):
            np.frombuffer(place, np.uint8)[:] = numbers.reshape(-1)
