"""Write docs/gguf.md: `python docs/generate_gguf.py`, with `--measure` to measure the errors again.

The measured figures lie in docs/gguf.json; what is imported and refused comes from fleetd/models/gguf.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fleetd.limits import GGUF_GROWTH
from fleetd.models.gguf.byte_level import CUTS
from fleetd.models.gguf.families import FAMILIES
from fleetd.models.gguf.header import OTHER_KINDS
from fleetd.models.gguf.packing import is_exact

PAGE = Path(__file__).with_name("gguf.md")
FIGURES = Path(__file__).with_name("gguf.json")

_INTRO = """\
`fleetctl models pull FILE.gguf` imports a GGUF file: it becomes a folder as MLX has it, in the models
folder, and is then a model like any other. `fleetctl models pull ORGANISATION/NAME` does the same with a
repository of the hub that has GGUF files and no safetensors; it takes the Q4_K_M file if there is one, else
the nearest. Of a model that is spread over several files (`NAME-00001-of-00003.gguf`), name the first. The
file itself is not changed."""

_FAMILIES = """\
A small random model of each, written as llama.cpp's converter writes it and imported back, gives the same
logits (`tests/models/test_gguf_families.py`), and llama.cpp reads the same file to the same probabilities
(`tests/models/test_gguf_beside_llama_cpp.py`). Other architectures are refused by name."""

_KINDS = f"""\
MLX knows groups of 32, 64 and 128 weights with one scale and one bias of 16 bits. Kinds that are affine in
groups of 32 keep their integers; their grid is rounded to 16 bits once. The other kinds have groups of 16
or a codebook; they are fitted to the next width. A model grows to at most {GGUF_GROWTH:g} times its file."""

_ERRORS = """\
*Own error* is what the kind's own rounding changes about the logits of a small random model (root mean
square; the logits' deviation is {deviation:.2f}). *Added* is what the import changes beside that, in parts
of it: 0.5 means half as much again, which adds 12 % to the error in all. All matrices are of the one kind;
a file of several kinds, as Q4_K_M, has each kind's error for its part. Measured with weights that
`tests/support/gguf_kinds.py` writes and gguf's own `dequantize` reads."""

_SIX = """\
Q6_K gets 8 bits if it is a part of a file, as in Q4_K_M and Q5_K_M, and 6 bits if a file holds little
else and would grow by more than a quarter."""

_REFUSED = """\
Other kinds are refused by name: {kinds}. Most have fewer bits than the smallest width in which MLX could
hold them without much loss, so the file would grow by far more than a quarter. Take Q2_K, Q3_K_M or IQ4_XS
of the same model, or a smaller model in Q4_K_M."""

_TOKENIZERS = """\
SentencePiece vocabularies (`llama`), and byte-level BPE (`gpt2`) with these names for how text is cut into
words: {cuts}. The chat template is the file's own."""

# Of a wrapped list.
_WIDTH = 108


def page() -> str:
    """The whole page."""
    figures: dict[str, Any] = json.loads(FIGURES.read_text(encoding="utf-8"))
    families = "\n".join(f"| `{arch}` | `{family.model_type}` |" for arch, family in sorted(FAMILIES.items()))
    kinds = "\n".join(_row(row) for row in figures["kinds"])
    # Numbers of other types, and kinds that only exist while llama.cpp computes, are in no model.
    published = sorted(name for name in OTHER_KINDS.values() if name.startswith(("IQ", "TQ", "NV", "Q1")))
    return f"""# GGUF files

<!-- Written by docs/generate_gguf.py; do not edit. -->

{_INTRO}

## Families

{_FAMILIES}

| `general.architecture` | in MLX |
|---|---|
{families}

## Kinds of quantisation

{_KINDS}

| kind | bits per weight | in MLX: bits, group | size, times | own error | added |
|---|---|---|---|---|---|
{kinds}

{_ERRORS.format(deviation=figures["deviation"])}

{_SIX}

{_wrapped(_REFUSED.format(kinds=", ".join(published)))}

## Tokenizers

{_wrapped(_TOKENIZERS.format(cuts=", ".join(f"`{name}`" for name in sorted(CUTS))))}
"""


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _row(row: dict[str, Any]) -> str:
    bits, group, mode = row["stored"]
    stored = f"{bits}, {group}" if mode == "affine" else f"{mode}, {group}"
    added = row["added"] / row["own"]
    exact = " (integers kept)" if is_exact(row["kind"]) else ""
    name = row["kind"] if row["beside"] is None else f"{row['kind']} beside {row['beside']}"
    return (
        f"| {name} | {row['bits']:.4g} | {stored}{exact} | {row['growth']:.2f} | {row['own']:.4f} | "
        f"{'< 0.01' if added < 0.01 else f'{added:.2f}'} |"
    )


def measure() -> None:
    """Write docs/gguf.json again."""
    root = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(root / "tests"), str(root / "tests" / "support")]
    from support import gguf_errors, gguf_models

    deviation = gguf_models.logits(
        gguf_models.model_of(gguf_models.CONFIGS[gguf_errors.ARCH], gguf_models.drawn(gguf_errors.ARCH))
    ).std()
    rows = []
    for kind, beside in [*((kind, None) for kind in gguf_errors.KINDS), ("Q6_K", "Q4_K")]:
        with tempfile.TemporaryDirectory() as folder:
            found = asdict(gguf_errors.measure(kind, Path(folder), beside=beside))
        rows.append({**found, "beside": beside})
    rows.sort(key=lambda row: (-row["bits"], row["kind"], row["beside"] or ""))
    FIGURES.write_text(json.dumps({"deviation": float(deviation), "kinds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write docs/gguf.md.")
    parser.add_argument("--measure", action="store_true", help="measure the errors again")
    if parser.parse_args().measure:
        measure()
    PAGE.write_text(page(), encoding="utf-8")
