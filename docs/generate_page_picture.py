"""Write docs/pictures/page.png, the page of a fleet that really runs: `python docs/generate_page_picture.py`.

It starts the throw-away fleet of `make demo`, asks it, has two machines read a long prompt together, and
takes a picture of that request (two to four minutes). `--screens DIR` takes every view as well, at three
widths in both themes, for people who change the page and want to look at it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "demo"))

import run  # noqa: E402
import together  # noqa: E402
from daemons import ANSWER_S, MODEL, Machine, daemon, fleetctl, temporary_home  # noqa: E402

PICTURE = Path(__file__).parent / "pictures" / "page.png"
LARGEST_BYTES = 200_000
WIDTH, HEIGHT = 1440, 1000
WIDTHS = (1440, 768, 320)
VIEWS = ("fleet", "requests", "history", "models", "chat", "pairing", "clients", "settings")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-sync",
)


@contextmanager
def fleet() -> Iterator[tuple[Machine, str]]:
    """A fleet that has answered some requests: the machine to look from, and the request that was shared."""
    with temporary_home() as folder, ExitStack() as stack:
        machines = [Machine(name, folder / name, run.environment(name, folder)) for name in run.NAMES]
        for machine in machines:
            stack.enter_context(daemon(machine))
        first, second, third = machines
        run.pair(first, second)
        run.pair(first, third)
        run.wait_usable(machines)
        fleetctl(first, "models", "pull", MODEL, limit_s=run.PULL_S)
        fleetctl(first, "models", "load", MODEL, limit_s=ANSWER_S)
        run.copy(second, first)
        together.wait_loaded(first, second)
        together.apart([first, second])
        for question, about_text in run.QUESTIONS:
            run.ask(second, question, about_text=about_text)
        shared = together.asked(second, together.compose())
        run.ask(second, "Name three colours.", about_text=False)
        yield second, shared.request


def opened(browser: Browser, machine: Machine, *, width: int, dark: bool = False) -> Page:
    """The page, logged in."""
    page = browser.new_page(
        viewport={"width": width, "height": HEIGHT}, color_scheme="dark" if dark else "light"
    )
    page.goto(fleetctl(machine, "open", "--no-browser", limit_s=30)["url"])
    page.wait_for_selector(".link.live")
    return page


def show(page: Page, view: str) -> None:
    page.evaluate("view => { location.hash = view; }", view)
    page.wait_for_timeout(1500)


def screens(browser: Browser, machine: Machine, request: str, folder: Path) -> None:
    """One file for each view, width and theme."""
    folder.mkdir(parents=True, exist_ok=True)
    for width in WIDTHS:
        for dark in (False, True):
            page = opened(browser, machine, width=width, dark=dark)
            for view in (*VIEWS, f"requests/{request}"):
                show(page, view)
                name = "request" if "/" in view else view
                file = folder / f"{name}-{width}-{'dark' if dark else 'light'}.png"
                page.screenshot(path=file, full_page=True)
            page.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Take a picture of the page of a fleet that really runs.")
    parser.add_argument("--screens", type=Path, metavar="DIR", help="take every view as well")
    options = parser.parse_args(arguments)
    with fleet() as (machine, request), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=[*FLAGS])
        traces = fleetctl(machine, "trace", "--last", "20", limit_s=30)["traces"]
        shared = next(trace["id"] for trace in traces if trace["id"].startswith(request))
        if options.screens:
            screens(browser, machine, shared, options.screens)
        page = opened(browser, machine, width=WIDTH)
        show(page, f"requests/{shared}")
        page.screenshot(path=PICTURE)
        browser.close()
    if PICTURE.stat().st_size > LARGEST_BYTES:
        raise SystemExit(f"the picture has {PICTURE.stat().st_size} bytes, more than {LARGEST_BYTES}")


if __name__ == "__main__":
    main()
