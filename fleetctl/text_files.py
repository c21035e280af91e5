"""Prompts from files and pipes: UTF-8, and no more than the daemon takes."""

from __future__ import annotations

import sys
from pathlib import Path

from fleetctl.exits import ClientError
from fleetd import limits


def read_text(path: str) -> str:
    """The text of a file; ``-`` is stdin. Raises ClientError, OSError."""
    if path == "-":
        return decoded(sys.stdin.buffer.read(limits.HTTP_BODY_BYTES + 1), "stdin")
    with Path(path).open("rb") as file:
        return decoded(file.read(limits.HTTP_BODY_BYTES + 1), path)


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
