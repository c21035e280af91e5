"""An image's file as pixels, within bounds: somebody may have made it to do harm.

Pillow reads it. Only a few formats are tried, the size is looked at before a pixel is decoded, and of an
animation the first frame counts.
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from fleetd import limits
from fleetd.errors import InvalidValue, PayloadTooLarge

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def read_image(data: bytes, where: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The pixels of an image's file, (H, W, 3) in RGB, turned as the camera was held. Transparent parts are
    white.

    Args:
        where: the field that it came in, for errors.

    Raises:
        InvalidValue: it is no image of these formats, or it is damaged.
        PayloadTooLarge: it has too many pixels.
    """
    from PIL import Image, ImageOps  # most workers never see an image

    try:
        with warnings.catch_warnings():
            # Pillow warns of large images; the bound here is lower, and refuses.
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
                if width * height > limits.IMAGE_PIXELS:
                    raise PayloadTooLarge(
                        f"{where}: the image has {width} x {height} pixels; at most {limits.IMAGE_PIXELS} "
                        "are read.",
                        hint="Send a smaller one: models look at some 1,500 pixels a side.",
                        param=where,
                    )
                upright = ImageOps.exif_transpose(image)
                return np.asarray(_on_white(upright), dtype=np.uint8)
    except (MemoryError, PayloadTooLarge):
        raise
    # Decoders of damaged files raise whatever their authors did not think of.
    except Exception as error:
        raise InvalidValue(
            f"{where}: this is no image that can be read ({type(error).__name__}).",
            hint=f"Send a whole file in one of these formats: {', '.join(FORMATS)}.",
            param=where,
        ) from error


def resized(
    image: np.ndarray[Any, np.dtype[np.uint8]], height: int, width: int, resample: int
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """An (H, W, 3) image of another size. ``resample``: Pillow's number for a way to interpolate."""
    if image.shape[:2] == (height, width):
        return image
    from PIL import Image

    found = Image.fromarray(image).resize((width, height), Image.Resampling(resample))
    return np.asarray(found, dtype=np.uint8)


def _on_white(image: Image) -> Image:
    from PIL.Image import alpha_composite, new

    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        whole = image.convert("RGBA")
        return alpha_composite(new("RGBA", whole.size, "white"), whole).convert("RGB")
    return image.convert("RGB")
