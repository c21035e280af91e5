"""The sending end of a stream: arrays and caches to frames, in the order in which they are due."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx

from fleetd.engine.sequence_state import array_bytes, row_memory, whole_states
from fleetd.engine.sequence_state.array_bytes import as_bytes
from fleetd.engine.shared_prefill import frame_payloads
from fleetd.engine.shared_prefill.frame_schedule import Outgoing
from fleetd.engine.shared_prefill.row_wire import RowWire
from fleetd.engine.streams.frames import FrameHeader, FramePipe, Kind


class FrameWriter:
    """Sends ``heads``, one per call, with what each call gives as their payload. ``sent``: bytes so far.

    ``wire``: in what form rows are due.
    """

    def __init__(
        self, pipe: FramePipe, heads: Iterable[FrameHeader], hashes: dict[int, bytes], wire: RowWire
    ) -> None:
        self._pipe, self._wire = pipe, wire
        self._out = Outgoing(heads, hashes)
        self.sent = 0

    @property
    def backlog(self) -> int:
        return self._pipe.backlog

    def tokens(self, payload: bytes) -> None:
        """The prompt without its last token, int32 each, little endian."""
        self._send(self._out.next(), [memoryview(payload)])

    def hidden(self, hidden: mx.array) -> None:
        """(1, T, width), evaluated."""
        self._send(self._out.next(), [frame_payloads.hidden_payload(hidden)])

    def rows(self, keys: mx.array, values: mx.array) -> None:
        """(1, heads, T, width) each, evaluated."""
        head = self._out.next()
        if (packing := self._wire.packing(head)) is not None:
            self._send(head, self._wire.payload(packing, keys, values))
        else:
            self._send(head, [piece for x in (keys, values) for piece in array_bytes.pieces(as_bytes(x)[0])])

    def cache(self, cache: Any) -> None:
        """What is due of one of a layer's caches. It is not copied: nothing may be added to it in place."""
        head = self._out.next()
        if head.kind is Kind.STATE:
            payload, sizes, index = whole_states.state(cache)
            self._send(self._out.state(head, sizes, index), payload)
        elif (packing := self._wire.packing(head)) is not None:
            rows = (each[..., head.start : head.end, :] for each in (cache.keys, cache.values))
            self._send(head, self._wire.payload(packing, *rows))
        else:
            self._send(head, row_memory.rows(cache, head.start, head.end))

    def done(self) -> None:
        self._send(self._out.next(), [])
        self.finish()

    def finish(self) -> None:
        self._pipe.finish()

    def _send(self, head: FrameHeader, payload: list[memoryview]) -> None:
        found = sum(part.nbytes for part in payload)
        if found != head.nbytes:
            raise RuntimeError(f"{head} is due; here are {found} bytes")
        self._pipe.send(head, *payload)
        self.sent += head.nbytes
