"""An image's file as pixels, within bounds: somebody may have made it to do harm.

Pillow reads it. Only a few formats are tried, the size is looked at before a pixel is decoded, and of an
animation the first frame counts.
"""

from __future__ import annotations

import io
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from fleetd import limits
from fleetd.errors import InvalidValue, PayloadTooLarge

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
# Lines of an image that are converted at a time: all of a large one at once would take a gigabyte.
_LINES = 256
# How the camera was held, in the notes that it writes (EXIF) → Pillow's number for the turn that undoes it.
_ORIENTATION = 0x0112
_TURNS: dict[Any, int] = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}


def read_image(data: bytes, where: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The pixels of an image's file, (H, W, 3) in RGB, turned as the camera was held. Transparent parts are
    white. Takes at most some eight bytes a pixel meanwhile.

    Args:
        where: the field that it came in, for errors.

    Raises:
        InvalidValue: it is no image of these formats, or it is damaged.
        PayloadTooLarge: it has too many pixels.
    """
    try:
        with warnings.catch_warnings():
            # Pillow warns of notes of the camera that it cannot read.
            warnings.simplefilter("ignore")
            return _in_rgb(_upright(data, where))
    except (MemoryError, PayloadTooLarge):
        raise
    # Decoders of damaged files raise whatever their authors did not think of.
    except Exception as error:
        raise InvalidValue(
            f"{where}: this is no image that can be read ({type(error).__name__}).",
            hint=f"Send a whole file in one of these formats: {', '.join(FORMATS)}.",
            param=where,
        ) from error


def _upright(data: bytes, where: str) -> Image:
    """The image, decoded and turned. Raises PayloadTooLarge, and what decoders raise."""
    from PIL import Image  # most workers never see an image

    # Pillow's bound is wider than the one here, and says that the file is no image.
    Image.MAX_IMAGE_PIXELS = None
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        width, height = image.size
        if width * height > limits.IMAGE_PIXELS:
            raise PayloadTooLarge(
                f"{where}: the image has {width} x {height} pixels; at most {limits.IMAGE_PIXELS} are read.",
                hint="Send a smaller one: models look at some 1,500 pixels a side.",
                param=where,
            )
        image.load()
        turn = None
        # Some programs write notes of the camera that cannot be read. The pixels can.
        with suppress(Exception):
            turn = _TURNS.get(image.getexif().get(_ORIENTATION))
        return image if turn is None else image.transpose(Image.Transpose(turn))


def resized(
    image: np.ndarray[Any, np.dtype[np.uint8]], height: int, width: int, resample: int
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """An (H, W, 3) image of another size. ``resample``: Pillow's number for a way to interpolate."""
    if image.shape[:2] == (height, width):
        return image
    from PIL import Image

    found = Image.fromarray(image).resize((width, height), Image.Resampling(resample))
    return np.asarray(found, dtype=np.uint8)


def _in_rgb(image: Image) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """(H, W, 3), some lines after the other."""
    width, height = image.size
    found = np.empty((height, width, 3), dtype=np.uint8)
    for top in range(0, height, _LINES):
        end = min(top + _LINES, height)
        found[top:end] = np.asarray(_on_white(image.crop((0, top, width, end))))
    return found


def _on_white(image: Image) -> Image:
    """The same in RGB."""
    from PIL.Image import alpha_composite, new

    if image.mode.startswith("I;16"):
        return _of_16_bits(np.asarray(image), image.info.get("transparency"))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        whole = image.convert("RGBA")
        return alpha_composite(new("RGBA", whole.size, "white"), whole).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _of_16_bits(gray: np.ndarray[Any, np.dtype[np.uint16]], clear: int | None) -> Image:
    """An image of (H, W) grays by their upper bytes, as Pillow reads 16 bits of a colour. Pillow itself makes
    all that is over 255 white. ``clear``: the gray that is transparent."""
    from PIL.Image import fromarray

    shown = (gray >> 8).astype(np.uint8)
    if clear is not None:
        shown[gray == clear] = 255
    return fromarray(shown).convert("RGB")
