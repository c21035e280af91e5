"""Control sessions between machines: how long a round trip takes, and how fast news are everywhere."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from bench.figures import Figure, Measured, at_most, percentile
from bench.harness.child import Child
from bench.harness.fleet import pair
from bench.harness.samples import Samples
from fleetd import limits

_COUNT = 2000
# After which a machine takes as many questions at once again as before.
_REST_S = limits.SESSION_ASKS_AT_ONCE / limits.SESSION_ASKS_PER_S
# So that a round trip under load is one now and then, not a load of its own.
_PAUSE_S = 0.002
_GIB = 1 << 30
_NODES = 5


def measure(runs: int) -> Measured:
    seen = Samples()

    def trips(name: str, seconds: list[float]) -> None:
        seen[name, "p50"].append(1000 * percentile(seconds, 0.50))
        seen[name, "p99"].append(1000 * percentile(seconds, 0.99))

    with (
        tempfile.TemporaryDirectory(prefix="fleetd-bench-") as folder,
        Child("nodes") as near,
        Child("nodes") as far,
    ):
        _meet(Path(folder), {near: ["near"], far: ["far"]})
        near.ask(do="ping", count=_COUNT // 10, pause_s=0)  # first touches
        for _ in range(runs):
            for kind in ("ping", "ask"):
                time.sleep(_REST_S)
                trips(kind, near.ask(do=kind, count=_COUNT, pause_s=0)["found"])
        with _saturated():
            for _ in range(runs):
                trips("loaded", near.ask(do="ping", count=_COUNT, pause_s=_PAUSE_S)["found"])
    _news(runs, seen)
    beside = "Control round trip beside a saturating sealed stream"
    return Measured(
        [
            Figure("Control round trip on loopback, p50", "ms", seen["ping", "p50"], at_most(0.2)),
            Figure("Control round trip on loopback, p99", "ms", seen["ping", "p99"], at_most(0.6)),
            Figure(f"{beside}, p50", "ms", seen["loaded", "p50"]),
            Figure(f"{beside}, p99", "ms", seen["loaded", "p99"], at_most(2.0)),
            Figure("Request with a short answer, p50", "ms", seen["ask", "p50"]),
            Figure("Request with a short answer, p99", "ms", seen["ask", "p99"]),
            Figure(f"New member known at all of {_NODES} machines", "ms", seen["roster_ms"]),
            Figure(f"New card known at all of {_NODES} machines", "ms", seen["card_ms"]),
        ],
        _HOW,
    )


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
    with (
        Child("sealed_streams") as receiver,
        Child("sealed_streams") as sender,
        ThreadPoolExecutor(2) as aside,
    ):

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


def _news(runs: int, seen: Samples) -> None:
    """Milliseconds until every machine knows a new member, and a new card."""
    names = [f"node-{number}" for number in range(_NODES)]
    with tempfile.TemporaryDirectory(prefix="fleetd-bench-") as folder, Child("nodes") as child:
        _meet(Path(folder), {child: names})
        for run in range(runs):
            newcomer = str(Path(folder) / f"newcomer-{run}" / "identity")
            seen.add(roster_ms=1000 * child.ask(do="admit", folder=newcomer)["found"])
        for _ in range(runs):
            seen.add(card_ms=1000 * child.ask(do="publish")["found"])


_HOW = (
    "Round trips are pings of a session between two processes with nothing of a daemon but its node, "
    f"{_COUNT:,} per run one after the other; p50 and p99 are taken per run. A request also opens a stream "
    "and runs a handler at the other side. Under load two more processes move a sealed stream as fast as "
    f"they can, on all cores, and a ping leaves {1000 * _PAUSE_S:.0f} ms after the last one's answer. News: "
    f"{_NODES} connected nodes in one process; a member is admitted, or a card told, at one of them."
)
