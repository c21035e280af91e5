"""Parts of models, as copies of layers from another machine leave them."""

from __future__ import annotations

import shutil
from pathlib import Path

from fleetd.models import layer_files


def part_of(whole: Path, root: Path, first: int, last: int) -> Path:
    """A folder with the files of layers [first, last)."""
    place = root / layer_files.PARTS / f"{first}-{last}"
    place.mkdir(parents=True)
    shutil.copy(whole / "config.json", place)
    found = layer_files.files_of(whole)
    names = [layer_files.TABLE_NAME, *(layer_files.name_of(layer) for layer in range(first, last))]
    if found.ends_everywhere:
        names.append(layer_files.ENDS_NAME)
    buffer = memoryview(bytearray(1000))
    for name in names:
        (place / name).write_bytes(b"".join(bytes(each) for each in found.files[name].pieces(0, buffer)))
    return place
