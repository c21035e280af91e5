"""Write the tables of the planner's prices into the pages that show them: `python docs/generate_pairs.py`."""

from __future__ import annotations

from pathlib import Path

from bench import pairs

TABLES = {
    "macs": pairs.macs,
    "links": pairs.links,
    "large-models": pairs.groups,
    "smart-prefill": pairs.smart,
}
_BEGIN = "<!-- docs/generate_pairs.py writes the table; a test fails when it is out of date. -->"
_END = "<!-- End of the table. -->"


def path_of(name: str) -> Path:
    return Path(__file__).with_name(f"{name}.md")


def page(name: str) -> str:
    """The page with a new table. Raises ValueError if the page does not have each marker once."""
    text = path_of(name).read_text(encoding="utf-8")
    if text.count(_BEGIN) != 1 or text.count(_END) != 1:
        raise ValueError(f"{name}.md must have each of these lines once: {_BEGIN} {_END}")
    before, _, rest = text.partition(_BEGIN)
    return f"{before}{_BEGIN}\n\n{TABLES[name]()}\n\n{_END}{rest.partition(_END)[2]}"


if __name__ == "__main__":
    for each in TABLES:
        path_of(each).write_text(page(each), encoding="utf-8")
