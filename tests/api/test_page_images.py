"""Images in the page's chat, in a real browser: attached, pasted, dropped, shown, sent, and refused."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from typing import Any

import browser as browsers
import pytest
from api_fakes import MODEL, Step, speak
from fakes import FakeFolder
from page_fakes import PageWorld
from PIL import Image

from fleetd import limits
from fleetd.control.fleet_view import FleetView, PeerModel, PeerView
from fleetd.control.model_facts import ModelShape
from fleetd.engine.protocol import IMAGES, ChatPrompt
from fleetd.errors import InvalidValue
from fleetd.requests.job import Job

pytestmark = [browsers.NEEDED, pytest.mark.one_loop]

SEER = "seer-4b"
RED, GREEN, BLUE, CLEAR = (200, 0, 0), (0, 200, 0), (0, 0, 200), (0, 0, 200, 0)
CHOICE = ".controls select"

# An event by which people give files to a page; `more` zero bytes follow each. Returns whether the page took
# them.
GIVE = """([kind, files, more, texts]) => {
  const given = new DataTransfer();
  for (const [name, data] of files) {
    const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
    given.items.add(new File([bytes, new Uint8Array(more)], name));
  }
  for (const type of texts) given.items.add("a cell", type);
  const how = {bubbles: true, cancelable: true};
  return !document.querySelector("main").dispatchEvent(kind === "paste"
    ? new ClipboardEvent(kind, {clipboardData: given, ...how})
    : new DragEvent(kind, {dataTransfer: given, ...how}));
}"""
# The middle of each image that a list shows, as [red, green, blue].
COLOURS = """all => all.map((one) => {
  const {data} = one.getContext("2d").getImageData(one.width >> 1, one.height >> 1, 1, 1);
  return [...data.slice(0, 3)];
})"""
# From now on a file is read once the test calls letGo().
HOLD = """() => {
  const held = (act) => new Promise((go) => { window.letGo = () => { window.letGo = null; go(act()); }; });
  const decode = window.createImageBitmap;
  window.createImageBitmap = (file) => held(() => decode(file));
  File.prototype.arrayBuffer = function () { return held(() => Blob.prototype.arrayBuffer.call(this)); };
}"""
# The names of images that a list shows.
NAMES = "all => all.map((one) => one.getAttribute('aria-label'))"


def picture(colour: tuple[int, ...], form: str = "PNG", size: tuple[int, int] = (8, 6)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB" if len(colour) == 3 else "RGBA", size, colour).save(file, form)
    return file.getvalue()


def file(name: str, data: bytes) -> Any:
    # A browser tells a type by the name: it may be wrong.
    return {"name": name, "mimeType": "application/octet-stream", "buffer": data}


def give(page: Any, kind: str, name: str, data: bytes, more: int = 0, texts: Iterable[str] = ()) -> bool:
    files = [(name, base64.b64encode(data).decode())]
    return bool(page.evaluate(GIVE, [kind, files, more, list(texts)]))


def send(page: Any, text: str, n: int) -> Any:
    """Send a message, the ``n``th of its chat that is answered; returns the messages of the request."""
    page.fill("#prompt", text)
    with page.expect_request("**/v1/chat/completions") as request:
        page.click("text=Send")
    page.wait_for_selector(f":nth-match(.assistant, {n}) >> text=Where the time went")
    return request.value.post_data_json["messages"]


def test_images_are_attached_shown_and_sent_with_every_turn_to_a_model_that_reads_them(
    world: PageWorld,
) -> None:
    world.models.names = [MODEL, SEER]
    world.models.found = [FakeFolder(MODEL), FakeFolder(SEER, images=True)]
    page = world.opened()
    page.route("**/fleet/v1/models", lambda route: route.abort())
    page.evaluate("location.hash = 'chat'")
    page.wait_for_selector("text=Which models read images is not known.")
    page.unroute("**/fleet/v1/models")
    page.click("text=Try again")
    page.wait_for_selector(f"{CHOICE} option:text-is('{SEER} (reads images)')", state="attached")
    # The default model reads text: nothing is offered, and what is given all the same is refused.
    assert page.locator("text=Image …").count() == 0
    assert give(page, "drop", "red.png", picture(RED))
    page.wait_for_selector(f".trouble >> text=red.png: it is an image, and {MODEL} reads text only.")

    page.select_option(CHOICE, SEER)
    page.wait_for_selector(".nothing >> text=PNG, JPEG, WebP or GIF, at most 20 MiB each; a chat takes 64")
    # How a file begins counts, not its name; what a model sees as white is shown as white.
    chosen = [file("red.jpg", picture(RED, "WEBP")), file("clear.png", picture(CLEAR))]
    page.set_input_files("input[accept*=webp]", chosen)
    page.wait_for_selector("[aria-label='Images to send'] li:nth-child(2)")
    assert give(page, "paste", "green.jpeg", picture(GREEN, "JPEG"))
    page.wait_for_selector("[aria-label='Images to send'] li:nth-child(3)")
    assert give(page, "dragover", "blue.gif", b"")
    page.wait_for_selector(".ask.dropping")
    assert give(page, "drop", "blue.gif", picture(BLUE, "GIF"))
    page.wait_for_selector(".ask:not(.dropping) li:nth-child(4)")
    # Cells of a table come as a picture, too: their text is what is pasted.
    assert not give(page, "paste", "cells.png", picture(RED), texts=("text/plain", "text/html"))
    page.focus("[aria-label='Remove clear.png']")
    page.keyboard.press("Enter")
    page.wait_for_selector("[aria-label='Remove clear.png']", state="detached")

    types = ("webp", "jpeg", "gif")
    files = [picture(RED, "WEBP"), picture(GREEN, "JPEG"), picture(BLUE, "GIF")]
    sent = send(page, "Which colours?", 1)
    parts = [
        {
            "type": "image_url",
            "image_url": {"url": f"data:image/{kind};base64,{base64.b64encode(data).decode()}"},
        }
        for kind, data in zip(types, files, strict=True)
    ]
    first = {"role": "user", "content": [*parts, {"type": "text", "text": "Which colours?"}]}
    assert sent == [first]
    assert page.eval_on_selector_all(".user canvas", NAMES) == ["red.jpg", "green.jpeg", "blue.gif"]
    shown = page.eval_on_selector_all(".user canvas", COLOURS)
    assert [[value > 100 for value in colour] for colour in shown] == [
        [True, False, False],
        [False, True, False],
        [False, False, True],
    ]
    # An image is a message without a text, too, and the first ones stay in the conversation.
    page.set_input_files("input[accept*=webp]", [file("clear.png", picture(CLEAR))])
    page.wait_for_selector(".ask canvas")
    sent = send(page, "", 2)
    assert sent[0] == first
    assert [part["type"] for part in sent[2]["content"]] == ["image_url"]
    assert page.eval_on_selector_all(".user canvas", COLOURS)[-1] == [255, 255, 255]
    prompt = world.runner.jobs[-1].request.prompt
    assert isinstance(prompt, ChatPrompt)
    assert [each for _, each in prompt.messages[0][IMAGES]] == files
    # Nothing of it is kept by the browser.
    assert page.evaluate("Object.keys(localStorage)") == ["fleetd-page-key"]

    # A model for text is told before anything is sent; the images go if the person says so.
    page.select_option(CHOICE, "")
    page.wait_for_selector(f".ask > .trouble >> text={MODEL} reads text only, and this chat has 4 images.")
    page.fill("#prompt", "And now?")
    page.keyboard.press("Enter")
    assert page.is_disabled("button:text-is('Send')")
    assert page.input_value("#prompt") == "And now?"
    page.select_option(CHOICE, SEER)
    page.wait_for_selector(".ask > .trouble", state="detached")
    page.select_option(CHOICE, "")
    page.click("text=leave them out")
    page.wait_for_selector("canvas", state="detached")
    assert [one["content"] for one in send(page, "And now?", 3)[::2]] == ["Which colours?", "", "And now?"]
    assert len(world.runner.jobs) == 3


def test_an_image_that_is_not_taken_says_why_on_the_page_or_by_the_daemon(world: PageWorld) -> None:
    def refuse(job: Job) -> Iterable[Step]:
        raise InvalidValue("messages[0]: this is no image that can be read.", hint="Send a whole file.")

    # The model that reads images is on another machine.
    seer = PeerModel(SEER, "loaded", ["chat"], shape=ModelShape(images=True))
    peer = PeerView("node00", "n00", "studio", "usable", models=[seer])
    world.fleet.fleet = FleetView(True, "me", "me", "mini", peers=[peer])
    world.runner.script = refuse
    page = world.opened("chat")
    page.wait_for_selector(f"{CHOICE} option:text-is('{SEER} (reads images)')", state="attached")
    page.select_option(CHOICE, SEER)
    png = picture(RED)
    # At a limit, and one past it.
    give(page, "drop", "large.png", png, more=limits.IMAGE_BYTES - len(png) + 1)
    page.wait_for_selector(".trouble >> text=large.png: it is larger than 20 MiB.")
    give(page, "drop", "largest.png", png, more=limits.IMAGE_BYTES - len(png))
    page.wait_for_selector("[aria-label='Remove largest.png']")
    odd = [file("a.heic", b"\0\0\0\x18ftypheic\xff"), file("cut.png", png[:40])]
    page.set_input_files("input[accept*=webp]", odd)
    page.wait_for_selector(".trouble >> text=a.heic: it is no text, and no PNG, JPEG, WebP or GIF.")
    page.wait_for_selector(".trouble >> text=cut.png: it is damaged, or too large for this browser.")
    give(page, "drop", "second.png", png, more=limits.IMAGE_BYTES - len(png))
    page.wait_for_selector("[aria-label='Remove second.png']")
    assert 45 * limits.MIB * 4 / 3 < limits.HTTP_BODY_BYTES - 2 * limits.MIB  # with a file of text
    give(page, "drop", "third.png", png, more=5 * limits.MIB - len(png) + 1)
    page.wait_for_selector(".trouble >> text=third.png: the images of the chat would be larger than 45 MiB.")
    page.set_input_files("input[accept*=webp]", [file(f"{n}.png", png) for n in range(limits.IMAGES - 1)])
    page.wait_for_selector(f".trouble >> text={limits.IMAGES - 2}.png: the chat has {limits.IMAGES} images")
    assert page.locator(".ask canvas").count() == limits.IMAGES

    for name in ("largest.png", "second.png"):
        page.click(f"[aria-label='Remove {name}']")
    page.fill("#prompt", "What is this?")
    page.click("text=Send")
    page.wait_for_selector(".assistant .trouble:has-text('no image that can be read. Send a whole file.')")
    # The question comes back with its images.
    page.click(".user >> text=Edit")
    page.wait_for_selector(f".ask li:nth-child({limits.IMAGES - 2}) canvas")
    assert page.locator("article").count() == 0
    world.runner.script = speak
    page.click("text=Send")
    page.wait_for_selector(".assistant >> text=Where the time went")


def test_a_message_waits_for_its_files_and_keeps_what_is_done_meanwhile(world: PageWorld) -> None:
    world.models.found = [FakeFolder(MODEL, images=True)]
    page = world.opened("chat")
    page.set_input_files("input[accept*=webp]", [file("first.png", picture(RED))])
    page.wait_for_selector("[aria-label='Remove first.png']")
    page.evaluate(HOLD)
    give(page, "drop", "second.png", picture(GREEN))
    page.wait_for_function("() => Boolean(window.letGo)")
    page.wait_for_selector("button:disabled:text-is('Reading …')")
    page.fill("#prompt", "One")
    page.keyboard.press("Enter")
    page.click("[aria-label='Remove first.png']")
    page.evaluate("letGo()")
    page.wait_for_selector("[aria-label='Remove second.png']")
    assert page.eval_on_selector_all(".ask canvas", NAMES) == ["second.png"]
    give(page, "drop", "a.txt", b"abc")
    page.wait_for_function("() => Boolean(window.letGo)")
    page.wait_for_selector("button:disabled:text-is('Reading …')")
    page.fill("#prompt", "One and two")
    page.evaluate("letGo()")
    page.wait_for_selector("button:text-is('Send')")
    assert page.input_value("#prompt") == "One and two\n\na.txt:\n\nabc\n\n"
    assert world.runner.jobs == []
