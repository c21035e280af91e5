"""The page about fleetctl says what fleetctl says."""

from __future__ import annotations

import runpy

from fake_daemon import REPO


def test_the_page_is_up_to_date() -> None:
    page = runpy.run_path(str(REPO / "docs" / "generate_cli.py"))["page"]()
    written = (REPO / "docs" / "fleetctl.md").read_text(encoding="utf-8")
    assert written == page, "run: python docs/generate_cli.py"
