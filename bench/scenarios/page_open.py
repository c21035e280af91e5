"""What it costs to leave the page open: its memory, and processor time in the browser and in the daemon."""

from __future__ import annotations

import time
from typing import Any

import psutil

from bench.figures import Figure, Measured, at_most
from bench.harness.daemon import Daemon
from bench.scenarios.page import browsing, opened_page

_MINUTE_S = 60.0


def measure(minutes: int) -> Measured:
    """Raises RuntimeError where there is no browser."""
    with Daemon() as daemon, browsing() as browser, browser.new_context() as context:
        process = psutil.Process(daemon.process.pid)
        before_s = _used_s(process)
        time.sleep(_MINUTE_S)
        closed = (_used_s(process) - before_s) / _MINUTE_S
        page = opened_page(context, daemon)
        session = context.new_cdp_session(page)
        session.send("Performance.enable")
        heap = [_heap_mb(session)]
        drawn_s, before_s, begun = _drawn_s(session), _used_s(process), time.monotonic()
        for _ in range(minutes):
            time.sleep(_MINUTE_S)
            heap.append(_heap_mb(session))
        took_s = time.monotonic() - begun
        drawing, opened = (_drawn_s(session) - drawn_s) / took_s, (_used_s(process) - before_s) / took_s
        page.wait_for_selector(".link.live")
    return Measured(
        [
            Figure(
                "Memory that an open page takes more",
                "MB",
                [max(0.0, max(heap[1:]) - heap[0])],
                at_most(1.0),
                note="the most after any minute, with what is garbage collected",
            ),
            Figure("A page that is open, share of a core in the browser", "%", [drawing], at_most(0.01)),
            Figure("The same, in the daemon", "%", [max(0.0, opened - closed)], at_most(0.01)),
        ],
        f"An open page: for {minutes} minutes in headless Chromium, before a daemon without peers in which "
        "nothing happens. The browser's share is the time that the page's main thread works; the daemon's "
        "is what it uses more than in a minute without the page.",
    )


def _used_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _drawn_s(session: Any) -> float:
    return _metric(session, "TaskDuration")


def _heap_mb(session: Any) -> float:
    session.send("HeapProfiler.collectGarbage")
    return _metric(session, "JSHeapUsedSize") / 1e6


def _metric(session: Any, name: str) -> float:
    metrics = session.send("Performance.getMetrics")["metrics"]
    return float(next(one["value"] for one in metrics if one["name"] == name))
