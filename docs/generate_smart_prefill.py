"""Write the table of docs/smart-prefill.md by the planner's prices: `docs/generate_smart_prefill.py`."""

from __future__ import annotations

from pathlib import Path

from bench import pairs

PAGE = Path(__file__).with_name("smart-prefill.md")
_BEGIN = "<!-- docs/generate_smart_prefill.py writes the table; a test fails when it is out of date. -->"

_END = "<!-- End of the table. -->"


def page() -> str:
    """The page with a new table. Raises ValueError if the page does not have each marker once."""
    text = PAGE.read_text(encoding="utf-8")
    if text.count(_BEGIN) != 1 or text.count(_END) != 1:
        raise ValueError(f"{PAGE.name} must have each of these lines once: {_BEGIN} {_END}")
    before, _, rest = text.partition(_BEGIN)
    return f"{before}{_BEGIN}\n\n{pairs.smart()}\n\n{_END}{rest.partition(_END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
