"""Prompts, schemas and images from files and pipes: text in UTF-8, and no more than the daemon takes."""

from __future__ import annotations

import base64
import json
import mimetypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from fleetctl.exits import ClientError
from fleetd import limits


def read_text(path: str) -> str:
    """The text of a file; ``-`` is stdin. Raises ClientError, OSError."""
    if path == "-":
        return decoded(sys.stdin.buffer.read(limits.HTTP_BODY_BYTES + 1), "stdin")
    with Path(path).open("rb") as file:
        return decoded(file.read(limits.HTTP_BODY_BYTES + 1), path)


@dataclass(frozen=True, slots=True)
class SchemaFile:
    """A JSON schema, and the name of its file for errors."""

    name: str
    schema: dict[str, Any]


def read_schema(path: str) -> SchemaFile:
    """The JSON schema in a file; ``-`` is stdin. Raises ClientError, OSError."""
    name = "stdin" if path == "-" else path
    try:
        schema = json.loads(read_text(path), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ClientError(f"{name} is not valid JSON: {error}.") from error
    if not isinstance(schema, dict):
        raise ClientError(
            f"{name} holds no JSON schema: a schema is an object.",
            hint='A small one: {"type": "object", "properties": {"name": {"type": "string"}}}',
        )
    return SchemaFile(name, schema)


def with_images(text: str, paths: Sequence[str]) -> str | list[dict[str, Any]]:
    """A message's content: images in the order of their files, then the text; the text alone without any.

    Raises ClientError, OSError.
    """
    if not paths:
        return text
    images = [{"type": "image_url", "image_url": {"url": _image_url(path)}} for path in paths]
    return [*images, {"type": "text", "text": text}]


def _image_url(path: str) -> str:
    with Path(path).open("rb") as file:
        raw = file.read(limits.IMAGE_BYTES + 1)
    if len(raw) > limits.IMAGE_BYTES:
        raise ClientError(
            f"{path} holds more than {limits.IMAGE_BYTES // limits.MIB} MiB, the most of an image.",
            hint="Make it smaller first.",
        )
    kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(raw).decode()}"


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON's")


def composed(instruction: str, piped: str | None) -> str | None:
    """The prompt: what was typed, then what was piped. None when there is neither."""
    if piped is None:
        return instruction or None
    if not instruction:
        return piped
    return f"{instruction}\n\n{piped}" if piped.strip() else instruction


def decoded(raw: bytes, name: str) -> str:
    """Raises ClientError where there is too much of it, or it is no text."""
    if len(raw) > limits.HTTP_BODY_BYTES:
        raise ClientError(
            f"{name} holds more than {limits.HTTP_BODY_BYTES // limits.MIB} MiB, the most the daemon takes.",
            hint="Send a part of it.",
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ClientError(
            f"{name} is not UTF-8 text (byte {error.start + 1}).", hint="Convert it first: iconv -t UTF-8."
        ) from error
