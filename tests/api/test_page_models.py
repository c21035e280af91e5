"""Models and clients on the page, in a real browser: what fits where, the hub, cards, one more machine."""

from __future__ import annotations

import asyncio
from typing import Any

import browser as browsers
import pytest
from api_fakes import MODEL, speak, status
from live_daemon import until
from msgspec.structs import replace
from page_fakes import PageWorld, goto

from fleetd.control.daemon_status import EngineStatus, MemoryBudget
from fleetd.control.fleet_view import FleetView, PeerView
from fleetd.control.model_change import ModelProgress
from fleetd.control.model_listing import InstalledModel, ModelFit, ModelListing, OfferedModel
from fleetd.control.prefill_plan import AddedPoint, AddedQuestion, AddedView
from fleetd.errors import DownloadFailed, Forbidden
from fleetd.models.hub_search import HubModel, HubPage
from fleetd.models.parts import HeldPart

pytestmark = [browsers.NEEDED, pytest.mark.one_loop]

GIB = 1 << 30
STUDIO = PeerView("s", "s", "studio", "usable", accelerator="metal", memory_bytes=64 * GIB)


def rows(page: Any, group: str) -> list[str]:
    """The names of the models in a group."""
    return page.locator(f"section[aria-label='{group}'] h3").all_inner_texts()  # type: ignore[no-any-return]


# ---- Models ----------------------------------------------------------------------------------------------


def test_models_stand_under_where_they_fit_and_the_rest_is_folded(world: PageWorld) -> None:
    world.fleet.fleet = FleetView(True, "me", "me", "mini", peers=[STUDIO])
    page = world.opened("models")
    page.wait_for_selector("section[aria-label='Fits here']")
    # Four of sixteen GiB are free.
    here, freed = rows(page, "Fits here"), rows(page, "Fits when memory is freed")
    assert "llama-3.2-3b" in here
    assert "qwen3-8b" in freed
    assert "qwen3-32b" in rows(page, "Fits on studio")
    assert page.locator("summary", has_text="more are too large for every machine").count() == 1
    assert not page.is_visible("h3:text-is('kimi-k2.6')")
    page.click("summary:has-text('too large')")
    page.wait_for_selector("h3:text-is('kimi-k2.6')")
    titles = page.locator("section[aria-label] > h2").all_inner_texts()
    assert [title.rsplit(" ", 1)[0] for title in titles] == [
        "Fits here",
        "Fits when memory is freed",
        "Fits on studio",
    ]
    row = page.locator("section[aria-label='Fits on studio'] li", has_text="qwen3-32b").inner_text()
    for part in ("dense; careful answers", "18 GB to download", "24 GB of memory", "6.4 GB short"):
        assert part in row, part


def test_the_recommended_models_stand_on_top_with_one_button_each(world: PageWorld) -> None:
    page = world.opened("models")
    page.wait_for_selector(".chosen li")
    shown = page.inner_text(".chosen")
    assert "chat and coding" in shown
    assert "gpt-oss-20b" in shown
    page.locator(".chosen").get_by_role("button", name="Download", exact=True).click()
    until(lambda: world.models.pulls == 1)


def test_what_cannot_be_loaded_is_downloaded_at_the_second_click_only(world: PageWorld) -> None:
    page = world.opened("models")
    page.fill("#search", "llama-3.3-70b")
    page.wait_for_selector(".modelrows li:has-text('llama-3.3-70b')")
    row = page.locator(".modelrows li", has_text="llama-3.3-70b")
    row.get_by_text("Download …").click()
    assert world.models.pulls == 0
    row.get_by_text("Leave it").click()
    row.get_by_text("Download …").click()
    row.get_by_text("Download all the same").click()
    until(lambda: world.models.pulls == 1)


def test_words_find_models_of_the_catalog_at_once_and_of_the_hub_when_asked(world: PageWorld) -> None:
    world.found = HubPage(
        [
            HubModel("org/Qwen-Coder-4bit", "mlx", "qwen3", 3 * GIB, 4, 1234),
            HubModel("org/Huge", "safetensors", "llama", 400 * GIB, 0, 9, gated=True),
        ],
        others=5,
    )
    page = world.opened("models")
    page.fill("#search", "coding agents")
    page.wait_for_selector("h3:text-is('glm-4.7-flash')", state="attached")
    assert page.locator("h3:text-is('llama-3.2-3b')").count() == 0
    assert world.asked == [], "nothing is sent while one types"
    page.fill("#search", "qwen coder")
    page.click("text=Search the Hugging Face hub")
    page.wait_for_selector("h3:text-is('org/Qwen-Coder-4bit')")
    assert world.asked == ["qwen coder"]
    hub = page.inner_text("section[aria-labelledby='hub']")
    for part in (
        "3.2 GB to download",
        "mlx · qwen3 · 1,234 downloads a month",
        "5 more are of types or files",
    ):
        assert part in hub, part
    large = page.locator(".modelrows li", has_text="org/Huge").inner_text()
    assert "Accept its terms" in large
    assert "short" in large
    small = page.locator(".modelrows li", has_text="org/Qwen-Coder-4bit")
    small.get_by_role("button", name="Download", exact=True).click()
    until(lambda: world.models.pulls == 1)
    page.wait_for_selector(".modelrows li:has-text('org/Qwen-Coder-4bit') >> text=on this machine")


def test_a_hub_that_cannot_be_asked_says_why(world: PageWorld) -> None:
    world.found = DownloadFailed("The hub could not be reached.", hint="Check the network.")
    page = world.opened("models")
    page.fill("#search", "qwen")
    page.keyboard.press("Enter")
    page.wait_for_selector(".trouble:has-text('The hub could not be reached. Check the network.')")


# ---- In part ---------------------------------------------------------------------------------------------

OWN_PART = HeldPart("big/own", 14, 30, 3 * GIB, 7 * GIB, own=True, from_hub=True)
OTHERS_PART = HeldPart("theirs", 16, 30, 2 * GIB, 4 * GIB, own=False, from_hub=False)


def in_part(world: PageWorld, *loaded: str) -> Any:
    """The models view of a machine that has some layers of two models."""
    world.models.parts = [OWN_PART, OTHERS_PART]
    engines = [EngineStatus(model=f"{name}~0123abcd[0:16]", part_of=f"{name}~0123abcd") for name in loaded]
    world.status = lambda: replace(status(fleet=world.fleet.fleet), engines=engines)
    page = world.opened("models")
    page.wait_for_selector("h2:text-is('In part on this machine')")
    return page.locator("section[aria-labelledby='in-part']")


def test_models_of_which_a_machine_has_some_layers_stand_apart(world: PageWorld) -> None:
    section = in_part(world, "theirs")
    own, others = (section.locator("li", has_text=name) for name in ("own", "theirs"))
    text = own.inner_text()
    for said in ("14 of 30 layers", "3.2 GB of 7.5 GB on disk", "from the hub", "in part", "with others"):
        assert said in text, said
    assert "loaded" not in text
    assert own.get_by_role("button").all_inner_texts() == ["Load", "Remove …"]
    text = others.inner_text()
    for said in ("16 of 30 layers", "from the machine that answers", "loaded", "another machine answers"):
        assert said in text, said
    # Its layers are in use, and nothing is asked of it here.
    assert others.get_by_role("button").all_inner_texts() == ["Remove …"]
    assert others.get_by_role("button").is_disabled()


def test_layers_are_removed_at_the_second_click_only(world: PageWorld) -> None:
    row = in_part(world).locator("li", has_text="theirs")
    row.get_by_text("Remove …").click()
    assert world.models.removed == []
    row.get_by_text("Keep it").click()
    row.get_by_text("Remove …").click()
    row.get_by_text("Remove 2.1 GB for good").click()
    until(lambda: world.models.removed == ["theirs"])


# ---- Models of other machines ----------------------------------------------------------------------------

THEIRS = ModelListing(
    installed=[InstalledModel("their-model", weights_bytes=GIB, context_tokens=4096, loaded=True)],
    catalog=[
        OfferedModel("small-one", roles=["chat"], download_bytes=GIB, memory_bytes=GIB),
        OfferedModel("huge-one", roles=["chat"], fit=ModelFit("none", [], 5 * GIB)),
    ],
    memory=MemoryBudget(64 * GIB, 32 * GIB, usable_bytes=30 * GIB, largest_bytes=50 * GIB),
)


def looking_at_studio(world: PageWorld) -> Any:
    world.fleet.fleet = FleetView(True, "me", "me", "mini", peers=[STUDIO])
    world.fleet.listing = THEIRS
    page = world.opened("models")
    page.select_option("#models-of", label="studio")
    page.wait_for_selector("h2:text-is('On studio')")
    return page


def test_the_models_of_another_machine_are_looked_at_as_those_of_this_one(world: PageWorld) -> None:
    page = looking_at_studio(world)
    assert page.locator(".modelrows h3").all_inner_texts()[:2] == ["their-model", "small-one"]
    assert rows(page, "Fits on studio") == ["small-one"]
    assert "studio is 5.4 GB short" in page.locator("li", has_text="huge-one").text_content()
    assert "of studio's memory" in page.inner_text("main")
    assert "Compare before you buy" not in page.inner_text("main")
    page.select_option("#models-of", "")
    page.wait_for_selector("h2:text-is('On this machine')")
    page.wait_for_selector("section[aria-label='Fits here']")


@pytest.mark.parametrize(("button", "verb"), [("Unload", "unload"), ("Pin", "pin"), ("Remove …", "remove")])
def test_buttons_of_another_machines_models_act_there(world: PageWorld, button: str, verb: str) -> None:
    page = looking_at_studio(world)
    row = page.locator(".modelrows li", has_text="their-model")
    row.get_by_role("button", name=button, exact=True).click()
    if verb == "remove":
        assert world.fleet.managed == []
        row.get_by_text("for good").click()
    until(lambda: world.fleet.managed == [("s", verb, "their-model")])
    assert (world.pool.loaded, world.models.removed) == ([], [])


def test_a_download_on_another_machine_shows_how_far_it_is_and_can_be_stopped(world: PageWorld) -> None:
    page = looking_at_studio(world)
    world.fleet.manage_steps = [ModelProgress("w.safetensors", GIB, 2 * GIB, "copying"), asyncio.Event()]
    row = page.locator(".modelrows li", has_text="small-one")
    row.get_by_role("button", name="Download", exact=True).click()
    row.get_by_text("copying w.safetensors").wait_for()
    assert "1.1 GB of 2.1 GB" in row.inner_text()
    # It is the other machine's: this one's list says nothing of it.
    page.select_option("#models-of", "")
    page.wait_for_selector("h2:text-is('On this machine')")
    assert "copying" not in page.inner_text("main")
    page.select_option("#models-of", label="studio")
    page.locator(".modelrows li", has_text="small-one").get_by_role("button", name="Stop").click()
    until(world.fleet.closed.is_set)
    assert world.fleet.managed == [("s", "pull", "small-one")]


def test_a_machine_that_refuses_to_be_managed_says_so_and_this_one_is_a_choice_away(world: PageWorld) -> None:
    world.fleet.fleet = FleetView(True, "me", "me", "mini", peers=[STUDIO])
    world.fleet.listing = Forbidden("studio: fleet.manage is off there.", hint="Type it there.")
    page = world.opened("models")
    page.select_option("#models-of", label="studio")
    page.wait_for_selector(".trouble:has-text('fleet.manage is off there. Type it there.')")
    world.fleet.listing = THEIRS
    page.click("text=Try again")
    page.wait_for_selector("h2:text-is('On studio')")


# ---- One more machine ------------------------------------------------------------------------------------

MINI = "Mac mini M4, 16 GB"
POINTS = [
    AddedPoint(1024, 1.0, 1.0, 1.0, "local", ["this"]),
    AddedPoint(4096, 4.0, 4.0, 2.0, "layers", [MINI, "this"]),
    AddedPoint(16384, 40.0, 40.0, 10.0, "remote", [MINI]),
]


def test_a_slider_over_the_prompt_shows_what_one_more_machine_would_give(world: PageWorld) -> None:
    world.added = AddedView(layers_held=30, layers=30, points=POINTS)
    page = world.opened("models")
    assert world.asked == [], "nothing is planned before somebody wants it"
    page.click("text=Compare before you buy")
    page.wait_for_selector(".compared")
    assert world.asked == [AddedQuestion(MODEL, MINI, "wired")]
    slider = page.locator("#whatif-tokens")
    slider.focus()
    assert "16,384" in page.inner_text(".slider")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector(".slider:has-text('4,096')")
    told = page.inner_text(".whatif")
    for part in (
        "4.00 s",
        "2.00 s",
        "2.0 times as soon: the machines read it together",
        "Modelled, not measured",
    ):
        assert part in told, part
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector(".whatif:has-text('It would not begin sooner.')")
    assert slider.get_attribute("aria-valuetext") == "1,024 tokens"
    page.select_option("#whatif-machine", "Mac Studio M4 Max, 64 GB")
    page.select_option("#whatif-link", "thunderbolt")
    until(lambda: len(world.asked) == 3)
    assert world.asked[-1] == AddedQuestion(MODEL, "Mac Studio M4 Max, 64 GB", "thunderbolt")


def test_a_machine_without_room_for_the_model_is_told_so(world: PageWorld) -> None:
    world.added = AddedView(layers_held=0, layers=30, points=POINTS, doubt="other programs ran")
    page = world.opened("models")
    page.click("text=Compare before you buy")
    page.wait_for_selector(".whatif:has-text('It has no room for this model.')")
    assert "in doubt: other programs ran" in page.inner_text(".whatif")


# ---- Clients ---------------------------------------------------------------------------------------------


def card(page: Any, name: str) -> str:
    return page.inner_text(f".cards section[aria-label='{name}']")  # type: ignore[no-any-return]


def test_every_card_has_the_chosen_models_own_context(world: PageWorld) -> None:
    page = world.opened("clients")
    page.wait_for_selector(".cards section")
    short = f"{MODEL} has 8,192 tokens of context"
    for name in ("Claude Code", "Codex", "opencode"):
        assert f"This model cannot: {short}, and {name} needs 32,768." in card(page, name)
    for name in ("Zed", "VS Code (Continue)", "Cursor"):
        assert f"{short}: enough for short questions" in card(page, name)
    assert "8,192" not in card(page, "Open WebUI")
    # The recommended model can, and is not here yet.
    page.click(".cards section[aria-label='Codex'] button:text-is('gpt-oss-20b')")
    page.wait_for_selector("#client-model >> text=gpt-oss-20b (not here yet)", state="attached")
    assert page.input_value("#client-model") == "gpt-oss-20b"
    codex = card(page, "Codex")
    assert "cannot" not in codex
    assert "fleetctl launch -m gpt-oss-20b codex" in codex
    page.click(".cards section[aria-label='Codex'] summary")
    assert "model_context_window = 131072" in card(page, "Codex")
    assert '"max_tokens": 131072' in card(page, "Zed")
    assert '"max_output_tokens": 32000' in card(page, "Zed")
    assert "contextLength: 131072" in card(page, "VS Code (Continue)")
    assert "Context   131072" in card(page, "Any other app")
    assert page.is_disabled("button:text-is('Test this')")


def test_each_card_is_complete_by_itself_and_has_no_backticks(world: PageWorld) -> None:
    page = world.opened("clients")
    page.wait_for_selector(".cards section")
    shown = page.inner_text("main")
    assert "`" not in shown
    assert "first card" not in shown
    for name in ("Python", "curl", "Open WebUI"):
        assert 'eval "$(fleetctl env)"' in card(page, name)
    assert page.locator(".cards section").count() == 13


def test_test_this_asks_the_model_and_shows_the_answer(world: PageWorld) -> None:
    world.runner.script = speak
    page = world.opened("clients")
    page.click("text=Test this")
    page.wait_for_selector(".answer:has-text('It answers after')")
    assert world.runner.jobs[-1].model == MODEL
    world.runner.script = lambda job: [DownloadFailed("It broke.", hint="Try again.")]
    goto(page, "models")
    goto(page, "clients")
    page.click("text=Test this")
    page.wait_for_selector(".trouble:has-text('It broke. Try again.')")
