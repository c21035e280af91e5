"""JSON as publishers write it: with Python's NaN and Infinity, and at times with a byte order mark."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

import msgspec

from fleetd.errors import ModelCorrupt
from fleetd.models.opening import read_regular

BOM = codecs.BOM_UTF8
PULL_AGAIN = (
    "Remove the model and pull it again: fleetctl models remove NAME, then fleetctl models pull NAME."
)


def read_json(file: Path, limit_bytes: int) -> dict[str, Any]:
    """The JSON object in a file of at most ``limit_bytes``. Raises ModelCorrupt, which names the file."""
    what = f"{file.name} in {file.parent}"
    try:
        raw = read_regular(file, limit_bytes)
    except OSError as error:
        raise ModelCorrupt(f"{what} cannot be read: {error.strerror}.", hint=PULL_AGAIN) from None
    if len(raw) > limit_bytes:
        raise ModelCorrupt(f"{what} is over the limit of {limit_bytes} bytes.", hint=PULL_AGAIN)
    try:
        found = _decode(raw.removeprefix(BOM))
    except (ValueError, RecursionError) as error:
        raise ModelCorrupt(f"{what} is not JSON: {error}.", hint=PULL_AGAIN) from None
    if not isinstance(found, dict):
        raise ModelCorrupt(f"{what} is not a JSON object.", hint=PULL_AGAIN)
    return found


def _decode(raw: bytes) -> Any:
    """The value that ``raw`` encodes. Raises ValueError, RecursionError."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        if b"NaN" not in raw and b"Infinity" not in raw:
            raise
    found = json.loads(raw)
    # Python also takes half of a character, which no answer could carry: this raises for it.
    msgspec.json.encode(found)
    return found
