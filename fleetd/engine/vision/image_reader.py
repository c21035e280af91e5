"""What a family of models reads images with, beside its text model: a class for each family derives from
``ImageReader``. ``reader_files`` finds it in a model's folder."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np

from fleetd import limits
from fleetd.engine.vision.encoder_parts import PassSizes
from fleetd.engine.vision.image_file import resized
from fleetd.models.json_files import read_json
from fleetd.text.decoding import from_plain


class ImagePatches(msgspec.Struct, frozen=True):
    """An image as a model reads it.

    ``pixels``: (H, W, 3) in RGB, of the size that the model reads. ``rows``: how many of a prompt's tokens
    take it up. ``text``: what stands for it in the prompt's text.
    """

    pixels: np.ndarray[Any, np.dtype[np.uint8]]
    rows: int
    text: str


class ImageSettings(msgspec.Struct, frozen=True):
    """How a model's makers prepare images, by its ``preprocessor_config.json``.

    ``mean``, ``deviation``: of red, green and blue. ``resample``: Pillow's number for a way to interpolate.
    ``longest``: pixels of an image's longer side; 0 if the model reads images of one size.
    """

    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]
    resample: Literal[0, 1, 2, 3, 4, 5]
    longest: int = 0

    @classmethod
    def in_folder(cls, folder: Path, usual: ImageSettings) -> ImageSettings:
        """Those of a model's folder; its family's ``usual`` ones for what it does not say. Raises
        ModelCorrupt, and ValidationError for settings of another form."""
        for name in ("preprocessor_config.json", "processor_config.json"):
            if (folder / name).is_file():
                found = read_json(folder / name, limits.MODEL_CONFIG_BYTES)
                found = found.get("image_processor", found)
                size = found.get("size")
                said = {
                    "longest": size.get("longest_edge") if isinstance(size, dict) else size,
                    "mean": found.get("image_mean"),
                    "deviation": found.get("image_std"),
                    "resample": found.get("resample"),
                }
                said = {key: value for key, value in said.items() if value is not None}
                return from_plain(msgspec.to_builtins(usual) | said, cls)
        return usual

    def resized(
        self, image: np.ndarray[Any, np.dtype[np.uint8]], height: int, width: int
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """An (H, W, 3) image of another size."""
        return resized(image, height, width, self.resample)

    def normalised(self, pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> mx.array:
        """(H, W, 3) pixels as f32, as an encoder is given them."""
        mean, deviation = (np.array(each, dtype=np.float32) for each in (self.mean, self.deviation))
        found = pixels.astype(np.float32)
        # In place: each copy of a large image is some 28 MB.
        found /= np.float32(255)
        found -= mean
        found /= deviation
        return mx.array(found)


class ImageReader(nn.Module):  # type: ignore[misc]
    """An image encoder and what joins it to the text model. Frozen; computes on the default device.

    Its parameters have the names that transformers gives them. A family's class is made of a model's folder
    and config; its constructor raises KeyError, TypeError, ValueError or ModelCorrupt for what it does not
    understand.
    """

    #: What the chat template writes for an image.
    placeholder: str
    #: The token whose embedding a row takes the place of.
    row_token: int
    #: True if the rows of an image see each other both ways in the text model. False: as tokens do.
    both_ways = False
    #: How images are prepared.
    settings: ImageSettings
    #: Numbers in a row: the width of the text model.
    text_width: int

    @property
    def sizes(self) -> PassSizes:
        """What decides how much memory the encoder takes."""
        raise NotImplementedError

    def pass_bytes(self, patches: ImagePatches) -> int:
        """Memory for prompts that ``reading`` takes, besides its pixels and the rows that it returns."""
        height, width, _ = patches.pixels.shape
        return self.sizes.pass_bytes((height // self.sizes.patch) * (width // self.sizes.patch))

    def row_bytes(self, patches: ImagePatches) -> int:
        """Memory of the rows that ``reading`` returns."""
        return patches.rows * self.text_width * self.sizes.item_bytes

    def patches(self, image: np.ndarray[Any, np.dtype[np.uint8]]) -> ImagePatches:
        """An (H, W, 3) image as it is read. Computes on the CPU, in any thread."""
        raise NotImplementedError

    def reading(self, patches: ImagePatches) -> Generator[None, None, mx.array]:
        """Read an image in steps, of a layer or less; what the generator returns are its rows,
        (``patches.rows``, D of the text model). An image takes a CPU up to minutes, and others have their
        turns meanwhile."""
        raise NotImplementedError

    def __call__(self, patches: ImagePatches) -> mx.array:
        """``reading`` to its end."""
        reading = self.reading(patches)
        while True:
            try:
                next(reading)
            except StopIteration as ended:
                rows: mx.array = ended.value
                return rows
