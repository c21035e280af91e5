"""The image encoder in a model's folder.

mlx-lm reads the text model of such a folder and drops the rest. Here the rest is read, for known families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx.utils import tree_flatten

from fleetd.engine.vision.image_reader import ImageReader
from fleetd.engine.vision.pixtral import Mistral3Reader
from fleetd.engine.vision.siglip import Gemma3Reader
from fleetd.errors import ModelCorrupt, ModelUnsupported
from fleetd.models.images import ENCODER, PROJECTOR, reads_images
from fleetd.models.weights import weight_files

# By the ``model_type`` of an image encoder: each is known here for one family.
_READERS: dict[str, Callable[[Path, Mapping[str, Any]], ImageReader]] = {
    "pixtral": Mistral3Reader,
    "siglip_vision_model": Gemma3Reader,
}
# Quantised weights without a word of how.
_GROUP, _BITS = 64, 4


def read_image_reader(folder: Path, config: Mapping[str, Any]) -> ImageReader | None:
    """What the model in a folder reads images with, its weights not read yet; None if it reads none.

    Raises:
        ModelUnsupported: its config or weights are not those of a family that is known here.
        ModelCorrupt: a file cannot be read.
    """
    if not reads_images(config):
        return None
    try:
        reader = _READERS[config["vision_config"]["model_type"]](folder, config)
        weights = dict(_weights(folder, reader))
        if not weights:
            return None
        _quantise_like(reader, weights, config)
        reader.load_weights(list(weights.items()), strict=True)
    except (KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
        raise ModelUnsupported(f"What it reads images with is not understood: {error}") from error
    reader.freeze()
    return reader


def _weights(folder: Path, reader: ImageReader) -> Iterable[tuple[str, mx.array]]:
    """Its tensors, by their names in transformers."""
    shapes = {name: array.shape for name, array in tree_flatten(reader.parameters())}
    for file in weight_files(folder):
        try:
            loaded: Any = mx.load(str(file))
        except (RuntimeError, ValueError) as error:
            raise ModelCorrupt(f"{file.name} cannot be read: {error}") from error
        for name, array in loaded.items():
            plain = name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.", 1)
            if not plain.startswith((ENCODER, PROJECTOR)):
                continue
            if array.ndim == 4 and array.shape != shapes.get(plain):
                # torch has a convolution's channels before its rows and columns.
                array = array.transpose(0, 2, 3, 1)
            yield plain, array


def _quantise_like(reader: ImageReader, weights: Mapping[str, mx.array], config: Mapping[str, Any]) -> None:
    """Give each layer that is quantised in the files the form that it has there."""
    given = config.get("quantization")
    whole = given if isinstance(given, dict) else {}

    def chosen(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if f"{path}.scales" not in weights or not hasattr(module, "to_quantized"):
            return False
        names = (path, f"model.{path}", path.replace("vision_tower.", "vision_tower.vision_model.", 1))
        own = next((whole[name] for name in names if isinstance(whole.get(name), dict)), whole)
        return {
            "group_size": int(own.get("group_size", _GROUP)),
            "bits": int(own.get("bits", _BITS)),
            "mode": str(own.get("mode", "affine")),
        }

    if any(name.endswith(".scales") for name in weights):
        nn.quantize(reader, class_predicate=chosen)
