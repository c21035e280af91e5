"""A model's folder as mlx-lm and transformers can read it.

    a byte order mark before JSON, a template, a vocabulary   both refuse it, or take it for text → left out
    chat_template.json                                        read for pictures only → read for text, too
    tensors that a part of a model does not have              built with the others, never to be read

A folder that has nothing of these is read in place; else a folder of links stands in for it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from fleetd import limits
from fleetd.models import layer_files
from fleetd.models.chat_templates import lone_template
from fleetd.models.json_files import BOM, read_json
from fleetd.models.layer_files import TensorShape, header_bytes
from fleetd.models.opening import open_regular, read_regular

# Its name is one of weights, so that mlx-lm opens it.
_ABSENT = "model-fleetd-absent.safetensors"
_TEXTS = ("*.json", "*.jinja", "*.txt")


@contextmanager
def readable(path: Path) -> Iterator[Path]:
    """The folder itself, or one with the same name that lasts as long as this; raises ModelCorrupt."""
    changed = {file.name: _unmarked(file) for kind in _TEXTS for file in path.glob(kind) if _marked(file)}
    if template := lone_template(path):
        config = read_json(path / "tokenizer_config.json", limits.MODEL_JSON_BYTES)
        changed["tokenizer_config.json"] = msgspec.json.encode(config | {"chat_template": template})
    missing = layer_files.absent(path)
    if not changed and not missing:
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
        if missing:
            _stand_in(place / _ABSENT, missing)
        yield place


def forbid_absent(place: Path) -> None:
    """What is computed from a tensor that is not there raises RuntimeError from now on.

    mlx opens a file only if all its tensors could be in it, and reads them later.
    """
    if (place / _ABSENT).is_file():
        os.truncate(place / _ABSENT, 0)


def _stand_in(file: Path, tensors: Mapping[str, TensorShape]) -> None:
    """A file of a size at which it could have each of the tensors; it takes no room on the disk."""
    entries = {
        name: {"dtype": each.dtype, "shape": list(each.shape), "data_offsets": [0, each.size_bytes]}
        for name, each in tensors.items()
    }
    head = header_bytes(entries)
    file.write_bytes(head)
    os.truncate(file, len(head) + max(each.size_bytes for each in tensors.values()))


def _marked(file: Path) -> bool:
    with open_regular(file) as stream:
        return stream.read(len(BOM)) == BOM


def _unmarked(file: Path) -> bytes:
    return read_regular(file, limits.MODEL_JSON_BYTES).removeprefix(BOM)
