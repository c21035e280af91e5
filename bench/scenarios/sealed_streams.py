"""Bulk bytes between two processes: what sealing costs, against plain TCP and against TLS."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from bench.figures import Figure, Measured, alternated, at_least
from bench.harness.child import Child
from bench.harness.samples import Samples

_GIB = 1 << 30
_BYTES = 2 * _GIB
# (kind, connections)
_TCP, _ONE, _TLS, _TWO = _SIDES = (("tcp", 1), ("sealed", 1), ("tls", 1), ("sealed", 2))


def measure(runs: int) -> Measured:
    seen = Samples()
    with (
        Child("sealed_streams") as receiver,
        Child("sealed_streams") as sender,
        ThreadPoolExecutor(1) as aside,
    ):

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
                seen[kind, streams].append(_BYTES / _GIB / found["took_s"])
                if (kind, streams) == _ONE:
                    seen.add(gained_mb=found["gained"] / 1e6)
    share = "Sealed stream, as a share of plain TCP"
    return Measured(
        [
            Figure("Sealed stream, one connection", "GiB/s", seen[_ONE], at_least(1.2)),
            Figure("Plain TCP", "GiB/s", seen[_TCP]),
            Figure("TLS 1.3 in uvloop", "GiB/s", seen[_TLS]),
            Figure(share, "%", seen.ratios(_ONE, _TCP), at_least(0.6)),
            Figure("Sealed stream over TLS in uvloop", "x", seen.ratios(_ONE, _TLS), at_least(1.3)),
            Figure("Sealed stream over two connections", "GiB/s", seen[_TWO]),
            Figure("Two connections over one", "x", seen.ratios(_TWO, _ONE)),
            Figure("Memory the receiver gains over one stream", "MB", seen["gained_mb"], of="worst"),
        ],
        _HOW,
    )


_HOW = (
    f"Two processes on loopback, {_BYTES // _GIB} GiB per measurement, from the accepted connection to the "
    "last byte received (TLS: its handshake included). Buffers are as large as a sealed chunk everywhere. "
    "Two connections: a thread for each at both ends."
)
