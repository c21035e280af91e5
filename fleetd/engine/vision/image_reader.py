"""What a model reads images with: found in its folder, and read apart from the text model.

mlx-lm reads the text model of such a folder and drops the rest. Here the rest is read, for families whose
text model takes an image as tokens like others: each has one position, and sees what comes before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np

from fleetd import limits
from fleetd.engine.vision import pixtral
from fleetd.engine.vision.image_file import resized
from fleetd.engine.vision.pixtral import Mistral3Projector, PixtralConfig, PixtralEncoder
from fleetd.errors import ModelCorrupt, ModelUnsupported
from fleetd.models.images import ENCODER, PROJECTOR, reads_images
from fleetd.models.json_files import read_json
from fleetd.models.weights import weight_files
from fleetd.text.decoding import from_plain

# CLIP's means and deviations of red, green and blue, which makers use where they say nothing else.
_MEAN, _DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_LONGEST = 1540
# Quantised weights without a word of how.
_GROUP, _BITS = 64, 4


class ImagePatches(msgspec.Struct, frozen=True):
    """An image as a model reads it.

    ``pixels``: (H, W, 3) f32, normalised. ``rows``: how many of a prompt's tokens take it up. ``text``: what
    stands for it in the prompt's text.
    """

    pixels: np.ndarray[Any, np.dtype[np.float32]]
    rows: int
    text: str


class ImageSettings(msgspec.Struct, frozen=True):
    """How a model's makers prepare images, by its ``preprocessor_config.json``."""

    longest: int = _LONGEST
    mean: tuple[float, float, float] = _MEAN
    deviation: tuple[float, float, float] = _DEVIATION

    @classmethod
    def in_folder(cls, folder: Path) -> ImageSettings:
        """Those of a model's folder; the usual ones if it says none. Raises ModelCorrupt."""
        for name in ("preprocessor_config.json", "processor_config.json"):
            if (folder / name).is_file():
                found = read_json(folder / name, limits.MODEL_CONFIG_BYTES)
                found = found.get("image_processor", found)
                size = found.get("size")
                longest = size.get("longest_edge") if isinstance(size, dict) else size
                return from_plain(
                    {
                        key: value
                        for key, value in {
                            "longest": longest,
                            "mean": found.get("image_mean"),
                            "deviation": found.get("image_std"),
                        }.items()
                        if value is not None
                    },
                    cls,
                )
        return cls()


class ImageReader(nn.Module):  # type: ignore[misc]
    """An image encoder and what joins it to the text model. Frozen; computes on the default device."""

    #: What the chat template writes for an image.
    placeholder = "[IMG]"

    def __init__(self, config: Mapping[str, Any], settings: ImageSettings) -> None:
        super().__init__()
        vision = from_plain(config["vision_config"], PixtralConfig)
        text = config["text_config"]
        self.settings = settings
        self.side = int(config.get("spatial_merge_size", 2))
        self.patch = vision.patch_size
        #: The token whose embedding a row takes the place of.
        self.row_token = int(config.get("image_token_index", config.get("image_token_id", 10)))
        self.vision_tower = PixtralEncoder(vision)
        self.multi_modal_projector = Mistral3Projector(
            vision.hidden_size,
            int(text["hidden_size"]),
            side=self.side,
            eps=float(text.get("rms_norm_eps", 1e-5)),
            bias=bool(config.get("multimodal_projector_bias", False)),
            hidden_act=str(config.get("projector_hidden_act", "gelu")),
        )

    def patches(self, image: np.ndarray[Any, np.dtype[np.uint8]]) -> ImagePatches:
        """An (H, W, 3) image as it is read. Computes on the CPU, in any thread."""
        multiple = self.patch * self.side
        height, width = pixtral.fitted(image.shape[0], image.shape[1], self.settings.longest, multiple)
        mean, deviation = (
            np.array(each, dtype=np.float32) for each in (self.settings.mean, self.settings.deviation)
        )
        pixels = (resized(image, height, width).astype(np.float32) / np.float32(255) - mean) / deviation
        rows, columns = height // multiple, width // multiple
        return ImagePatches(pixels, rows * columns, pixtral.shown(rows, columns))

    def __call__(self, patches: ImagePatches) -> mx.array:
        """The image's rows, (``patches.rows``, D of the text model)."""
        found: mx.array = self.multi_modal_projector(self.vision_tower(mx.array(patches.pixels)))
        return found


def read_image_reader(folder: Path, config: Mapping[str, Any]) -> ImageReader | None:
    """What the model in a folder reads images with, its weights not read yet; None if it reads none.

    Raises:
        ModelUnsupported: its config or weights are not those of a family that is known here.
        ModelCorrupt: a file cannot be read.
    """
    if not reads_images(config):
        return None
    try:
        reader = ImageReader(config, ImageSettings.in_folder(folder))
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
    channels = int(reader.vision_tower.patch_conv.weight.shape[-1])
    for file in weight_files(folder):
        try:
            loaded: Any = mx.load(str(file))
        except (RuntimeError, ValueError) as error:
            raise ModelCorrupt(f"{file.name} cannot be read: {error}") from error
        for name, array in loaded.items():
            plain = name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.", 1)
            if not plain.startswith((ENCODER, PROJECTOR)):
                continue
            if plain.endswith("patch_conv.weight") and array.shape[-1] != channels:
                # torch has channels before rows and columns.
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
