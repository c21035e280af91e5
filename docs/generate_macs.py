"""Write the table of docs/macs.md by the planner's prices: `python docs/generate_macs.py`."""

from __future__ import annotations

from pathlib import Path

from bench import pairs

PAGE = Path(__file__).with_name("macs.md")
_BEGIN = "<!-- The table is written by docs/generate_macs.py; a test fails when it is out of date. -->"
_END = "<!-- End of the table. -->"


def page() -> str:
    """The page with a new table."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    return f"{before}{_BEGIN}\n\n{pairs.macs()}\n\n{_END}{rest.partition(_END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
