"""The page in a real browser: its views as people use them, by pointer and by keyboard."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import browser as browsers
import pytest
from api_fakes import MODEL, FakeLedger, Step, engine, speak, status
from live_daemon import until
from msgspec.structs import replace
from page_fakes import PageWorld, fleet_of, goto, let_go, trace

from fleetd import config, limits
from fleetd.api.control.settings_file import SettingsFile
from fleetd.control.fleet_view import FleetView, Neighbour, PeerView
from fleetd.control.model_facts import ModelShape
from fleetd.control.prefill_plan import OptionView
from fleetd.control.prefill_trace import MachineTexts, TextsWork
from fleetd.control.smart_prefill_result import SmartPrefillResult
from fleetd.control.usage_report import FirstTokenTimes, Span, UsageReport, UsageRow, UsageTotals
from fleetd.engine import protocol as p
from fleetd.requests.job import Job, Planned

pytestmark = [browsers.NEEDED, pytest.mark.one_loop]


# ---- Fleet -----------------------------------------------------------------------------------------------


class GainLedger(FakeLedger):
    """Has used these totals, today and in each of these days or hours."""

    def __init__(self, totals: UsageTotals, spans: Iterable[str] = ()) -> None:
        self.totals = totals
        self.spans = list(spans)

    def usage(self, days: int, by: Span = "day") -> UsageReport:
        names = self.spans if by == "day" else [f"{name} {time.strftime('%H')}:00" for name in self.spans]
        rows = [UsageRow(day=name, requests=4, first_tokens=4, saved_s=6.0, drafts_s=1.0) for name in names]
        return UsageReport(rows, self.totals, [FirstTokenTimes(name, 1.5, 4.25) for name in names])


def test_the_first_line_is_what_the_fleet_was_good_for_today(world: PageWorld) -> None:
    world.ledger = GainLedger(UsageTotals(requests=18, shared=2, saved_s=15.0, cached_tokens=2400))
    page = world.opened()
    page.wait_for_selector("text=Today 18 requests")
    told = page.inner_text(".gain")
    assert told == "Today 18 requests, 2 read together; 15.0 s saved; 2,400 tokens not read again."
    assert page.eval_on_selector("main", "one => [...one.querySelectorAll('p')][0].className") == "gain"


def test_a_memory_bar_adds_up_to_all_of_the_memory(world: PageWorld) -> None:
    held = engine(memory_bytes=6_000_000_000, prefix_bytes=1_000_000_000, kv_bytes=500_000_000)
    world.status = lambda: status(fleet=world.fleet.fleet, engines=[held])
    page = world.opened()
    page.wait_for_selector(".machines li:first-child .strip")
    parts = page.eval_on_selector_all(
        ".machines > li:first-child .legend li", "all => all.map(x => x.innerText)"
    )
    # 16 GiB are 17.2 GB; the fake machine has no free memory left.
    assert parts[:3] == [f"{MODEL} 4.5 GB", "kept prompts 1.0 GB", "running prompts 500 MB"]
    assert parts[3] == "other programs 11.2 GB"
    ends = page.eval_on_selector_all(
        ".machines > li:first-child .strip rect",
        "all => all.map(x => x.x.baseVal.value + x.width.baseVal.value)",
    )
    assert abs(max(ends) - 1000) < 2


def test_what_is_kept_on_the_disk_stands_beside_the_memory(world: PageWorld) -> None:
    held = engine(disk_written_bytes=1)
    world.status = lambda: status(fleet=world.fleet.fleet, engines=[held])
    world.disk_cache.n_bytes = 1_234_000_000
    page = world.opened()
    page.wait_for_selector(".machines > li:first-child .legend >> text=kept prompts on disk 1.2 GB")
    assert page.locator(".legend >> text=on disk").count() == 1
    # More is written; then all of it is thrown away.
    held, world.disk_cache.n_bytes = engine(disk_written_bytes=2), 2_500_000_000
    page.wait_for_selector(".legend >> text=kept prompts on disk 2.5 GB")
    held, world.disk_cache.n_bytes = engine(disk_written_bytes=2, prefix_bytes=1), 0
    page.wait_for_selector(".legend >> text=on disk", state="detached")


def test_what_is_not_known_of_a_lost_machine_is_not_shown_as_none(world: PageWorld) -> None:
    lost = PeerView("node01", "n01", "attic", "unreachable", "It does not answer.", "Is it on?")
    world.fleet.fleet = FleetView(True, "me", "me", "mini", peers=[lost])
    page = world.opened()
    row = page.wait_for_selector(".machines li:has-text('attic')").inner_text()
    assert "not known now" in row
    for word in ("idle", "no model", "free", "0 B"):
        assert word not in row


def test_a_machine_that_computes_vectors_is_not_idle(world: PageWorld) -> None:
    fleet = fleet_of(2)
    peers = [replace(peer, running=0, waiting=0, vectors=number) for number, peer in enumerate(fleet.peers)]
    world.fleet.fleet = replace(fleet, peers=peers)
    encoder = engine(shape=ModelShape(purpose="embedding"), prefilling=2)
    world.status = lambda: status(fleet=world.fleet.fleet, engines=[encoder])
    page = world.opened()
    page.wait_for_selector(f".machines > li:has-text('{peers[1].name}') >> text=computes vectors")
    page.wait_for_selector(".machines > li:first-child >> text=computes vectors")
    page.wait_for_selector(".machines > li >> text=idle")
    assert page.locator(".picture .edge.busy").count() == 1


@pytest.mark.parametrize(("others", "drawn"), [(0, 0), (1, 0), (2, 1), (12, 1)])
def test_the_picture_is_there_from_three_machines_on(world: PageWorld, others: int, drawn: int) -> None:
    world.fleet.fleet = fleet_of(others)
    page = world.opened()
    page.wait_for_selector(f".machines > li:nth-child({others + 1})")
    assert page.locator(".picture").count() == drawn


# ---- Requests --------------------------------------------------------------------------------------------


def two_requests(world: PageWorld) -> None:
    alone = OptionView("local", ["this"], None, chosen=True)
    world.traces = [
        trace(2, client="claude-cli", cached_tokens=3000),
        trace(
            1,
            client="fleetctl",
            outcome="failed",
            chosen=alone,
            reason="The model takes 8,192 tokens.",
            ttft_s=None,
            prefill_s=None,
            completion_tokens=0,
        ),
    ]


def test_a_request_for_vectors_says_how_much_each_machine_computed(world: PageWorld) -> None:
    machines = [
        MachineTexts("this", 4, 400, 25_600, 4.0),
        MachineTexts("studio", 6, 600, 38_400, 3.0, 1.0),
        MachineTexts("mini", code="peer_lost", reason="It went away."),
    ]
    world.traces = [
        trace(
            1,
            chosen=OptionView("spread", ["this", "studio"], None, chosen=True),
            losers=[],
            outcome="spread",
            prompt_tokens=64_000,
            ttft_s=None,
            prefill_s=None,
            completion_tokens=0,
            texts=TextsWork("embeddings", 1000, machines),
        )
    ]
    page = world.opened("requests")
    page.wait_for_selector("table.past")
    row = page.inner_text("table.past tbody tr")
    assert "computed together, 1,000 texts" in row
    assert "no token" not in row
    page.click("table.past tbody tr a")
    page.wait_for_selector(".detail .outcome.spread >> text=computed by several machines")
    detail = page.inner_text(".detail")
    assert "600 texts, 38,400 tokens in 6 parts, 3.00 s" in detail
    assert "loaded the model for 1.00 s" in detail
    assert "then left out: It went away. (peer_lost)" in detail
    assert "First token" not in detail


def test_a_row_says_who_asked_what_waited_where_and_what_came_of_it(world: PageWorld) -> None:
    two_requests(world)
    page = world.opened("requests")
    page.wait_for_selector("table.past")
    head = page.eval_on_selector_all("table.past thead th", "all => all.map(one => one.innerText)")
    assert head == ["Time", "Client", "Model", "Prompt", "Waited", "Speed", "Machines", "Result"]
    cells = page.eval_on_selector_all(
        "table.past tbody tr:first-child td", "all => all.map(one => one.innerText.trim())"
    )
    assert cells[1:] == [
        "claude-cli",
        MODEL,
        "4,000",
        "2.10 s",
        "39.0 tok/s",
        "studio + mini",
        "read together, 40 tokens",
    ]
    labels = page.eval_on_selector_all(
        "table.past tbody tr:first-child svg", "all => all.map(one => one.getAttribute('aria-label'))"
    )
    assert labels == ["3,000 not read again", "planned 2.00 s"]
    failed = page.inner_text("table.past tbody tr:nth-child(2)")
    assert "failed" in failed
    assert "The model takes 8,192 tokens." in failed


def test_a_click_anywhere_in_a_row_opens_it(world: PageWorld) -> None:
    two_requests(world)
    page = world.opened("requests")
    page.click("table.past tbody tr:first-child td.model")
    page.wait_for_selector(".detail .waterfall")


def test_the_filter_finds_by_client_machine_and_result(world: PageWorld) -> None:
    two_requests(world)
    page = world.opened("requests")
    page.wait_for_selector("table.past")
    for words, found in (
        ("claude", 1),
        ("studio together", 1),
        ("failed", 1),
        ("studio failed", 0),
        ("mini", 2),
    ):
        page.fill("#filter", words)
        page.wait_for_selector(f"text={found} of 2 requests")
        assert page.locator("table.past tbody tr").count() == found
    page.fill("#filter", "studio failed")
    page.wait_for_selector("text=No request has all of these words.")


def letters(page: Any, *keys: str) -> None:
    """Keys that mean something only if they come soon after each other, however slow the machine is."""
    page.evaluate(
        """keys => keys.forEach((key) =>
          document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true })))""",
        list(keys),
    )


def test_the_keyboard_alone_finds_opens_and_leaves_a_request(world: PageWorld) -> None:
    two_requests(world)
    page = world.opened()
    letters(page, "g", "r")
    page.wait_for_selector("table.past")
    page.keyboard.press("/")
    page.keyboard.type("claude")
    page.wait_for_selector("text=1 of 2 requests")
    # What is typed in a field is text.
    assert page.input_value("#filter") == "claude"
    page.fill("#filter", "")
    page.keyboard.press("Escape")
    page.wait_for_selector("table.past tbody tr:nth-child(2)")
    for key in ("j", "j", "k"):
        page.keyboard.press(key)
    focused = "document.activeElement.getAttribute('href')"
    assert page.evaluate(focused) == f"#requests/{world.traces[0].id}"
    page.keyboard.press("Enter")
    page.wait_for_selector(".detail .waterfall")
    page.keyboard.press("Escape")
    page.wait_for_selector(".detail", state="detached")
    page.wait_for_function(f"() => {focused} === '#requests/{world.traces[0].id}'")


def test_the_keyboard_map_opens_and_single_letters_can_be_turned_off(world: PageWorld) -> None:
    page = world.opened("chat")
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open] >> text=the next and the previous request")
    page.uncheck("text=Single letters do this")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    letters(page, "g", "f")
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")
    assert page.url.endswith("#chat")
    page.check("text=Single letters do this")
    page.click("dialog >> text=Close")
    page.wait_for_selector("dialog", state="detached")
    letters(page, "g", "f")
    page.wait_for_selector("main.view-fleet")


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ({"exactness": "exact", "kv_bits": 8}, " · exact · KV 8 bits"),
        ({"exactness": "equivalent", "wire_bits": 8}, " · equivalent · wire 8 bits"),
        ({"exactness": "equivalent", "answered_by": "studio", "kv_bits": 4}, " · equivalent · KV 4 bits"),
        ({"exactness": "lossy"}, " · lossy"),
    ],
)
def test_a_request_shows_every_label_of_its_answer(world: PageWorld, labels: Any, said: str) -> None:
    world.traces = [trace(1, **labels)]
    page = world.opened(f"requests/{world.traces[0].id}")
    page.wait_for_selector(".detail .waterfall")
    assert page.inner_text(".detail .id").endswith(said)


# ---- History ---------------------------------------------------------------------------------------------


def days_ago(*numbers: int) -> list[str]:
    return [time.strftime("%Y-%m-%d", time.localtime(time.time() - 86_400 * number)) for number in numbers]


@pytest.mark.parametrize(("used", "by"), [((0, 1), "Hour"), ((0, 1, 2, 5), "Day")])
def test_history_is_by_the_hour_until_there_are_three_days(
    world: PageWorld, used: tuple[int, ...], by: str
) -> None:
    world.ledger = GainLedger(UsageTotals(requests=4), days_ago(*used))
    page = world.opened("history")
    page.wait_for_selector(f"th:text-is('{by}')")


def test_the_figures_of_a_bar_are_read_by_pointer_and_by_keyboard(world: PageWorld) -> None:
    world.ledger = GainLedger(UsageTotals(requests=4), days_ago(0, 1, 2, 5))
    page = world.opened("history")
    first = "figure:has-text('First token')"
    page.wait_for_selector(f"{first} >> text=median 1.50 s, 9 of 10 within 4.25 s")
    # The highest value is written at the axis.
    assert page.inner_text(f"{first} .most") == "up to 4.25 s"
    page.focus(f"{first} .plot")
    # Three within one frame: keys may come faster than drawings.
    page.evaluate("""() => [1, 2, 3].forEach(() => document.activeElement.dispatchEvent(
        new KeyboardEvent("keydown", {key: "ArrowLeft", bubbles: true})))""")
    page.wait_for_selector(f"{first} .reading:has-text('{days_ago(3)[0][5:]}: \u2013')")
    for _ in range(26):
        page.keyboard.press("ArrowLeft")
    page.wait_for_selector(f"{first} .reading:has-text('{days_ago(29)[0][5:]}')")
    page.keyboard.press("End")
    page.wait_for_selector(f"{first} .reading:has-text('{days_ago(0)[0][5:]}')")
    page.hover(f"{first} .plot", position={"x": 1, "y": 30})
    page.wait_for_selector(f"{first} .reading:has-text('{days_ago(29)[0][5:]}')")
    saved = page.inner_text("figure:has-text('Time saved')")
    assert "by other machines" in saved
    assert "by drafts" in saved


# ---- Chat ------------------------------------------------------------------------------------------------

LINES = "A line of the answer.\n\n"


def scrolled(page: Any) -> float:
    """How far, once the page no longer moves: a turn of the wheel takes several frames."""
    found: float = page.evaluate(
        """async () => {
          for (let last = null, same = 0; same < 10; last = scrollY) {
            await new Promise(requestAnimationFrame);
            same = scrollY === last ? same + 1 : 0;
          }
          return scrollY;
        }"""
    )
    return found


def test_a_chat_follows_its_answer_unless_the_person_scrolled_up(world: PageWorld) -> None:
    more: list[asyncio.Event] = []

    def script(job: Job) -> Iterable[Step]:
        yield p.Accepted(job.request.id, 9)
        yield p.Prefill(job.request.id, 9, 9)
        for _ in range(3):
            yield p.Delta(job.request.id, LINES * 40)
            more.append(asyncio.Event())
            yield more[-1]
        yield p.Finished(job.request.id, "stop", p.Usage(9, 0, 120, 0), p.Timings(0.001, 0.5, 0.25))

    def go_on(times: int) -> None:
        until(lambda: len(more) == times)
        let_go(more[-1])

    world.runner.script = script
    page = world.opened("chat", viewport={"width": 1000, "height": 600})
    page.fill("#prompt", "Go on.")
    page.keyboard.press("Enter")
    near_end = "scrollY > 0 && scrollY + innerHeight >= document.scrollingElement.scrollHeight - 40"
    lines = "document.querySelectorAll('.assistant .rich > p').length"
    page.wait_for_function(f"() => {lines} === 40")
    page.wait_for_function(f"() => {near_end}")
    page.mouse.move(500, 200)
    page.mouse.wheel(0, -600)
    page.wait_for_selector("text=To the end")
    before = scrolled(page)
    go_on(1)
    page.wait_for_function(f"() => {lines} === 80")
    assert page.evaluate("scrollY") == before
    page.click("text=To the end")
    page.wait_for_function(f"() => {near_end}")
    go_on(2)
    page.wait_for_function(f"() => {lines} === 120")
    page.wait_for_function(f"() => {near_end}")
    go_on(3)
    page.wait_for_selector("text=The answer is complete.", state="attached")


def test_where_an_answer_comes_from_is_right_if_the_headers_could_not_tell(
    world: PageWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HEADERS_PLAN_S", 0.0)
    monkeypatch.setattr(limits, "HEADERS_GRACE_S", 0.0)
    shown: list[asyncio.Event] = []

    def script(job: Job) -> Iterable[Step]:
        shown.append(asyncio.Event())
        yield shown[0]
        yield Planned("remote", ("studio",), "equivalent", kv_bits=4, wire_bits=8)
        yield from speak(job)

    world.runner.script = script
    page = world.opened("chat")
    page.fill("#prompt", "Hello.")
    with page.expect_response("**/v1/chat/completions") as response:
        page.click("text=Send")
    assert response.value.headers["x-fleet-plan"] == "undecided; nodes="
    until(lambda: shown)
    let_go(shown[0])
    page.wait_for_selector(".assistant .told:has-text('on studio · equivalent · KV 4 bits · wire 8 bits')")


def test_an_answer_shows_the_labels_of_its_headers(world: PageWorld) -> None:
    def script(job: Job) -> Iterable[Step]:
        yield Planned("tokens", ("studio", "this"), "equivalent", wire_bits=8)
        yield from speak(job)

    world.runner.script = script
    page = world.opened("chat")
    page.fill("#prompt", "Hello.")
    page.click("text=Send")
    page.wait_for_selector(".assistant .told:has-text('read with studio · equivalent · wire 8 bits')")


def test_smart_prefill_that_was_declined_says_so_and_why(world: PageWorld) -> None:
    why = "the task is about the whole text (summarise)"

    def script(job: Job) -> Iterable[Step]:
        yield Planned("local", ("this",), "exact", smart=SmartPrefillResult(code="declined", reason=why))
        yield from speak(job)

    world.runner.script = script
    page = world.opened("chat")
    page.check("text=smart prefill")
    page.fill("#prompt", "Sum this up.")
    page.click("text=Send")
    page.wait_for_selector("text=The answer is complete.", state="attached")
    assert page.inner_text(".assistant .smart") == f"smart prefill: not used, because {why}"
    assert world.runner.jobs[0].smart is not None


MARKDOWN = """\
## Steps

1. Take `one`
2. Then **two**
   - inner *three*

```python
print("<b>hi</b>")
```

See [the page](https://example.org/a) or [this](javascript:alert(1)), 2 * 3 * 4 and snake_case_name.
"""


def test_an_answer_is_read_as_light_markdown_and_is_never_markup(world: PageWorld) -> None:
    def script(job: Job) -> Iterable[Step]:
        yield p.Accepted(job.request.id, 9)
        yield p.Prefill(job.request.id, 9, 9)
        yield p.Delta(job.request.id, MARKDOWN)
        yield p.Finished(job.request.id, "stop", p.Usage(9, 0, 5, 0), p.Timings(0.001, 0.5, 0.25))

    world.runner.script = script
    page = world.opened("chat")
    page.fill("#prompt", "How?")
    page.click("text=Send")
    page.wait_for_selector("text=The answer is complete.", state="attached")
    rich = ".assistant .rich"
    assert page.inner_text(f"{rich} ol > li:first-child code") == "one"
    assert page.inner_text(f"{rich} ol > li:nth-child(2) > strong") == "two"
    assert page.inner_text(f"{rich} ol ul em") == "three"
    assert page.inner_text(f"{rich} pre") == 'print("<b>hi</b>")'
    assert page.locator(f"{rich} b").count() == 0
    links = page.eval_on_selector_all(f"{rich} a", "all => all.map(one => one.href)")
    assert links == ["https://example.org/a"]
    said = page.inner_text(rich)
    assert "[this](javascript:alert(1)), 2 * 3 * 4 and snake_case_name." in said


@pytest.mark.parametrize("mark", [">", "> ", "- ", "1. ", "> - "])
def test_attack_marks_in_marks_without_end_leave_the_page_as_it_is(world: PageWorld, mark: str) -> None:
    """A small model that repeats itself writes such answers, too."""

    def script(job: Job) -> Iterable[Step]:
        yield p.Accepted(job.request.id, 9)
        yield p.Prefill(job.request.id, 9, 9)
        yield p.Delta(job.request.id, f"{mark * 8000}the end")
        yield p.Finished(job.request.id, "stop", p.Usage(9, 0, 5, 0), p.Timings(0.001, 0.5, 0.25))

    world.runner.script = script
    page = world.opened("chat")
    page.fill("#prompt", "How?")
    page.click("text=Send")
    page.wait_for_selector("text=The answer is complete.", state="attached")
    assert page.inner_text(".assistant .rich").rstrip().endswith("the end")


def test_a_question_is_edited_and_an_answer_is_asked_for_again(world: PageWorld) -> None:
    page = world.opened("chat")
    page.click("text=System prompt")
    page.fill("#system", "Be brief.")
    page.check("text=only on this machine")
    page.fill("#prompt", "One?")
    page.keyboard.press("Enter")
    page.click("text=Retry")
    page.wait_for_selector("text=Retry")
    until(lambda: len(world.runner.jobs) == 2)
    first, second = (job.request.prompt for job in world.runner.jobs)
    assert isinstance(first, p.ChatPrompt)
    assert isinstance(second, p.ChatPrompt)
    assert first.messages == second.messages
    assert [one["role"] for one in first.messages] == ["system", "user"]
    assert all(job.local_only and job.client == "page" for job in world.runner.jobs)
    page.wait_for_selector("text=The answer is complete.", state="attached")
    page.click(".user >> text=Edit")
    page.wait_for_function("() => document.getElementById('prompt').value === 'One?'")
    assert page.locator("article").count() == 0


def test_a_long_paste_is_folded_and_a_file_becomes_text(world: PageWorld) -> None:
    page = world.opened("chat")
    page.set_input_files(
        "input[type=file]", [{"name": "a.txt", "mimeType": "text/plain", "buffer": b"w\n" * 300}]
    )
    page.wait_for_function("() => document.getElementById('prompt').value.startsWith('a.txt:')")
    page.set_input_files(
        "input[type=file]", [{"name": "b.png", "mimeType": "image/png", "buffer": b"\x89PNG\xff"}]
    )
    page.wait_for_selector("text=b.png: it is no text, and no PNG, JPEG, WebP or GIF.")
    page.click("text=Send")
    page.wait_for_selector("text=Retry")
    shown = page.inner_text(".user .text")
    assert len(shown.splitlines()) < 20
    page.click("text=Show all")
    page.wait_for_selector("text=Show less")
    assert len(page.inner_text(".user .text").splitlines()) > 290


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "The model's working state stays encrypted on this disk (cache.disk)."),
        ("[cache]\ndisk = false\n", "nothing of it is written to this disk (cache.disk is off)"),
    ],
)
def test_an_empty_chat_says_what_is_stored(world: PageWorld, tmp_path: Path, text: str, said: str) -> None:
    with_settings(world, tmp_path, text)
    page = world.opened("chat")
    page.wait_for_selector("text=No text and no image is stored.")
    page.wait_for_selector(".nothing code")
    assert said in page.inner_text(".nothing")


# ---- Setup -----------------------------------------------------------------------------------------------


def with_settings(world: PageWorld, folder: Path, text: str) -> Path:
    path = folder / "fleetd.toml"
    path.write_text(text)
    world.settings = SettingsFile(path, config.load(path, environ={}))
    return path


def test_pairing_lists_the_machines_nearby(world: PageWorld) -> None:
    near = [Neighbour("x", "x", "attic", ["10.0.0.9"], True), Neighbour("y", "y", "garage", ["10.0.0.8"])]
    world.fleet.fleet = FleetView(True, "me", "me", "mini", neighbours=near)
    page = world.opened("pairing")
    page.wait_for_selector("li:has-text('attic') >> text=shows a code now")
    page.wait_for_selector("li:has-text('garage') >> text=fleetctl pair")


def test_a_setting_is_edited_and_stands_in_the_file(world: PageWorld, tmp_path: Path) -> None:
    path = with_settings(world, tmp_path, "# mine\n[engine]\nidle_unload_s = 600  # ten minutes\n")
    page = world.opened("settings")
    row = "dl.settings > div:has-text('An unused model is unloaded')"
    page.wait_for_selector(f"{row} >> text=after 10 min idle")
    assert str(path) in page.inner_text("main")
    page.click(f"{row} >> text=Edit")
    page.fill(f"{row} input", "-5")
    page.click(f"{row} >> text=Save")
    page.wait_for_selector(f"{row} [role=alert]")
    assert "600" in path.read_text()
    page.fill(f"{row} input", "45")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"{row} >> text=after 45 min idle after a restart")
    assert path.read_text() == "# mine\n[engine]\nidle_unload_s = 2700  # ten minutes\n"
    page.wait_for_selector("text=1 change will count from the daemon's next start")
    other = "dl.settings > div:has-text('Prompts typed here')"
    page.click(f"{other} >> text=Edit")
    page.select_option(f"{other} select", label="never leave this machine")
    page.click(f"{other} >> text=Save")
    page.wait_for_selector("text=2 changes will count")
    assert "local_only = true" in path.read_text()
    assert page.locator("summary:has-text('more at their defaults')").count() == 1


# ---- The whole -------------------------------------------------------------------------------------------


def test_the_navigation_of_a_phone_is_one_row(world: PageWorld) -> None:
    page = world.opened(viewport={"width": 375, "height": 700})
    tops = page.eval_on_selector_all(".top nav a", "all => all.map(one => one.getBoundingClientRect().top)")
    assert len(set(tops)) == 1
    goto(page, "settings")
    page.wait_for_selector("nav.sub >> text=Settings")


def test_the_state_is_easier_to_see_than_logging_out(world: PageWorld) -> None:
    page: Any = world.opened()
    size = "one => parseFloat(getComputedStyle(one).fontSize) * parseInt(getComputedStyle(one).fontWeight)"
    assert page.eval_on_selector(".link", size) > page.eval_on_selector("text=Log out", size)
