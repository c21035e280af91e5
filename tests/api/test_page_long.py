"""What takes longer to judge the page by: a checker of accessibility, and an open page that is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import browser as browsers
import pytest
from agent_programs import npm_install
from api_fakes import MODEL
from page_fakes import VIEWS, PageWorld, fleet_of, goto, trace

from fleetd.control.daemon_status import RunningRequest

pytestmark = [browsers.NEEDED, pytest.mark.one_loop, pytest.mark.long]

SERIOUS = ("serious", "critical")
CHANGES = 2000


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of axe-core, which is fetched from npm; without it the test is skipped, and says so."""
    folder = tmp_path_factory.mktemp("axe")
    npm_install(folder, "axe-core")
    return Path(folder / "node_modules" / "axe-core" / "axe.min.js").read_text(encoding="utf-8")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1440])
def test_a_checker_of_accessibility_finds_no_serious_fault(
    world: PageWorld, axe: str, scheme: str, width: int
) -> None:
    world.fleet.fleet = fleet_of(9)
    world.traces = [trace(n) for n in range(3)]
    world.requests = [RunningRequest("r1", MODEL, stage="reading the prompt", done=5, total=9)]
    page = world.opened(color_scheme=scheme, viewport={"width": width, "height": 800})
    page.evaluate(axe)
    for view in (*VIEWS, f"requests/{world.traces[0].id}"):
        goto(page, view)
        page.wait_for_selector("main:not(:has-text('Waiting for the'))")
        assert faults(page) == [], view
    page.click("text=Log out")
    page.wait_for_selector("main.login")
    assert faults(page) == []


def faults(page: Any) -> list[str]:
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    return [
        f"{fault['id']}: {node['html'][:200]}"
        for fault in found
        if fault["impact"] in SERIOUS
        for node in fault["nodes"]
    ]


def test_a_page_that_stays_open_takes_no_more_memory(world: PageWorld) -> None:
    """As many changes as an hour of a busy fleet brings, one after the other."""
    world.traces = [trace(n) for n in range(200)]
    page = world.opened()
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")

    def heap_bytes() -> float:
        session.send("HeapProfiler.collectGarbage")
        metrics = session.send("Performance.getMetrics")["metrics"]
        return float(next(one["value"] for one in metrics if one["name"] == "JSHeapUsedSize"))

    def changes(number: int) -> None:
        told = """async (number) => {
          const {redraw, state} = await import("/page/store.js");
          const [id, peer] = [...state.peers][0];
          for (let at = 0; at < number; at++) {
            state.peers.set(id, {...peer, running: at % 3, name: `machine-${at % 7}`});
            redraw();
            await new Promise(requestAnimationFrame);
          }
        }"""
        page.evaluate(told, number)

    changes(CHANGES // 10)
    before = heap_bytes()
    changes(CHANGES)
    assert heap_bytes() - before < 500_000
