"""Files of images as their pixels: all that four formats can hold, within bounds of memory."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fleetd.engine.vision import image_file
from fleetd.engine.vision.image_file import read_image
from fleetd.errors import PayloadTooLarge


def saved(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def colours(data: bytes) -> list[Any]:
    """The first line's pixels."""
    return read_image(data, "image")[0].tolist()  # type: ignore[no-any-return]


def palette() -> Image.Image:
    found = Image.new("P", (2, 1))
    found.putpalette([10, 20, 30, 40, 50, 60])
    found.putpixel((1, 0), 1)
    return found


GRAYS = np.array([[0, 256, 32768, 65535]], dtype=np.uint16)
WHITE = [255] * 3
# What a file's first line is in RGB.
SHOWN: dict[str, tuple[bytes, list[list[int]]]] = {
    "16 bits": (saved(Image.fromarray(GRAYS)), [[0] * 3, [1] * 3, [128] * 3, WHITE]),
    "16 bits, clear": (
        saved(Image.fromarray(GRAYS), transparency=256),
        [[0] * 3, WHITE, [128] * 3, WHITE],
    ),
    "gray, clear": (saved(Image.new("L", (1, 1), 7), transparency=7), [WHITE]),
    "bits": (saved(Image.new("1", (1, 1), 0)), [[0] * 3]),
    "palette": (saved(palette()), [[10, 20, 30], [40, 50, 60]]),
    "palette, one clear": (saved(palette(), transparency=0), [WHITE, [40, 50, 60]]),
    "palette, half clear": (saved(palette(), transparency=bytes([0, 128])), [WHITE, [147, 152, 157]]),
    "GIF, one clear": (saved(palette(), "GIF", transparency=0), [WHITE, [40, 50, 60]]),
    "gray, half clear": (saved(Image.new("LA", (1, 1), (100, 128))), [[177] * 3]),
    "half clear": (saved(Image.new("RGBA", (1, 1), (100, 0, 0, 128))), [[177, 127, 127]]),
    "CMYK": (saved(Image.new("CMYK", (1, 1), (0, 0, 0, 255)), "JPEG"), [[0] * 3]),
    "several": (
        saved(
            Image.new("RGB", (8, 8), "white"),
            "MPO",
            save_all=True,
            append_images=[Image.new("RGB", (8, 8), "black")],
        ),
        [WHITE] * 8,
    ),
    "moving": (
        saved(
            Image.new("RGB", (2, 2), "white"),
            "WEBP",
            save_all=True,
            append_images=[Image.new("RGB", (2, 2), "black")],
            lossless=True,
        ),
        [WHITE] * 2,
    ),
}


@pytest.mark.parametrize("name", SHOWN)
def test_what_files_hold_is_shown_as_they_mean_it(name: str) -> None:
    data, wanted = SHOWN[name]
    assert colours(data) == wanted


# By the orientation: where the pixels of two lines of three go.
TURNED = {
    1: [[0, 1, 2], [3, 4, 5]],
    2: [[2, 1, 0], [5, 4, 3]],
    3: [[5, 4, 3], [2, 1, 0]],
    4: [[3, 4, 5], [0, 1, 2]],
    5: [[0, 3], [1, 4], [2, 5]],
    6: [[3, 0], [4, 1], [5, 2]],
    7: [[5, 2], [4, 1], [3, 0]],
    8: [[2, 5], [1, 4], [0, 3]],
    9: [[0, 1, 2], [3, 4, 5]],
}


@pytest.mark.parametrize("orientation", TURNED)
def test_photographs_are_turned_as_the_camera_was_held(orientation: int) -> None:
    image = Image.fromarray(np.arange(6, dtype=np.uint8).reshape(2, 3))
    notes = image.getexif()
    notes[0x0112] = orientation
    assert read_image(saved(image, exif=notes), "image")[..., 0].tolist() == TURNED[orientation]


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("notes", [b"Exif\0\0garbage", b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03"])
def test_notes_of_a_camera_that_cannot_be_read_spoil_no_image(form: str, notes: bytes) -> None:
    assert read_image(saved(Image.new("RGB", (4, 2), "red"), form, exif=notes), "image").shape == (2, 4, 3)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P"])
def test_lines_that_are_converted_one_after_the_other_are_those_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (7, 5, 4), dtype=np.uint8)
    data = saved(Image.fromarray(pixels).convert(mode))
    whole = read_image(data, "image")
    monkeypatch.setattr(image_file, "_LINES", 3)
    assert np.array_equal(read_image(data, "image"), whole)


@pytest.mark.parametrize("side", [8200, 20_000])
def test_an_image_of_too_many_pixels_says_how_many_it_has(side: int) -> None:
    """Its header alone."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b""))
    with pytest.raises(PayloadTooLarge, match=f"{side} x {side} pixels"):
        read_image(file, "image")
