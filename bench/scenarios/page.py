"""The page in headless Chromium: its first paint, a large fleet on it, and a machine that is gone."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bench.figures import Figure, Measured, at_most
from bench.harness.daemon import Daemon
from bench.harness.fleet import Fleet

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page, Route

_HERE, _OTHER = "here", "other"
_MACHINES, _REQUESTS = 64, 1000
_VIEWS = ("fleet", "requests", "history", "models", "pairing", "fleet", "requests")
_CHANGES_S = 5.0
_WAIT_MS = 60_000
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-sync",
)
_WATCH = """
window.longest = 0;
new PerformanceObserver((list) => {
  for (const task of list.getEntries()) window.longest = Math.max(window.longest, task.duration);
}).observe({type: "longtask", buffered: true});
"""


def measure(runs: int) -> Measured:
    """Raises RuntimeError where there is no browser."""
    paints: list[float] = []
    longest: list[float] = []
    with Daemon() as daemon, browsing() as browser:
        for _ in range(runs):
            paints.append(_first_paint(browser, daemon))
            longest.append(_longest_task(browser, daemon))
        gone = [_seen_gone(browser, number) for number in (signal.SIGKILL, signal.SIGSTOP) * runs]
    return Measured(
        [
            Figure("First paint of the page", "ms", paints, at_most(300)),
            Figure(
                "Longest task of the page",
                "ms",
                longest,
                at_most(100),
                "worst",
                f"{_MACHINES} simulated machines, {_REQUESTS} requests, while views change",
            ),
            Figure(
                "A machine that is killed, or falls silent, seen on another one's page",
                "s",
                gone,
                at_most(3.0),
                "worst",
            ),
        ],
        _HOW,
    )


@contextmanager
def browsing() -> Iterator[Browser]:
    """A headless Chromium. Raises RuntimeError where there is none."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise RuntimeError("there is no Chromium on this machine")
    # Other families are measured on machines that have no browser.
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=[*_FLAGS])
        yield browser
        browser.close()


def opened_page(context: BrowserContext, daemon: Daemon) -> Page:
    """A page that is logged in and live."""
    link = json.loads(daemon.control("POST", "/fleet/v1/page/ticket", {}))["url"]
    page = context.new_page()
    page.set_default_timeout(_WAIT_MS)
    page.goto(link)
    page.wait_for_selector(".link.live")
    return page


def _first_paint(browser: Browser, daemon: Daemon) -> float:
    with browser.new_context() as context:
        page = opened_page(context, daemon)
        said = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
        return float(page.evaluate(said))


def _seen_gone(browser: Browser, number: signal.Signals) -> float:
    """Seconds from a signal to a machine until another one's page shows it as gone."""
    with Fleet([_HERE, _OTHER]) as fleet, browser.new_context() as context:
        fleet.start_all()
        fleet.until_usable(_HERE, _OTHER)
        page = opened_page(context, fleet[_HERE])
        page.wait_for_selector(".machines li:nth-child(2):not(.out)")
        begun = fleet.signal(_OTHER, number)
        page.wait_for_selector(".machines li.out")
        return time.perf_counter() - begun


def _longest_task(browser: Browser, daemon: Daemon) -> float:
    """Milliseconds, with simulated events in the place of the daemon's."""
    status = daemon.status()
    fleet = {**status["fleet"], "enabled": True, "peers": []}
    peers = {peer["node_id"]: peer for peer in map(_peer, range(_MACHINES))}
    first = {"full": True, "status": {**status, "fleet": {}}, "fleet": fleet, "peers": peers}
    stream = f"data: {json.dumps(first)}\n\n" + "".join(
        f"data: {json.dumps({'peers': {key: {**peer, 'running': n % 4} for key, peer in peers.items()}})}\n\n"
        for n in range(10)
    )
    traces = json.dumps({"traces": [_trace(n) for n in range(_REQUESTS)]})

    def events(route: Route) -> None:
        route.fulfill(content_type="text/event-stream", body=stream)

    def past(route: Route) -> None:
        route.fulfill(content_type="application/json", body=traces)

    with browser.new_context() as context:
        context.add_init_script(_WATCH)
        page = context.new_page()
        page.set_default_timeout(_WAIT_MS)
        page.route("**/fleet/v1/events", events)
        page.route("**/fleet/v1/traces*", past)
        page.goto(json.loads(daemon.control("POST", "/fleet/v1/page/ticket", {}))["url"])
        page.wait_for_selector(".machines li:nth-child(60)")
        ends = time.monotonic() + _CHANGES_S
        while time.monotonic() < ends:
            for view in _VIEWS:
                page.evaluate("view => { location.hash = view; }", view)
                page.wait_for_selector(f"main.view-{view}")
        page.click("text=Older")
        return float(page.evaluate("window.longest"))


def _peer(number: int) -> dict[str, Any]:
    speed = {"prefill_tok_s": 900.0, "decode_tok_s": 40.0}
    model = {"name": "smollm2-135m", "state": "loaded", "roles": ["chat"], "speed": speed}
    return {
        "node_id": f"node{number:02}",
        "short_id": f"n{number:02}",
        "name": f"machine-{number:02}",
        "state": "usable",
        "reason": "",
        "hint": "",
        "tier": "standard",
        "chip": "M4 Max",
        "accelerator": "metal",
        "memory_bytes": 64 << 30,
        "available_bytes": 32 << 30,
        "running": 0,
        "waiting": 0,
        "models": [
            {
                **model,
                "speed": {"prefill_tok_s": 900.0, "decode_tok_s": 40.0},
                "part_first": 0,
                "part_last": 0,
            }
        ],
        "rtt_ms": 0.4,
        "bytes_per_s": 1.1e9,
        "link_doubtful": False,
        "heard_s": 0.2,
        "added_by": "",
        "allowed_here": True,
        "allowed_by_fleet": True,
        "paths": [],
    }


def _trace(number: int) -> dict[str, Any]:
    chosen = {
        "kind": "layers",
        "nodes": ["machine-01", "this"],
        "predicted_s": 2.0,
        "steps": [],
        "cuts": [0, 9, 30],
    }
    return {
        "id": f"chatcmpl-{number:08}",
        "at_s": time.time() - 60 * number,
        "model": "smollm2-135m",
        "prompt_tokens": 4000,
        "cached_tokens": 100,
        "kept_tokens": 0,
        "chosen": {**chosen, "cuts": [0, 9, 30], "prefill": "", "chunk": 0},
        "losers": [],
        "steps": [],
        "earlier": [],
        "capped": [],
        "outcome": "shared",
        "exactness": "exact",
        "code": "",
        "reason": "",
        "prefill_s": 1.9,
        "ttft_s": 2.1,
        "took_s": 3.0,
        "completion_tokens": 40,
        "verified_tokens": 0,
        "answered_by": "",
        "asked_by": "",
    }


_HOW = (
    "The page: headless Chromium without a GPU beside the daemon on the same processor. First paint counts "
    "from the opening of the link, with an empty cache. For the longest task, simulated events and requests "
    "take the place of the daemon's. A machine of two is killed (SIGKILL) or falls silent (SIGSTOP)."
)
