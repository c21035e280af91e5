"""The page about fleetctl says what fleetctl says."""

from __future__ import annotations

import re
import runpy

from fake_daemon import REPO

PAGE = REPO / "docs" / "fleetctl.md"


def test_the_page_is_up_to_date() -> None:
    page = runpy.run_path(str(REPO / "docs" / "generate_cli.py"))["page"]()
    assert PAGE.read_text(encoding="utf-8") == page, "run: python docs/generate_cli.py"


def test_what_an_option_takes_is_called_by_a_name_for_people() -> None:
    assert re.findall(r"--\S+ (?:INTEGER|FLOAT)\b", PAGE.read_text(encoding="utf-8")) == []
