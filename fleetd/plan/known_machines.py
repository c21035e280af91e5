"""Machines that are sold: chips and memories by their makers' pages. ``chip_speeds`` has their speeds."""

from __future__ import annotations

import difflib
import re

import msgspec

from fleetd.limits import GIB

# Product and chip → the GB of memory that it is sold with.
_MACS: dict[tuple[str, str], tuple[int, ...]] = {
    ("MacBook Air", "M1"): (8, 16),
    ("MacBook Air", "M2"): (8, 16, 24),
    ("MacBook Air", "M3"): (8, 16, 24),
    ("MacBook Air", "M4"): (16, 24, 32),
    ("MacBook Air", "M5"): (16, 24, 32),
    ("MacBook Pro", "M1 Pro"): (16, 32),
    ("MacBook Pro", "M1 Max"): (32, 64),
    ("MacBook Pro", "M2 Pro"): (16, 32),
    ("MacBook Pro", "M2 Max"): (32, 64, 96),
    ("MacBook Pro", "M3"): (8, 16, 24),
    ("MacBook Pro", "M3 Pro"): (18, 36),
    ("MacBook Pro", "M3 Max"): (36, 48, 64, 96, 128),
    ("MacBook Pro", "M4"): (16, 24, 32),
    ("MacBook Pro", "M4 Pro"): (24, 48),
    ("MacBook Pro", "M4 Max"): (36, 48, 64, 128),
    ("MacBook Pro", "M5"): (16, 24, 32),
    ("MacBook Pro", "M5 Pro"): (24, 48, 64),
    ("MacBook Pro", "M5 Max"): (36, 48, 64, 128),
    ("Mac mini", "M1"): (8, 16),
    ("Mac mini", "M2"): (8, 16, 24),
    ("Mac mini", "M2 Pro"): (16, 32),
    ("Mac mini", "M4"): (16, 24, 32),
    ("Mac mini", "M4 Pro"): (24, 48, 64),
    ("iMac", "M1"): (8, 16),
    ("iMac", "M3"): (8, 16, 24),
    ("iMac", "M4"): (16, 24, 32),
    ("Mac Studio", "M1 Max"): (32, 64),
    ("Mac Studio", "M1 Ultra"): (64, 128),
    ("Mac Studio", "M2 Max"): (32, 64, 96),
    ("Mac Studio", "M2 Ultra"): (64, 128, 192),
    ("Mac Studio", "M4 Max"): (36, 48, 64, 128),
    ("Mac Studio", "M3 Ultra"): (96, 256, 512),
    ("Mac Pro", "M2 Ultra"): (64, 128, 192),
}
_SPARK = "DGX Spark"
_WORD = re.compile(r"[a-z]+|\d+")


class KnownMachine(msgspec.Struct, frozen=True):
    """A machine as it is sold."""

    # Product, chip and memory: "Mac mini M4, 16 GB".
    name: str
    # As the operating system or the driver calls it: "Apple M4".
    chip: str
    # metal or cuda.
    accelerator: str
    memory_bytes: int


MACHINES: tuple[KnownMachine, ...] = (
    *(
        KnownMachine(f"{product} {chip}, {size} GB", f"Apple {chip}", "metal", size * GIB)
        for (product, chip), sizes in _MACS.items()
        for size in sizes
    ),
    KnownMachine(f"{_SPARK}, 128 GB", "NVIDIA GB10", "cuda", 128 * GIB),
)
_BY_WORDS = {tuple(_WORD.findall(machine.name.lower())): machine for machine in MACHINES}


def find(name: str) -> KnownMachine | None:
    """The machine of this name; case, commas and spaces do not matter."""
    return _BY_WORDS.get(tuple(_WORD.findall(name.lower())))


def nearest(name: str) -> list[str]:
    """The names that look most like this one, best first."""
    names = {machine.name.lower(): machine.name for machine in MACHINES}
    return [names[each] for each in difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)]
