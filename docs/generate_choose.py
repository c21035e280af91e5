"""Write docs/choose.md from fleetd/models/catalog.toml: `python docs/generate_choose.py`.

Which models fit follows from the rule that the engine has (docs/operations.md, "Memory for models") and from
what Metal lets a GPU hold by default. What they are good for are the catalog's own words.
"""

from __future__ import annotations

from pathlib import Path

from fleetd.config import KEYS
from fleetd.limits import GIB
from fleetd.models.catalog import CatalogEntry, entries
from fleetd.models.choosing import recommended

PAGE = Path(__file__).with_name("choose.md")
# Memory of machines as they are sold, in GiB, which is what their makers call GB.
SIZES = (8, 16, 24, 32, 64, 128)
MEMORY_FRACTION = float(str(KEYS["engine.memory_fraction"].default))
# What Metal recommends that a GPU holds: two thirds of a small Mac's memory, three quarters of a larger's.
SMALL_GIB, SMALL_SHARE, LARGE_SHARE = 32, 2 / 3, 3 / 4
# What a person may leave to the system who raises that limit, in GiB.
LEFT_GIB = 4
SHOWN = 6
# The most memory of a model that is a companion of others, in GiB.
COMPANION_GIB = 4

_BEGIN = (
    "<!-- The sections are written by docs/generate_choose.py; a test fails when they are out of date. -->"
)
_END = "<!-- End of the sections. -->"
_HEADER = "| model | memory | context | tools | thinks | what it is for |\n|---|---|---|---|---|---|"


def room_gib(memory_gib: float, *, raised: bool = False) -> float:
    """GiB that models may hold on a Mac with that memory, by default or with a raised limit of the GPU."""
    share = SMALL_SHARE if memory_gib <= SMALL_GIB else LARGE_SHARE
    held = memory_gib - LEFT_GIB if raised else memory_gib * share
    return MEMORY_FRACTION * held


def page() -> str:
    """The page with new sections."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    sections = "\n\n".join(map(_section, SIZES))
    return f"{before}{_BEGIN}\n\n{sections}\n\n{_END}{rest.partition(_END)[2]}"


def _fitting(gib: float) -> list[CatalogEntry]:
    """Models that chat and fit, largest first."""
    found = [entry for entry in entries() if "chat" in entry.roles and entry.memory_gib <= gib]
    return sorted(found, key=lambda entry: (-entry.memory_gib, entry.name))


def _section(memory_gib: int) -> str:
    room = room_gib(memory_gib)
    fitting = _fitting(room)
    names = {entry.name for entry in fitting}
    more = [entry for entry in _fitting(room_gib(memory_gib, raised=True)) if entry.name not in names]
    sentences = [f"Room for models: {_gb(room)}."]
    if more:
        sentences.append(f"With [a raised limit](#when-it-just-does-not-fit) also: {_list(more[:4])}.")
    sentences.append(_recommended(room))
    coding = [entry for entry in fitting if "coding" in entry.roles][:3]
    if coding:
        sentences.append(f"For coding agents: {_list(coding)}.")
    small = {entry.name for entry in fitting if entry.memory_gib <= COMPANION_GIB}
    drafts = sorted(small & {entry.draft for entry in fitting[:SHOWN]})
    if drafts:
        sentences.append(
            "Small companions for drafts and smart prefill: "
            + ", ".join(f"`{name}`" for name in drafts)
            + "."
        )
    rows = [_row(entry) for entry in fitting[:SHOWN]]
    return "\n\n".join([f"## {memory_gib} GB", " ".join(sentences), "\n".join([_HEADER, *rows])])


def _recommended(room: float) -> str:
    """What `fleetctl models` recommends on a machine with room for so many GiB."""
    needs = {entry.name: entry.memory_bytes for entry in entries()}
    found = recommended(entries(), needs, int(room * GIB))
    named = [f"`{name}` for {' and '.join(work)}" for name, work in found.items()]
    return f"`fleetctl models` recommends {', '.join(named).replace('for draft', 'for drafts')}."


def _list(found: list[CatalogEntry]) -> str:
    return ", ".join(f"`{entry.name}`" for entry in found)


def _row(entry: CatalogEntry) -> str:
    cells = [
        f"`{entry.name}`",
        _gb(entry.memory_gib),
        f"{entry.context_tokens:,}",
        "yes" if entry.tools else "by grammar",
        "yes" if entry.thinking else "no",
        entry.note,
    ]
    return f"| {' | '.join(cells)} |"


def _gb(gib: float) -> str:
    gb = gib * GIB / 1e9
    return f"{gb:.1f} GB" if gb < 10 else f"{gb:.0f} GB"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
