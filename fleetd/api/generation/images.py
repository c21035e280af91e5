"""Images as clients send them: their files, and their places between the texts of a message. Pure.

A file travels in the request, in base64. An address is never fetched: whoever writes a prompt could have this
machine open any address of its network.
"""

from __future__ import annotations

import base64
import binascii
import string
from collections.abc import Sequence

from fleetd import limits
from fleetd.engine.protocol import ImageAt
from fleetd.errors import InvalidValue, PayloadTooLarge, UnsupportedParameter

# What a message consists of: texts, and files of images.
Piece = str | bytes


def from_url(url: object, where: str) -> bytes:
    """The file in a ``data:`` URL. ``where``: the field that it came in, for errors.

    Raises:
        UnsupportedParameter: it is the address of something else.
        InvalidValue, PayloadTooLarge: from ``from_base64``; InvalidValue also if it is no text.
    """
    if not isinstance(url, str) or not url:
        raise InvalidValue(f"{where}: an image needs a URL.", param=where)
    scheme, _, rest = url.partition(":")
    head, comma, data = rest.partition(",")
    if scheme.lower() != "data":
        raise UnsupportedParameter(
            f"{where}: addresses of images are not fetched.",
            hint="Send the image itself: data:image/png;base64,...",
            param=where,
        )
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidValue(f"{where}: a data URL has to be in base64: data:image/png;base64,...", param=where)
    return from_base64(data, where)


def from_base64(data: object, where: str) -> bytes:
    """The file that ``data`` encodes.

    Raises:
        InvalidValue: it is no base64, or empty.
        PayloadTooLarge: the file is too large.
    """
    if not isinstance(data, str):
        raise InvalidValue(f"{where}: an image needs its file in base64.", param=where)
    encoded = _without_space(data)
    if len(encoded.rstrip(b"=")) * 3 // 4 > limits.IMAGE_BYTES:
        raise PayloadTooLarge(
            f"{where}: the image has over {limits.IMAGE_BYTES} bytes.",
            hint="Send a smaller one.",
            param=where,
        )
    try:
        found = base64.b64decode(encoded, validate=True)
    except binascii.Error:
        found = b""
    if not found:
        raise InvalidValue(f"{where}: the image's file is no base64.", param=where)
    return found


def _without_space(data: str) -> bytes:
    """Base64 without its line breaks; b"" if it has other characters than ASCII's."""
    try:
        return data.encode("ascii").translate(None, string.whitespace.encode())
    except UnicodeEncodeError:
        return b""


def placed(pieces: Sequence[Piece]) -> tuple[str, list[ImageAt]]:
    """The text of a message's pieces, and its images. Texts that follow each other are joined by a line
    break; at an image nothing is put between, as in the templates of models that read images."""
    content, images, texts = "", list[ImageAt](), False
    for piece in pieces:
        if isinstance(piece, bytes):
            images.append((len(content), piece))
        else:
            content += f"\n{piece}" if texts else piece
        texts = isinstance(piece, str)
    return content, images
