"""Write docs/catalog.md from fleetd/models/catalog.toml: `python docs/generate_catalog.py`."""

from __future__ import annotations

from pathlib import Path

from fleetd.limits import GIB
from fleetd.models.abilities import of_entry
from fleetd.models.catalog import TIER_MEMORY_BYTES, CatalogEntry, Tier, entries

PAGE = Path(__file__).with_name("catalog.md")

_INTRO = """\
`fleetctl models pull NAME` gets a model by the name in this table. Any other MLX model works by its hub id
(ORGANISATION/NAME), and so does a folder or a GGUF file: [Models](install.md#models).

*Memory* is the weights and room for a few thousand tokens, in GB of 10^9 bytes; on a CPU they take
[a fourth more](operations.md#memory-for-models). [Which model for which memory](choose.md) says what fits.
*Download* is what a pull fetches. *For* is the work that a model is good for; *coding* stands at models whose
makers publish figures of coding agents.
*Tools* is how the model writes tool calls, by the name of the format's parser; *grammar*: it
[is told how](http.md#tools-by-grammar). *Thinks*: it can reason before it answers.
*Draft* is the smallest model with the same vocabulary, whose drafts the model can verify,
and a repository with an MTP head, if one is known, with the digest of its file, if that could be looked up
([speculation.md](speculation.md#mtp-heads));
a compressor may be of any family.

*Type* is `model_type` in the config; [Models that machines can share](models.md) says what each can do.

*Checked* is what was found elsewhere in November 2026, in public programs that use these very repositories:
that the *repository* is used, the *size* of its files, its *context*. The sources are
[exo's model cards](https://github.com/exo-explore/exo/tree/main/resources/inference_model_cards), which give
bytes and contexts, and lists of other programs, which give the size of the files. What stands beside that
comes from model cards and was not checked again: contexts where only the size was, the formats of tool calls,
and revisions. *Run*: it was run with fleetd, which only `smollm2-135m` and
`all-minilm-l6-v2` were so far.

DeepSeek V4 is not here: mlx-lm has no code for its type, `deepseek_v4`."""

_TITLES: dict[Tier, str] = {
    "tiny": "tiny: up to {} GB",
    "small": "small: up to {} GB",
    "standard": "standard: up to {} GB",
    "large": "large: above",
}


_HEADER = """\
| name | memory | download | context | for | tools | thinks | draft | type | repository | checked | |
|---|---|---|---|---|---|---|---|---|---|---|---|"""


def page() -> str:
    """The whole page."""
    parts = [
        "<!-- Written by docs/generate_catalog.py; a test fails when it is out of date. -->",
        "# Catalog",
        _INTRO,
    ]
    for tier, title in _TITLES.items():
        gib = TIER_MEMORY_BYTES.get(tier, 0) // GIB
        rows = [_row(entry) for entry in entries() if entry.tier == tier]
        parts += [f"## {title.format(gib)}", "\n".join([_HEADER, *rows])]
    return "\n\n".join(parts) + "\n"


def _row(entry: CatalogEntry) -> str:
    memory_gb = entry.memory_bytes / 1e9
    memory = f"{memory_gb:.2g} GB" if memory_gb < 10 else f"{memory_gb:.0f} GB"
    tools = f"`{entry.tools}`" if entry.tools else of_entry(entry).shown_tools or "none"
    drafts = ([f"`{entry.draft}`"] if entry.draft else []) + ([_head(entry)] if entry.head else [])
    repository = f"`{entry.hub_id}`" if entry.hub_id else "in a Python package"
    cells = [
        f"`{entry.name}`",
        memory,
        f"{entry.download_gb:g} GB",
        f"{entry.context_tokens:,}",
        ", ".join(entry.roles),
        tools,
        "yes" if entry.thinking else "no",
        ", ".join(drafts) or "none",
        f"`{entry.model_type}`",
        repository,
        entry.checked or "not checked",
    ]
    return f"| {' | '.join(cells)} | {entry.note} |"


def _head(entry: CatalogEntry) -> str:
    digest = f"SHA-256 `{entry.head_sha256[:12]}…`" if entry.head_sha256 else "digest not known"
    return f"head `{entry.head}` ({digest})"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
