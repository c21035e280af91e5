"""Write the table of other servers' fields in docs/http.md: `python docs/generate_http.py`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from fleetd.api.generation import other_fields

PAGE = Path(__file__).with_name("http.md")

_TABLE = re.compile(r"(?<=out of date\. -->\n).*?(?=<!-- End of the table)", re.DOTALL)
_NAMES = re.compile(r"(?<=with the one that is meant: ).*")


def _names(fields: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in fields) or "none"


def page() -> str:
    """The whole page, with the table as the code has it now."""
    rows = "\n".join(
        f"| {group.what} | {_names(group.refused)} | {_names(group.harmless)} |"
        for group in other_fields.GROUPS
    )
    table = f"\n| fields that say | refused | ignored |\n|---|---|---|\n{rows}\n\n"
    meant = ", ".join(f"`{name}` (`{real}`)" for name, real in other_fields.ELSEWHERE.items())
    text = _TABLE.sub(lambda _: table, PAGE.read_text(encoding="utf-8"), count=1)
    return _NAMES.sub(lambda _: f"{meant}.", text, count=1)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
