"""Bulk bytes between two processes: what sealing costs, against plain TCP and against TLS."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from bench.child import Child
from bench.figures import Figure, Measured, alternated, at_least, ratios

TITLE = "Sealed streams"
RUNS, QUICK_RUNS = 10, 3
_GIB = 1 << 30
_BYTES = 2 * _GIB
# (kind, connections)
_SIDES = (("tcp", 1), ("sealed", 1), ("tls", 1), ("sealed", 2))


@dataclass
class _Seen:
    gib_s: dict[tuple[str, int], list[float]] = field(default_factory=lambda: {side: [] for side in _SIDES})
    gained_mb: list[float] = field(default_factory=list)


def measure(runs: int) -> Measured:
    seen = _Seen()
    with Child("stream_child") as receiver, Child("stream_child") as sender, ThreadPoolExecutor(1) as aside:

        def moved(kind: str, streams: int, count: int) -> dict[str, float]:
            work = {"kind": kind, "streams": streams, "bytes": count}
            port = receiver.ask(do="listen", **work)["port"]
            received = aside.submit(receiver.ask, do="receive", **work)
            sender.ask(do="send", port=port, **work)
            return received.result()

        for kind, streams in _SIDES:  # imports, first touches of memory
            moved(kind, streams, _GIB // 8)
        for run in range(runs):
            for kind, streams in alternated(run, _SIDES):
                found = moved(kind, streams, _BYTES)
                seen.gib_s[kind, streams].append(_BYTES / _GIB / found["took_s"])
                if (kind, streams) == ("sealed", 1):
                    seen.gained_mb.append(found["gained"] / 1e6)
    return Measured(_figures(seen), _HOW)


def _figures(seen: _Seen) -> list[Figure]:
    sealed = seen.gib_s["sealed", 1]
    tcp, tls, striped = seen.gib_s["tcp", 1], seen.gib_s["tls", 1], seen.gib_s["sealed", 2]
    return [
        Figure("Sealed stream, one connection", "GiB/s", sealed, at_least(1.2)),
        Figure("Plain TCP", "GiB/s", tcp),
        Figure("TLS 1.3 in uvloop", "GiB/s", tls),
        Figure("Sealed stream, as a share of plain TCP", "%", ratios(sealed, tcp), at_least(0.6)),
        Figure("Sealed stream over TLS in uvloop", "x", ratios(sealed, tls), at_least(1.3)),
        Figure("Sealed stream over two connections", "GiB/s", striped),
        Figure("Two connections over one", "x", ratios(striped, sealed)),
        Figure("Memory the receiver gains over one stream", "MB", seen.gained_mb, of="worst"),
    ]


_HOW = (
    f"Two processes on loopback, {_BYTES // _GIB} GiB per measurement, from the accepted connection to the "
    "last byte received (TLS: its handshake included). Buffers are as large as a sealed chunk everywhere. "
    "Two connections: a thread for each at both ends."
)
