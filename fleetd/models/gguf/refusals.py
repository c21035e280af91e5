"""The errors of GGUF files: what is wrong with a file, and what to take instead. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fleetd.errors import ModelCorrupt, ModelUnsupported

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,79}")
#: Values of general.type that are not a whole model, and what each is.
_PARTS = {
    "mmproj": "the part of a model that reads images",
    "adapter": "an adapter for a model",
    "vocab": "a vocabulary without weights",
    "imatrix": "statistics for a quantiser",
}


def instead(metadata: Mapping[str, Any]) -> str:
    """The hint that tells where to find the same model in a form that can be used."""
    name = metadata.get("general.name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return "Take an MLX copy of the same model: fleetctl models pull mlx-community/NAME."
    guess = re.sub(r"[ _]+", "-", name.strip())
    return (
        f"Take an MLX copy of the same model; its name will be like mlx-community/{guess}-4bit: "
        "fleetctl models pull NAME."
    )


def unsupported(what: str, why: str, metadata: Mapping[str, Any]) -> ModelUnsupported:
    """The error for a sound file that cannot be imported; ``why`` goes on from the file's name."""
    return ModelUnsupported(f"{what} {why}", hint=instead(metadata))


def corrupt(what: str, why: str) -> ModelCorrupt:
    """The error for a damaged file."""
    return ModelCorrupt(f"{what} is not a sound GGUF file: {why}.", hint="Download the file again.")


def refuse_parts(metadata: Mapping[str, Any], what: str) -> None:
    """Raises ModelUnsupported for a file that is not a whole model."""
    kind = metadata.get("general.type", "model")
    if metadata.get("general.architecture") == "clip":
        kind = "mmproj"
    if kind == "model":
        return
    raise ModelUnsupported(
        f"{what} is {_PARTS.get(str(kind), f'of the type {kind!r}')}, not a model.",
        hint="Take the file of the model itself, beside it in the same repository.",
    )
