"""The page in a real browser, against a scripted daemon: what people do with it, and what other pages try."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import browser as browsers
import pytest
from api_fakes import MODEL, Step, engine, speak, status
from browser import OTHER_SITE, REBOUND
from fakes import FakePullStep
from live_daemon import until
from msgspec.structs import replace
from page_fakes import VIEWS, PageWorld, fleet_of, goto, let_go, trace

from fleetd import limits
from fleetd.control import pairing_events
from fleetd.control.daemon_status import DaemonStatus, HeldLayers, RunningPull, RunningRequest
from fleetd.control.fleet_view import FleetView, PeerModel, PeerView
from fleetd.control.model_facts import ModelShape
from fleetd.control.prefill_plan import OptionView
from fleetd.engine import protocol as p
from fleetd.requests.job import Job

#: Between the first and the last of several layers.
TO = "\N{EN DASH}"
pytestmark = [browsers.NEEDED, pytest.mark.one_loop]

HOSTILE = (
    '<img src=x onerror="document.title=1"><script>document.title=1</script> \x1b[31mred\x1b[0m \u202eabc'
)


# ---- Logging in ------------------------------------------------------------------------------------------


def test_a_link_logs_in_once_and_leaves_the_address_bar(world: PageWorld) -> None:
    link = world.link
    page = world.person.open(link)
    page.wait_for_selector(".link.live")
    assert page.url == f"{world.site.url}/#fleet"
    assert page.evaluate("document.cookie") == ""
    ticket = link.partition("=")[2]
    assert ticket not in page.content()
    # Another tab of this browser needs no ticket; another browser is told that this one is spent.
    world.person.open(world.site.url).wait_for_selector(".link.live")
    other = world.visit().open(link)
    other.wait_for_selector("text=was used before, or is too old")
    assert "fleetctl open" in other.inner_text("main")


def test_a_late_link_opens_nothing_and_a_new_one_does(world: PageWorld) -> None:
    link = world.link
    world.now_s += limits.PAGE_TICKET_S
    page = world.person.open(link)
    page.wait_for_selector("text=was used before, or is too old")
    # The same tab goes on with a link that is opened in it.
    page.goto(world.link)
    page.wait_for_selector(".link.live")


def test_logging_out_ends_every_tab_and_another_link_brings_them_back(world: PageWorld) -> None:
    page = world.opened()
    other = world.person.open(world.site.url)
    other.wait_for_selector(".link.live")
    page.click("text=Log out")
    page.wait_for_selector("main.login")
    other.wait_for_selector("main.login")
    page.goto(world.link)
    page.wait_for_selector(".link.live")
    other.wait_for_selector(".link.live")


# ---- Looking and doing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [320, 1440])
def test_every_view_fits_its_width(world: PageWorld, width: int) -> None:
    world.traces = [trace(n) for n in range(3)]
    world.requests = [RunningRequest("r1", MODEL, stage="reading the prompt", done=5, total=9)]
    page = world.opened()
    page.set_viewport_size({"width": width, "height": 700})
    for view in (*VIEWS, f"requests/{world.traces[0].id}"):
        goto(page, view)
        page.wait_for_selector("main:not(:has-text('Waiting for the'))")
        wide = "document.scrollingElement.scrollWidth - document.scrollingElement.clientWidth"
        assert page.evaluate(wide) <= 0, view


def test_the_keyboard_alone_reaches_a_view(world: PageWorld) -> None:
    page = world.opened()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    for _ in ("fleet", "requests", "models"):
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("main.view-models")
    page.wait_for_function("document.activeElement.id === 'main'")


def test_a_request_tells_why_it_took_as_long(world: PageWorld) -> None:
    world.traces = [trace(1)]
    page = world.opened("requests")
    page.click("table.past a")
    page.wait_for_selector(".waterfall")
    told = page.inner_text(".detail")
    for part in (
        "2.10 s",
        "layers 0 to 11",
        "layers 12 to 29",
        "1.0 MB",
        "100 not read again",
        "It is 75 % slower",
        "Alternatives",
        "read by 2 machines",
    ):
        assert part in told, part
    # The sentence is the first thing that is read, and a machine always has its name.
    lines = [line for line in told.splitlines() if line.strip()]
    assert lines[1].startswith("2.1 s: 2.0 s reading together")
    assert "this" not in told.split()
    assert [row.inner_text() for row in page.query_selector_all(".waterfall .machine")] == ["mini", "studio"]


def test_the_bars_of_a_request_are_the_begins_and_ends_of_its_steps(world: PageWorld) -> None:
    """They used to be laid end to end: a step that contained others stood beside them, and ended late."""
    world.traces = [trace(1)]
    page = world.opened("requests")
    page.click("table.past a")
    page.wait_for_selector(".waterfall")
    bars = page.eval_on_selector_all(
        ".waterfall rect", "all => all.map((one) => [+one.getAttribute('x'), +one.getAttribute('width')])"
    )
    assert all(x >= 0 and x + width <= 1000.5 for x, width in bars)
    reading, writing = bars[1:3]
    assert reading == [32.3, 645.2]
    assert writing[0] == pytest.approx(reading[0] + reading[1], abs=0.2)
    # What took less than 1 % is folded until it is asked for.
    assert "exposed hand-off" not in page.inner_text(".waterfall")
    page.click("text=Show 1 more of less than 1 %")
    page.wait_for_selector(".waterfall >> text=exposed hand-off")


def test_each_step_is_explained_to_a_mouse_and_to_a_keyboard(world: PageWorld) -> None:
    world.traces = [trace(1)]
    page = world.opened("requests")
    page.click("table.past a")
    page.hover(".waterfall .step >> text=reading")
    page.wait_for_selector(".explain >> text=reading: The prompt was read")
    page.focus(".waterfall .step >> text=waiting")
    page.wait_for_selector(".explain >> text=waiting: No machine worked on")


def test_a_request_that_took_more_than_half_as_long_again_is_amber_and_says_so(world: PageWorld) -> None:
    late = trace(
        1, planned_ttft_s=0.8, late=True, summary="2.1 s: 2.0 s reading. That is 2.6x the planned time."
    )
    world.traces = [late]
    page = world.opened("requests")
    page.click("table.past a")
    page.wait_for_selector(".detail .outcome.late >> text=read by 2 machines; 2.6x the planned time")
    page.wait_for_selector(".detail .summary.late")
    assert page.query_selector(".detail .outcome.shared") is None


def test_what_runs_shows_its_progress_machine_by_machine(world: PageWorld) -> None:
    plan = OptionView("tokens", ["studio", "this"], 2.0, chosen=True, cuts=[0, 3000, 4000])
    world.requests = [
        RunningRequest("r1", MODEL, stage="reading the prompt", done=1024, total=4000, plan=plan)
    ]
    page = world.opened("requests")
    page.wait_for_selector("text=1,024 of 4,000 tokens")
    assert "tokens 0 to 2,999" in page.inner_text(".parts")
    world.requests = []
    page.wait_for_selector("text=Nothing runs.")


def test_a_machine_that_is_lost_says_why(world: PageWorld) -> None:
    page = world.opened()
    page.wait_for_selector(".machines li:has-text('machine-01') .state.usable")
    peers = [*world.fleet.fleet.peers]
    peers[1] = PeerView("node01", "n01", "machine-01", "unreachable", "It does not answer.", "Is it on?")
    world.fleet.fleet = FleetView(True, "me", "me", "mini", peers=peers)
    page.wait_for_selector(".machines li:has-text('machine-01') >> text=It does not answer. Is it on?")


def test_a_model_is_pulled_loaded_and_removed(world: PageWorld) -> None:
    waits: list[asyncio.Event] = []

    def steps() -> Iterable[Any]:
        waits.append(asyncio.Event())
        return [FakePullStep("model.safetensors", 3_000_000, 12_000_000), waits[0]]

    class Lazy(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(list(steps()))

    world.models.pull_steps = Lazy()
    page = world.opened("models")
    page.fill("#search", "someone/tiny-model")
    page.click("text=Download someone/tiny-model")
    page.wait_for_selector("text=3.0 MB of 12 MB")
    let_go(waits[0])
    row = ".modelrows li:has-text('tiny-model')"
    page.wait_for_selector(row)
    page.click(f"{row} >> text=Load")
    until(lambda: world.pool.loaded == ["someone/tiny-model"])
    page.click(f"{row} >> text=Remove …")
    page.click(f"{row} >> text=for good")
    until(lambda: world.models.removed == ["someone/tiny-model"])


def test_a_chat_shows_any_text_as_text_and_stops(world: PageWorld) -> None:
    def script(job: Job) -> Iterable[Step]:
        yield p.Accepted(job.request.id, 9)
        yield p.Prefill(job.request.id, 9, 9)
        yield p.Delta(job.request.id, HOSTILE)
        yield asyncio.Event()

    world.runner.script = script
    page = world.opened("chat")
    page.fill("#prompt", HOSTILE)
    page.click("text=Send")
    page.wait_for_selector(".assistant .text:has-text('<script>')")
    for place in (".user .text", ".assistant .text"):
        shown = page.inner_text(place)
        assert "<img src=x" in shown
        assert "\\u{1b}[31mred" in shown
        assert "\\u{202e}abc" in shown
    assert page.title() == "Chat · mini"
    page.click("text=Stop")
    page.wait_for_selector("text=stopped")
    until(lambda: len(world.runner.cancelled) == 1)
    # The next one is answered: nothing of the first is left.
    world.runner.script = speak
    page.fill("#prompt", "And now?")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=The answer is complete.", state="attached")


def test_answers_of_a_chat_follow_a_schema_until_a_new_one(world: PageWorld) -> None:
    schema = '{"type": "object", "properties": {"2": {"maximum": 12345678901234567890}, "1": {}}}'
    held: list[str | None] = []

    def script(job: Job) -> Iterable[Step]:
        held.append(job.request.constraint.text if job.request.constraint else None)
        return speak(job)

    world.runner.script = script
    page = world.opened("chat")
    assert not page.is_visible("#schema")
    page.click("text=Answer as JSON schema")
    for text, why in (('{"type": }', "not valid JSON"), ("[1]", "A schema is an object")):
        page.fill("#schema", text)
        page.fill("#prompt", "One?")
        page.click("text=Send")
        page.wait_for_selector(f"#wrong:has-text('{why}')")
        page.wait_for_function("document.activeElement.id === 'schema'")
    assert page.input_value("#prompt") == "One?"
    assert held == []
    page.fill("#schema", schema)
    page.wait_for_selector("#wrong:text-is('')", state="attached")
    page.click("text=Send")
    page.wait_for_selector(".assistant >> text=where the time went")
    # It stays, also when the field is closed and the view is left.
    page.click("text=Answer as JSON schema: in use")
    goto(page, "models")
    goto(page, "chat")
    assert not page.is_visible("#schema")
    page.fill("#prompt", "Two?")
    page.click("text=Send")
    page.wait_for_selector(":nth-match(.assistant, 2) >> text=where the time went")
    page.click("text=New chat")
    page.wait_for_selector("summary:text-is('Answer as JSON schema')")
    page.fill("#prompt", "Three?")
    page.click("text=Send")
    page.wait_for_selector(".assistant >> text=where the time went")
    exact = json.dumps(json.loads(schema), separators=(",", ":"))
    assert held == [exact, exact, None]
    assert list(json.loads(exact)["properties"]) == ["2", "1"]


def test_what_smart_prefill_would_drop_is_marked_before_a_long_prompt_is_sent(world: PageWorld) -> None:
    page = world.opened("chat")
    page.fill("#prompt", "a short question")
    assert page.locator("text=Preview what smart prefill would keep").count() == 0
    page.fill("#prompt", f"first line 😀\n{'second line ' * 800}\nthird line")
    page.click("text=Preview what smart prefill would keep")
    page.wait_for_selector(".selection")
    assert page.eval_on_selector_all(".selection mark", "all => all.map(one => one.textContent.trim())") == [
        "first line 😀",
        "third line",
    ]
    assert page.eval_on_selector(".selection del", "one => one.textContent.trim()").startswith("second line")
    assert world.runner.jobs == []
    # Another text is another question.
    page.fill("#prompt", "first")
    page.wait_for_selector(".selection", state="detached")


def test_pairing_asks_about_the_phrase(world: PageWorld) -> None:
    world.fleet.waiting = "abc"
    world.fleet.steps = [
        pairing_events.CodeShown("12-abcde-fghij", 300.0, 3, "mini", 8115, ["10.0.0.2"]),
        pairing_events.Meeting("abc", "abc", "studio", "calm otter"),
        asyncio.Event(),
    ]
    page = world.opened("pairing")
    page.click("text=Show a code")
    page.wait_for_selector("text=calm otter")
    page.uncheck("label:has-text('may see prompts of this fleet') input")
    page.click("text=It is the same")
    until(lambda: world.fleet.answered == [("abc", True, False)])
    page.click("text=Stop pairing")
    until(world.fleet.closed.is_set)


def test_a_new_machine_is_named_and_may_be_kept_when_the_one_that_added_it_goes(world: PageWorld) -> None:
    peers = [
        PeerView("node00", "n00", "studio", "usable", allowed_here=True, brings=["node01"]),
        PeerView("node01", "n01", "printer", "usable", new=True, through="studio"),
    ]
    world.fleet.fleet = FleetView(True, "me", "me", "mini", peers=peers)
    page = world.opened()
    page.wait_for_selector("text=printer (n01) is new, on the word of studio")
    goto(page, "pairing")
    page.wait_for_selector("li:has(h3:has-text('printer')) >> text=New: it is here on the word of studio.")
    page.click("li:has(h3:has-text('studio')) >> text=Unpair …")
    page.check("label:has-text('keep printer') input")
    page.click("text=Remove studio from the fleet")
    until(lambda: getattr(world.fleet, "kept", None) == ["node01"])
    assert world.fleet.unpaired == ["node00"]


def test_a_large_fleet_and_many_requests_are_drawn(world: PageWorld) -> None:
    world.fleet.fleet = fleet_of(64)
    world.traces = [trace(n) for n in range(1000)]
    page = world.opened()
    # Some machines are drawn with each frame.
    page.wait_for_selector(".machines > li:nth-child(65)")
    page.wait_for_function("() => document.querySelectorAll('.picture .spot').length === 65")
    assert page.locator(".machines > li").count() == 65
    goto(page, "requests")
    page.wait_for_selector("table.past")
    assert page.locator("table.past tbody tr").count() == 50


# ---- What other pages try --------------------------------------------------------------------------------

ATTACK = """async (victim) => {
  const seen = [];
  const ask = (path, more) => fetch(victim + path, {credentials: "include", ...more})
    .then(async (answer) => seen.push([path, answer.type, await answer.text()]), () => {});
  await ask("/fleet/v1/status");
  await ask("/fleet/v1/status", {mode: "no-cors"});
  await ask("/", {mode: "no-cors"});
  await ask("/page/app.js");
  await ask("/fleet/v1/unpair", {method: "POST", mode: "no-cors", body: '{"peer": "machine-00"}'});
  const json = {"Content-Type": "application/json", "X-Fleet-Page": "x"};
  await ask("/fleet/v1/unpair", {method: "POST", headers: json, body: '{"peer": "machine-00"}'});
  await ask("/v1/chat/completions", {method: "POST", mode: "no-cors", body: '{"messages": []}'});
  const outcome = (element, url, done) => new Promise((end) => {
    element.onload = () => end(done + " loaded"); element.onerror = () => end(done + " refused");
    setTimeout(() => end(done + " silent"), 20000);
    element.src = url; document.body.append(element);
  });
  const image = await outcome(new Image(), victim + "/page/icon.svg", "image");
  const script = await outcome(document.createElement("script"), victim + "/page/units.js", "script");
  const socket = await new Promise((end) => {
    const made = new WebSocket(victim.replace("http", "ws") + "/fleet/v1/events");
    made.onopen = () => end("opened"); made.onerror = () => end("refused");
  });
  const frame = document.createElement("iframe");
  await outcome(frame, victim + "/", "frame");
  let inside = "hidden";
  try { if (frame.contentDocument) inside = "readable " + frame.contentDocument.body.innerText; } catch {}
  const form = document.createElement("form");
  const action = victim + "/fleet/v1/unpair";
  Object.assign(form, {method: "post", action, enctype: "text/plain", target: "sink"});
  const sink = document.createElement("iframe"); sink.name = "sink"; document.body.append(sink);
  const field = document.createElement("input");
  Object.assign(field, {name: '{"peer": "machine-00", "x": "', value: '"}'});
  form.append(field); document.body.append(form);
  await new Promise((end) => { sink.onload = end; form.submit(); setTimeout(end, 3000); });
  return {seen, image, script, socket, inside, length: frame.contentWindow.length};
}"""


@contextmanager
def other_server() -> Iterator[tuple[int, list[dict[str, str]]]]:
    """Another program of this machine that serves a page: its port, and the headers that it was sent."""
    asked: list[dict[str, str]] = []

    class OtherSiteHandler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(dict(self.headers))
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>other</title><body>")

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), OtherSiteHandler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port, asked
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("host", [OTHER_SITE, "127.0.0.1"])
def test_attack_a_page_of_another_origin_does_and_reads_nothing(world: PageWorld, host: str) -> None:
    """On another site, and on another port of this machine, which browsers count as the same site."""
    world.opened()
    with other_server() as (port, asked):
        page = world.person.open(f"http://{host}:{port}/")
        found = page.evaluate(ATTACK, world.site.url)
        world.person.complaints.clear()  # the browser's own words about what it refused
    assert [seen for seen in found["seen"] if seen[1] != "opaque" or seen[2]] == []
    assert (found["image"], found["script"]) == ("image refused", "script refused")
    assert found["socket"] == "refused"
    assert found["inside"] == "hidden"
    assert world.runner.jobs == []
    assert not hasattr(world.fleet, "unpaired")
    # Another port is sent the cookie, which is why it opens nothing alone (test_page_http.py).
    cookies = [headers.get("Cookie", "") for headers in asked]
    assert any("fleetd-" in cookie for cookie in cookies) == (host == "127.0.0.1")


def test_attack_a_page_that_opens_the_page_in_a_window_cannot_reach_into_it(world: PageWorld) -> None:
    world.opened()
    with other_server() as (port, _):
        page = world.person.open(f"http://{OTHER_SITE}:{port}/")
        with page.context.expect_page() as opened:
            page.evaluate("url => { window.other = window.open(url); }", world.site.url)
        # It is the page, as after a click on a link; but the one that opened it has lost it.
        opened.value.wait_for_selector(".link.live")
        page.wait_for_function("window.other.closed")


def test_attack_a_name_that_was_rebound_to_this_machine_is_refused(world: PageWorld) -> None:
    world.opened()
    page = world.person.context.new_page()
    for path in ("/", "/page/app.js", "/fleet/v1/status", "/v1/models"):
        answer = page.goto(f"http://{REBOUND}:{world.site.port}{path}")
        assert answer.status == 403
    # Logged in or not: nothing of the page runs under that name.
    assert "does not name this server" in page.content()


def test_attack_no_secret_of_a_session_can_be_read_from_the_page(world: PageWorld) -> None:
    page = world.opened("clients")
    token = world.services().token
    assert token not in page.content()
    for path in ("/fleet/v1/env", "/fleet/v1/page/ticket"):
        asked = "path => fetch(path, {headers: {'X-Fleet-Page': localStorage['fleetd-page-key']}})"
        assert page.evaluate(f"{asked}.then(answer => answer.status)", path) in (404, 405)


# What moves although nobody did anything, with the elements that moved: as browsers score it.
WATCH_SHIFTS = """
window.shifts = [];
new PerformanceObserver((list) => {
  for (const one of list.getEntries()) {
    const moved = one.sources.map(({ node }) => node?.outerHTML?.slice(0, 80) ?? node?.data ?? "?");
    if (!one.hadRecentInput) window.shifts.push([one.value, ...moved]);
  }
}).observe({ type: "layout-shift", buffered: true });
"""


@pytest.mark.parametrize("width", [320, 1440])
def test_nothing_on_a_page_moves_while_it_opens(world: PageWorld, width: int) -> None:
    world.traces = [trace(n) for n in range(60)]
    world.fleet.fleet = fleet_of(12)
    visit = world.visit(viewport={"width": width, "height": 700})
    visit.context.add_init_script(WATCH_SHIFTS)
    page = visit.open(world.link)
    for view in ("fleet", "requests", "models", f"requests/{world.traces[0].id}"):
        page.wait_for_selector(".link.live")
        goto(page, view)
        page.reload()
        page.wait_for_selector(".link.live")
        page.wait_for_selector("main:not(:has-text('Waiting for the'))")
        # Two frames: what the last one moved is known then.
        page.evaluate("() => new Promise((then) => requestAnimationFrame(() => requestAnimationFrame(then)))")
        assert page.evaluate("window.shifts") == [], view


# ---- A model over several machines -----------------------------------------------------------------------


def together(world: PageWorld, **changes: Any) -> Callable[[], DaemonStatus]:
    """This machine has the first half of the model."""
    held = [HeldLayers("studio", 15, 20), HeldLayers("kitchen", 20, 30)]
    given: dict[str, Any] = {"members": held, "shape": ModelShape(layers=30), **changes}
    return lambda: status(engines=[engine(**given)], fleet=world.fleet.fleet)


def test_chips_say_who_holds_which_layers_here_and_for_others(world: PageWorld) -> None:
    why = "Cut anew, as a layer was measured to take 4.0 times as long on kitchen as on this."
    world.status = together(world, cut_anew=why)
    held: dict[str, Any] = {"part_first": 15, "part_last": 20, "part_total": 30, "part_asked_by": "mini"}
    part = PeerModel(MODEL, "installed", ["chat"], **held)
    peers = [*world.fleet.fleet.peers]
    peers[0] = replace(peers[0], models=[part])
    world.fleet.fleet = replace(world.fleet.fleet, peers=peers)
    page = world.opened()
    chip = page.wait_for_selector(f".chip:has-text('{MODEL}'):has-text('here')")
    assert f"layers 0{TO}14 here, 15{TO}19 on studio, 20{TO}29 on kitchen" in chip.inner_text()
    assert chip.query_selector(".tag[title]").get_attribute("title") == why
    other = page.wait_for_selector(f".machines li:has-text('{peers[0].name}') .chip")
    assert f"layers 15{TO}19 of 30, for mini" in other.inner_text()
    goto(page, "models")
    page.wait_for_selector(f"text=layers 0{TO}14 here, 15{TO}19 on studio, 20{TO}29 on kitchen")


def test_while_it_loads_a_chip_says_how_far_each_machine_is(world: PageWorld) -> None:
    held = [
        HeldLayers("studio", 15, 20, "warming up", 5_000_000_000, 5_000_000_000),
        HeldLayers("kitchen", 20, 30, "reading", 2_000_000_000, 10_000_000_000),
    ]
    world.status = together(
        world, members=held, state="loading", stage="layers on studio, kitchen", done=7_000, total=15_000
    )
    page = world.opened()
    chip = page.wait_for_selector(f".chip:has-text('{MODEL}'):has-text('here')")
    assert (
        f"15{TO}19 on studio (warming up), 20{TO}29 on kitchen (reading, 2.0 GB of 10 GB)"
        in chip.inner_text()
    )
    world.status = together(world)
    page.wait_for_selector(f".chip:not(:has-text('reading')):has-text('20{TO}29 on kitchen')")


def test_divided_layers_and_models_that_are_fetched_are_said_on_the_page(world: PageWorld) -> None:
    coming = RunningPull("org/other", "downloading model.safetensors", 1_200_000_000, 2_300_000_000)
    rank = engine(model="n#1", part_of="n", rank=1, ranks=2, asked_by=["studio"])
    front = engine(ranks=2, members=[HeldLayers("studio", 0, 30)])
    world.status = lambda: status(engines=[front, rank], pulls=[coming], fleet=world.fleet.fleet)
    page = world.opened()
    page.wait_for_selector(f".chip:has-text('{MODEL} a part of every layer here and on studio')")
    page.wait_for_selector(".chip:has-text('n part 2 of 2 of every layer, for studio')")
    page.wait_for_selector(".chip:has-text('other downloading model.safetensors, 1.2 GB of 2.3 GB')")
    goto(page, "models")
    page.wait_for_selector("text=a part of every layer here and on studio")


def test_vectors_that_are_made_are_counted_in_texts(world: PageWorld) -> None:
    world.requests = [
        RunningRequest("r1", MODEL, route="embeddings", stage="making vectors", done=0, total=256)
    ]
    page = world.opened()
    goto(page, "requests")
    page.wait_for_selector("text=making vectors: 0 of 256 texts")
    assert "reads and answers" not in page.inner_text(".running")


def test_a_peer_that_holds_a_part_for_this_machine_is_not_shown_as_empty(world: PageWorld) -> None:
    peer = replace(world.fleet.fleet.peers[0], models=[])
    world.fleet.fleet = replace(world.fleet.fleet, peers=[peer])
    world.status = together(world, members=[HeldLayers(peer.name, 15, 30)])
    page = world.opened()
    row = page.wait_for_selector(f".machines li:has-text('{peer.name}'):has(.chip)")
    page.wait_for_selector(f".machines li .chip:has-text('layers 15{TO}29 of 30, for')")
    assert "no model loaded" not in row.inner_text()
