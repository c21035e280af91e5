"""The choice among a repository's GGUF files. Pure.

Publishers offer the same model in a dozen quantisations, some spread over several files, beside files that
are no model: the part that reads images, statistics for a quantiser, drafts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from fleetd.errors import ModelUnsupported
from fleetd.models.gguf.families import FAMILIES

#: Kinds in the order of choice: the one that most people take, then by loss and size.
_PREFERRED = (
    *("Q4_K_M", "Q4_K_XL", "Q4_K_L", "Q4_K_S", "MXFP4", "MXFP4_MOE", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS"),
    *(
        "Q5_K_M",
        "Q5_K_XL",
        "Q5_K_L",
        "Q5_K_S",
        "Q5_1",
        "Q5_0",
        "Q6_K",
        "Q6_K_L",
        "Q6_K_XL",
        "Q8_0",
        "Q8_K_XL",
    ),
    *("Q3_K_XL", "Q3_K_L", "Q3_K_M", "Q3_K_S", "IQ3_M", "IQ3_S", "Q2_K_XL", "Q2_K_L", "Q2_K"),
    *("BF16", "F16", "FP16", "F32"),
)
_KIND = re.compile(r"(?:^|[-._])(?:UD-)?((?:I?Q[1-9]|MXFP4|BF16|FP?16|F32)[A-Z0-9_]*)(?=[-.])", re.IGNORECASE)
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf\Z", re.IGNORECASE)
_NO_MODEL = re.compile(r"mmproj|imatrix|(?:^|[-._])(?:mtp|draft|lora|vocab)(?=[-._])", re.IGNORECASE)


def choose(hub_id: str, names: Iterable[str]) -> list[str]:
    """The files of one model: one file, or in order the parts that it is spread over.

    Raises:
        ModelUnsupported: no file is of a kind that can be imported.
    """
    models = sorted(name for name in names if name.lower().endswith(".gguf") and not _NO_MODEL.search(name))
    heads = [name for name in models if (part := _PART.search(name)) is None or part[1] == "00001"]
    ranked = sorted((_rank(name), len(name), name) for name in heads)
    known = [name for rank, _, name in ranked if rank < len(_PREFERRED)]
    chosen = known or (heads if len(heads) == 1 else [])
    if not chosen:
        offered = ", ".join(sorted({_kind(name) or name for name in heads})[:12]) or "none"
        raise ModelUnsupported(
            f"{hub_id} has GGUF files, but none of a kind that can be imported ({offered}).",
            hint="Take an MLX copy of the model from mlx-community, or a repository with a Q4_K_M file.",
        )
    return _parts(chosen[0], models)


def refuse_architecture(hub_id: str, architecture: object) -> None:
    """Raises ModelUnsupported for an architecture that cannot be imported, before any download."""
    if isinstance(architecture, str) and architecture not in FAMILIES:
        raise ModelUnsupported(
            f"{hub_id} is of the architecture {architecture!r}; GGUF import knows "
            f"{', '.join(sorted(FAMILIES))}.",
            hint=f"Take an MLX copy: fleetctl models pull mlx-community/{_mlx_name(hub_id)}-4bit "
            "(or as it is called there).",
        )


def _mlx_name(hub_id: str) -> str:
    return re.sub(r"-GGUF$", "", hub_id.rpartition("/")[2], flags=re.IGNORECASE)


def _kind(name: str) -> str | None:
    found = _KIND.findall(name)
    return found[-1].upper() if found else None


def _rank(name: str) -> int:
    kind = _kind(name)
    return _PREFERRED.index(kind) if kind in _PREFERRED else len(_PREFERRED)


def _parts(head: str, models: Sequence[str]) -> list[str]:
    part = _PART.search(head)
    if part is None:
        return [head]
    stem = head[: part.start()]
    return [name for name in models if name.startswith(stem) and _PART.fullmatch(name, len(stem))]
