"""Write docs/models.md from fleetd/engine/layers/architectures.py: `python docs/generate_models.py`."""

from __future__ import annotations

import re
from functools import cache
from itertools import groupby
from pathlib import Path

import mlx_lm
from mlx_lm.utils import MODEL_ARCHITECTURE_REMAPPING, MODEL_REMAPPING

from fleetd.engine.layers.architectures import ANY_TEXT, CUT, REFUSED, Architecture

PAGE = Path(__file__).with_name("models.md")

_INTRO = """\
Any model that mlx-lm runs can answer on one machine, but for `deepseek_v41`, whose cache does not tell how
much memory a token takes. Models of which mlx-lm can make no batch, such as `gemma2` and `llama4`, answer one
request at a time. Every model with a chat template can be offered tools; one whose template knows none gets
them [by grammar](http.md#tools-by-grammar), and lists of models say `grammar` for the format of its calls.

For several machines to compute one prompt, a model must be cut without changing what it says. What can be cut
goes by the code that mlx-lm runs, and that goes by `model_type` in the model's `config.json`: a row has all
the types that one code runs."""

_CUT = """\
A small random model of each of these, cut into one, two and three stages at every place, gives the bytes of
the whole model: hidden states, what its layers keep, and logits. `tests/engine/test_stage.py` shows it on a
CPU, in f32, and in bf16 for all but mixtures of experts, whose matrices MLX multiplies there in f32 only.
`tests/engine/test_sharing.py` shows the same of whole shared prefills. A part of the types is tried in every
run of the tests, all of them in `make test-long`.

- **layers**: machines compute some layers each. **tokens**: machines compute some tokens each.
- **prefix**: what a kept prompt shares with the next one is not read again, in memory and from the disk.
  *snapshots*: from the last checkpoint before they differ, because a running state cannot be cut at a token;
  [Kept prompts](cache.md) says where these are. *in windows*: at any token as long as it fits the sliding
  windows, later from snapshots too.
- **speculation**: drafts can be taken back, *in windows* as long as the text fits these. *again*: a wrong
  draft undoes its whole pass, because a running state has no earlier tokens, and the next pass computes again
  what was right in it. *no*: blocks of tokens give other bits than single ones, so no drafts are tried. On a
  GPU the probe of each load decides, whatever stands here. *rounded*: the tokens stay the same, and once the
  windows are full the last bit of their log-probabilities may differ.
- **sparse**: smart prefill may leave tokens out of the prompt; *text*: it shortens the text instead.
- **any chunks**: on a CPU in f32, *yes* means that a prompt gives the same bytes wherever it is cut into
  chunks; *no* means that the last bits may differ, with and without stages, so that only the same chunks are
  relied on."""

_TEXT = "Models of these types read pictures around a text model of any type above, which is what is cut: {}."

# Families by what public pages count of their downloads. No page ranks families of MLX models, so these come
# from several; a family is named by the types that its published configs have, as the catalog's.
POPULAR = [
    ("Qwen 3.5, 3.6, 3.8, mixtures of experts", ("qwen3_5_moe",)),
    ("Qwen 3.5, 3.6, 3.8, dense", ("qwen3_5",)),
    ("Gemma 4", ("gemma4",)),
    ("gpt-oss", ("gpt_oss",)),
    ("Qwen 3 and Qwen 3 Coder", ("qwen3", "qwen3_moe")),
    ("Qwen 3 Next and Qwen 3 Coder Next", ("qwen3_next",)),
    ("MiniMax M2", ("minimax_m2",)),
    ("GLM 4.5 to 5.1", ("glm4_moe", "glm4_moe_lite", "glm_moe_dsa")),
    ("Mistral Small, Ministral and Devstral", ("mistral3",)),
    ("LFM 2 and 2.5", ("lfm2", "lfm2_moe")),
]

_POPULAR_TEXT = """\
No public page ranks the families of MLX models. These are the ten that public pages of 2026 count or list
most, among them [Hugging Face's downloads as solmaz.io ranks them](https://solmaz.io/x/2068380321629032850/),
all builds of a model together and by its age (Qwen 3.6 and Gemma 4 lead its language models), download
counts of MLX builds on Hugging Face (Gemma 4 E4B 1.2 million, Qwen 3.6 27B 646,000, gpt-oss 20B 345,000) and
the collections of mlx-community. The order is not a ranking."""

_REFUSED = """\
These are refused by name, and run whole on one machine:"""

_OTHERS = """\
Other types are refused too until a small model of theirs passes the test: they need a line in
`fleetd/engine/layers/architectures.py` and a config in `tests/support/tiny_architectures.py`."""

_HEADS = """\
[MTP heads](speculation.md#mtp-heads) need a model that mlx-lm runs and whose layers are called with a hidden
state, a mask and a cache. Inkling (`inkling_mm_model`) comes with such heads and answers on no machine,
because mlx-lm has no code for it."""

_WITHIN = {"no": "yes", "where set": "yes; in windows if layers have such", "yes": "in windows"}
_ANY = {"any": "yes", "unless windows": "yes; no if layers have sliding windows", "same": "no"}


_BORROWS = re.compile(r"^from \.(\w+) import Model\b(?! as)", re.MULTILINE)


@cache
def _borrowers() -> dict[str, str]:
    """Modules of mlx-lm that have no model of their own, with the module whose model they run."""
    files = (Path(mlx_lm.__file__).parent / "models").glob("*.py")
    found = ((file.stem, _BORROWS.search(file.read_text(encoding="utf-8"))) for file in files)
    return {name: match[1] for name, match in found if match is not None}


def _names(code: str) -> str:
    """What a config may call the models that mlx-lm runs with this code."""
    by_name = {**MODEL_REMAPPING, **_borrowers()}
    others = sorted(name for name, other in by_name.items() if other == code)
    classes = [
        f"`{name}` of class `{kind}`"
        for (name, kind), other in MODEL_ARCHITECTURE_REMAPPING.items()
        if other == code
    ]
    return ", ".join([*(f"`{name}`" for name in [code, *others]), *classes])


def _row(code: str, kind: Architecture) -> str:
    within = _WITHIN[kind.windows]
    cells = [
        _names(code),
        "yes",
        "yes",
        "snapshots" if kind.keeps_state else within,
        _drafts(kind, within),
        "text" if kind.whole else "yes",
        _ANY[kind.chunks],
    ]
    return f"| {' | '.join(cells)} |"


def _drafts(kind: Architecture, within: str) -> str:
    if kind.other_blocks:
        return "no"
    if not kind.keeps_state:
        return within
    return "again, rounded" if kind.rounds else "again"


def can_be_cut(name: str) -> bool:
    """True if a model whose config has this type can be shared by layers."""
    code = MODEL_REMAPPING.get(name, name)
    code = _borrowers().get(code, code)
    return code in CUT or code in ANY_TEXT


def page() -> str:
    """The whole page."""
    cut = "\n".join(_row(code, kind) for code, kind in sorted(CUT.items()))
    popular = "\n".join(
        f"| {family} | {', '.join(f'`{name}`' for name in names)} | "
        f"{'yes' if all(map(can_be_cut, names)) else 'no'} |"
        for family, names in POPULAR
    )
    by_reason = groupby(sorted(REFUSED, key=lambda name: (REFUSED[name], name)), key=REFUSED.__getitem__)
    refused = "\n".join(
        f"| {', '.join(f'`{name}`' for name in names)} | {reason} |" for reason, names in by_reason
    )
    parts = [
        "<!-- Written by docs/generate_models.py; a test fails when it is out of date. -->",
        "# Models that machines can share",
        _INTRO,
        "## Can be cut",
        _CUT,
        f"| `model_type` | layers | tokens | prefix | speculation | sparse | any chunks |\n"
        f"|---|---|---|---|---|---|---|\n{cut}",
        _TEXT.format(", ".join(f"`{name}`" for name in sorted(ANY_TEXT))),
        "## What people run",
        _POPULAR_TEXT,
        f"| family | `model_type` | layers |\n|---|---|---|\n{popular}",
        "## Cannot be cut",
        _REFUSED,
        f"| `model_type` | because |\n|---|---|\n{refused}",
        _OTHERS,
        "## Heads that draft for their model",
        _HEADS,
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
