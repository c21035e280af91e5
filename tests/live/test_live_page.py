"""The page of real daemons: paired through two pages, one killed, one started again, and one that answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import browser as browsers
import pytest
from browser import Visit
from forked_programs import Programs
from live_daemon import LiveDaemon, frozen
from live_fleet import LiveFleet, free_port

pytestmark = [browsers.NEEDED, pytest.mark.one_loop]

SETUP = ("Pairing", "Clients", "Settings")
MakeFleet = Callable[..., LiveFleet]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browsers.browser() as made:
        yield made


@pytest.fixture
def visit(chromium: Any) -> Iterator[Callable[[], Visit]]:
    visits: list[Visit] = []

    def make() -> Visit:
        visits.append(Visit(chromium))
        return visits[-1]

    yield make
    for each in visits:
        each.close()
    assert [text for each in visits for text in each.complaints] == []


def link(daemon: LiveDaemon) -> str:
    return str(daemon.control("POST", "/fleet/v1/page/ticket", {})["url"])


def opened(visit: Visit, daemon: LiveDaemon, view: str) -> Any:
    page = visit.open(link(daemon))
    page.wait_for_selector(".link.live")
    if view in SETUP:
        page.click("nav >> text=Setup")
    page.click(f"nav >> text={view}")
    return page


def test_two_machines_are_paired_through_their_pages_and_one_dies(
    make_fleet: MakeFleet, visit: Callable[[], Visit]
) -> None:
    fleet = make_fleet({"alpha": [], "beta": []}, meet="unknown", paired=False)
    host, port = fleet.peer_address("alpha")
    # One person, two tabs: a browser keeps the sessions of two daemons on one machine apart.
    person = visit()
    inviting, joining = opened(person, fleet["alpha"], "Pairing"), opened(person, fleet["beta"], "Pairing")
    inviting.click("text=Show a code")
    code = inviting.inner_text(".code")
    joining.fill("#code", code)
    joining.fill("#host", f"{host}:{port}")
    joining.click("button:has-text('Join')")
    assert inviting.inner_text(".phrase") == joining.inner_text(".phrase")
    inviting.click("text=It is the same")
    inviting.wait_for_selector("text=beta is paired.")
    joining.wait_for_selector("text=alpha is paired.")
    inviting.click("nav >> text=Fleet")
    inviting.wait_for_selector(".machines li:has-text('beta') .state.usable")
    fleet["beta"].kill()
    inviting.wait_for_selector(".machines li:has-text('beta').out .why")
    joining.wait_for_selector("text=The daemon does not answer.")


def test_a_page_goes_on_when_its_daemon_is_started_again(
    short_dir: Path, live_models: Path, programs: Programs, visit: Callable[[], Visit]
) -> None:
    flags = ["--http", f"127.0.0.1:{free_port()}"]
    home = short_dir / "again"
    person = visit()
    with LiveDaemon(home, live_models, programs=programs, flags=flags) as daemon:
        page = opened(person, daemon, "Models")
        daemon.stop()
        page.wait_for_selector("text=The daemon does not answer.")
    with LiveDaemon(home, live_models, programs=programs, flags=flags) as daemon:
        # The session ended with the daemon that gave it. A link in another tab brings this one back as well.
        page.wait_for_selector("main.login")
        person.open(link(daemon)).wait_for_selector(".link.live")
        page.wait_for_selector("main.view-models")
        page.wait_for_selector(".link.live")


def test_an_answer_and_why_it_took_as_long(live: LiveDaemon, visit: Callable[[], Visit]) -> None:
    page = opened(visit(), live, "Models")
    row = ".modelrows li:has-text('chain')"
    page.click(f"{row} >> text=Load")
    page.wait_for_selector(f"{row} >> text=Unload")
    page.click("nav >> text=Chat")
    page.select_option(".controls select", "chain")
    page.fill("#prompt", "<count>")
    page.click("text=Send")
    page.wait_for_selector(".assistant .text:has-text('3 4')")
    # However slow the page is: the answer does not end before it is stopped.
    with frozen(live.engine_pid("chain")):
        page.click("text=Stop")
        page.wait_for_selector("text=stopped")
    page.click("text=New chat")
    page.fill("#prompt", "<hello>")
    page.click("text=Send")
    page.click("text=where the time went")
    page.wait_for_selector(".waterfall >> text=writing")
    assert "chain" in page.inner_text(".detail h2")
