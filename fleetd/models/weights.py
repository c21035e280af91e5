"""The files of a folder that are its weights, and whether all of them are there, by their names alone.

mlx-lm reads every ``model*.safetensors`` and no index. So an index only tells which files are missing, and
only if it names files that lie beside it: some converters leave the index of the model that they converted.
"""

from __future__ import annotations

import re
from pathlib import Path

from fleetd import limits
from fleetd.errors import ModelCorrupt, ModelRefused
from fleetd.models import names
from fleetd.models.json_files import PULL_AGAIN, read_json

#: The files that mlx-lm loads; other safetensors files in a folder are not weights of the model.
WEIGHTS_PATTERN = "model*.safetensors"
#: A head that drafts for the model, which may be added to an installed one: it never changes an answer.
HEAD_NAME = "mtp.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_SHARD = re.compile(r"(.*-)(\d{5})-of-(\d{5})\.safetensors")


def weight_files(path: Path) -> list[Path]:
    """The files of weights in a folder, by name."""
    return sorted(path.glob(WEIGHTS_PATTERN))


def missing_weights(path: Path) -> str:
    """The name of the first file of weights that is missing; "" if none is.

    Raises:
        ModelCorrupt: the index cannot be read, or there are no weights.
        ModelRefused: the index names files elsewhere.
    """
    here = {file.name for file in weight_files(path) if file.is_file()}
    indexed = _indexed(path / INDEX_NAME)
    if not here:
        raise ModelCorrupt(f"{path} holds no weights ({WEIGHTS_PATTERN}).", hint=_other_weights(path))
    wanted = indexed if here & indexed else set()
    for name in here:
        if (shard := _SHARD.fullmatch(name)) is not None:
            count = min(int(shard[3]), limits.MODEL_FILES)
            wanted |= {f"{shard[1]}{number:05}-of-{shard[3]}.safetensors" for number in range(1, count + 1)}
    return min((name for name in wanted - here if not (path / name).is_file()), default="")


def unused_files(path: Path) -> list[str]:
    """Names of adapters beside the weights: the model is run without them."""
    return sorted(file.name for file in path.glob("adapter*.safetensors"))


def _indexed(index: Path) -> set[str]:
    """The names of files in the index; empty if there is no index."""
    if not index.exists():
        return set()
    mapping = read_json(index, limits.MODEL_JSON_BYTES).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise ModelCorrupt(f"{index} has no weight_map.", hint=PULL_AGAIN)
    for tensor, file in mapping.items():
        if not isinstance(file, str) or not names.is_file_name(file) or not file.endswith(".safetensors"):
            raise ModelRefused(
                f"{index} places {tensor[:80]!r} in {str(file)[:80]!r}, not a plain file name.",
                hint="Use a safetensors copy of the model: fleetctl models pull mlx-community/NAME.",
            )
    return set(mapping.values())


def _other_weights(path: Path) -> str:
    """The hint for a folder without weights."""
    others = sorted(file.name for file in path.glob("*.safetensors"))
    if any(name.startswith("adapter") for name in others):
        return "Only an adapter lies there: fuse it with its model first, with mlx_lm.fuse."
    if others:
        return f"The engine reads no {others[0]}: name the files model-00001-of-0000N.safetensors and so on."
    return "Only safetensors and GGUF weights are read; convert others with mlx_lm.convert."
