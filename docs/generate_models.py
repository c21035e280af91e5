"""Write docs/models.md from fleetd/engine/architectures.py: `python docs/generate_models.py`."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from fleetd.engine.architectures import CUT, REFUSED

PAGE = Path(__file__).with_name("models.md")

_INTRO = """\
Any model that mlx-lm runs can answer on one machine. For several machines to compute one prompt, each some of
the layers, a model must be cut between layers without changing what it says. What can be cut goes by
`model_type` in the model's `config.json`."""

_CUT = """\
A small random model of each of these, cut into one, two and three stages at every place, gives the bytes of
the whole model: hidden states, keys and values, and logits. `tests/engine/test_stage.py` shows it on a CPU,
in f32, and in bf16 for all but mixtures of experts, whose matrices MLX multiplies there in f32 only. Sliding
windows are tried beyond the window, and several of the types also with 4 and 8 bits per weight.

The stages' chunks are then the whole model's. The second column says whether even that matters: on a CPU
in f32, *yes* means that a prompt gives the same bytes wherever it is cut into chunks; *no* means that the
last bits differ, with and without stages, so that only the same chunks give the same bytes."""

_REFUSED = """\
These are refused by name, and run whole on one machine:"""

_OTHERS = """\
Other types are refused too until a small model of theirs passes the test: they need a line in
`fleetd/engine/architectures.py` and a config in `tests/support/tiny_architectures.py`."""

_ANY = {"any": "yes", "unless windows": "yes; no where layers have sliding windows", "same": "no"}


def page() -> str:
    """The whole page."""
    cut = "\n".join(f"| `{name}` | {_ANY[kind.chunks]} |" for name, kind in sorted(CUT.items()))
    by_reason = groupby(sorted(REFUSED, key=lambda name: (REFUSED[name], name)), key=REFUSED.__getitem__)
    refused = "\n".join(
        f"| {', '.join(f'`{name}`' for name in names)} | {reason} |" for reason, names in by_reason
    )
    parts = [
        "<!-- Written by docs/generate_models.py; a test fails when it is out of date. -->",
        "# Models that machines can share by layers",
        _INTRO,
        "## Can be cut",
        _CUT,
        f"| `model_type` | same bytes in any chunks |\n|---|---|\n{cut}",
        "## Cannot be cut",
        _REFUSED,
        f"| `model_type` | because |\n|---|---|\n{refused}",
        _OTHERS,
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
