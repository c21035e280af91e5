"""A real browser for tests of the page. Where there is none they are skipped, and the summary says so."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_DRIVER = importlib.util.find_spec("playwright")
NEEDED = pytest.mark.skipif(
    CHROMIUM is None or _DRIVER is None,
    reason="NO BROWSER: the page is not tested (apt install chromium; playwright is among the tools)",
)
WAIT_MS = 60_000
#: Two names of other sites, and one that a rebinding attack has pointed at this machine.
OTHER_SITE, REBOUND = "other.example", "rebound.example"
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--host-resolver-rules="
    f"MAP {OTHER_SITE} 127.0.0.1, MAP {REBOUND} 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


@contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium that finds no host but this machine, and the two names above."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=[*_FLAGS])
        try:
            yield made
        finally:
            made.close()


class Visit:
    """One person's browser: cookies and storage of its own, and what its pages complained about."""

    def __init__(self, made: Any, **options: Any) -> None:
        self.context = made.new_context(**options)
        self.context.set_default_timeout(WAIT_MS)
        self.complaints: list[str] = []

    def open(self, url: str) -> Any:
        """A new tab at an address."""
        page = self.context.new_page()
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._heard)
        page.goto(url)
        return page

    def _heard(self, message: Any) -> None:
        # What the network refuses is told there as well, and is looked at by the tests themselves.
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            self.complaints.append(message.text)

    def close(self) -> None:
        self.context.close()
