"""Whether a model reads images, by its config and by the headers of its weights. Imports no mlx."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from fleetd.errors import ModelCorrupt, UnsupportedParameter
from fleetd.models.safetensors_header import read_header
from fleetd.models.weights import weight_files

# The names of tensors begin so, once ``model.`` is taken off.
ENCODER, PROJECTOR = "vision_tower.", "multi_modal_projector."
# ``model_type`` of a model → those of its image encoders that are known here.
_KNOWN = {"gemma3": frozenset({"siglip_vision_model"}), "mistral3": frozenset({"pixtral"})}


def reads_images(config: Mapping[str, Any]) -> bool:
    """True if models of this config can be sent images here, given the weights for it."""
    vision = config.get("vision_config")
    kinds = _KNOWN.get(str(config.get("model_type", "")), frozenset())
    return isinstance(vision, Mapping) and vision.get("model_type") in kinds


def no_images(model: str, where: str, why: str = "") -> UnsupportedParameter:
    """The refusal of images by a model that reads text only.

    Args:
        where: the field that they came in.
        why: a sentence, if it is not that the model is for text.
    """
    return UnsupportedParameter(
        f"{model} reads text only: it cannot be sent images. {why}".rstrip(),
        hint="Send text, or ask a Mistral 3 or a Gemma 3 with its image encoder; `fleetctl models` says which"
        " models read images.",
        param=where,
    )


def has_encoder(folder: Path) -> bool:
    """True if a folder's weights have an image encoder: conversions for text alone leave it out. Blocks."""
    try:
        states = ((file, file.stat().st_mtime_ns, file.stat().st_size) for file in weight_files(folder))
        return _encoder_in(tuple(states))
    except (ModelCorrupt, OSError):
        return False


@lru_cache(maxsize=64)
def _encoder_in(states: tuple[tuple[Path, int, int], ...]) -> bool:
    """The same of files with their times and sizes, by which it is kept: models are listed often."""
    return any(
        name.removeprefix("model.").startswith(ENCODER) for file, _, _ in states for name in read_header(file)
    )
