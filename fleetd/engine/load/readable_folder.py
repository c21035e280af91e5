"""A model's folder as mlx-lm and transformers can read it.

    a byte order mark before JSON, a template, a vocabulary   both refuse it, or take it for text → left out
    chat_template.json                                        read for pictures only → read for text, too

A folder that has nothing of these is read in place; else a folder of links stands in for it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from fleetd import limits
from fleetd.models.chat_templates import lone_template
from fleetd.models.json_files import BOM, read_json
from fleetd.models.opening import open_regular, read_regular

_TEXTS = ("*.json", "*.jinja", "*.txt")


@contextmanager
def readable(path: Path) -> Iterator[Path]:
    """The folder itself, or one with the same name that lasts as long as this; raises ModelCorrupt."""
    changed = {file.name: _unmarked(file) for kind in _TEXTS for file in path.glob(kind) if _marked(file)}
    if template := lone_template(path):
        config = read_json(path / "tokenizer_config.json", limits.MODEL_JSON_BYTES)
        changed["tokenizer_config.json"] = msgspec.json.encode(config | {"chat_template": template})
    if not changed:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="fleetd-model-") as made:
        place = Path(made) / path.name
        place.mkdir()
        for file in path.iterdir():
            if file.name not in changed:
                (place / file.name).symlink_to(file.absolute())
        for name, content in changed.items():
            (place / name).write_bytes(content)
        yield place


def _marked(file: Path) -> bool:
    with open_regular(file) as stream:
        return stream.read(len(BOM)) == BOM


def _unmarked(file: Path) -> bytes:
    return read_regular(file, limits.MODEL_JSON_BYTES).removeprefix(BOM)
