"""Control sessions between machines: how long a round trip takes, and how fast news are everywhere."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.child import Child
from bench.figures import Figure, Measured, at_most, percentile
from bench.fleet_daemons import pair

_COUNT = 2000
# So that a round trip under load is one now and then, not a load of its own.
_PAUSE_S = 0.002
_GIB = 1 << 30
_NODES = 5


@dataclass
class _Trips:
    """Per run, in milliseconds."""

    p50: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)

    def add(self, seconds: list[float]) -> None:
        self.p50.append(1000 * percentile(seconds, 0.50))
        self.p99.append(1000 * percentile(seconds, 0.99))


def measure(runs: int) -> Measured:
    pings, asks, loaded = _Trips(), _Trips(), _Trips()
    with (
        tempfile.TemporaryDirectory(prefix="fleetd-bench-") as folder,
        Child("node_child") as near,
        Child("node_child") as far,
    ):
        _meet(Path(folder), {near: ["near"], far: ["far"]})
        near.ask(do="ping", count=_COUNT // 10, pause_s=0)  # first touches
        for _ in range(runs):
            pings.add(near.ask(do="ping", count=_COUNT, pause_s=0)["found"])
            asks.add(near.ask(do="ask", count=_COUNT, pause_s=0)["found"])
        with _saturated():
            for _ in range(runs):
                loaded.add(near.ask(do="ping", count=_COUNT, pause_s=_PAUSE_S)["found"])
    roster_ms, card_ms = _news(runs)
    return Measured(_figures(pings, asks, loaded, roster_ms, card_ms), _HOW)


def _meet(root: Path, names: dict[Child, list[str]]) -> None:
    """Start nodes in these processes and let them find each other."""
    ids = pair({name: root / name / "identity" for some in names.values() for name in some})
    ports: dict[str, int] = {}
    for child, some in names.items():
        opened = child.ask(do="open", folders=[str(root / name / "identity") for name in some])["found"]
        ports |= {ids[name]: port for name, port in zip(some, opened, strict=True)}
    for child in names:
        child.ask(do="meet", ports=ports)


@contextmanager
def _saturated() -> Iterator[None]:
    """While a sealed stream runs between two other processes, as fast as it can."""
    over = threading.Event()
    work = {"kind": "sealed", "streams": 1, "bytes": _GIB}
    with Child("stream_child") as receiver, Child("stream_child") as sender, ThreadPoolExecutor(2) as aside:

        def stream() -> None:
            while not over.is_set():
                port = receiver.ask(do="listen", **work)["port"]
                received = aside.submit(receiver.ask, do="receive", **work)
                sender.ask(do="send", port=port, **work)
                received.result()

        running = aside.submit(stream)
        try:
            yield
        finally:
            over.set()
            running.result()


def _news(runs: int) -> tuple[list[float], list[float]]:
    """Milliseconds until every machine knows a new member, and a new card."""
    names = [f"node-{number}" for number in range(_NODES)]
    with tempfile.TemporaryDirectory(prefix="fleetd-bench-") as folder, Child("node_child") as child:
        root = Path(folder)
        _meet(root, {child: names})
        newcomers = [str(root / f"newcomer-{run}" / "identity") for run in range(runs)]
        roster = [1000 * child.ask(do="admit", folder=folder)["found"] for folder in newcomers]
        return roster, [1000 * child.ask(do="publish")["found"] for _ in range(runs)]


def _figures(
    pings: _Trips, asks: _Trips, loaded: _Trips, roster_ms: list[float], card_ms: list[float]
) -> list[Figure]:
    return [
        Figure("Control round trip on loopback, p50", "ms", pings.p50, at_most(0.2)),
        Figure("Control round trip on loopback, p99", "ms", pings.p99, at_most(0.6)),
        Figure("Control round trip beside a saturating sealed stream, p50", "ms", loaded.p50),
        Figure("Control round trip beside a saturating sealed stream, p99", "ms", loaded.p99, at_most(2.0)),
        Figure("Request with a short answer, p50", "ms", asks.p50),
        Figure("Request with a short answer, p99", "ms", asks.p99),
        Figure(f"New member known at all of {_NODES} machines", "ms", roster_ms),
        Figure(f"New card known at all of {_NODES} machines", "ms", card_ms),
    ]


_HOW = (
    "Round trips are pings of a session between two processes with nothing of a daemon but its node, "
    f"{_COUNT:,} per run one after the other; p50 and p99 are taken per run. A request also opens a stream "
    "and runs a handler at the other side. Under load two more processes move a sealed stream as fast as "
    f"they can, on all cores, and a ping leaves {1000 * _PAUSE_S:.0f} ms after the last one's answer. News: "
    f"{_NODES} connected nodes in one process; a member is admitted, or a card told, at one of them."
)
