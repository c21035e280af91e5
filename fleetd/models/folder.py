"""A model on this machine: a folder with config, weights and tokenizer, and what is known about it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from fleetd import limits
from fleetd.errors import ModelCorrupt
from fleetd.models.opening import open_regular, read_regular

Source = Literal["embedded", "hub", "folder", "added", "gguf", "lm-studio"]

#: What mlx-lm loads; other safetensors files in a folder are not weights of the model.
WEIGHTS_PATTERN = "model*.safetensors"
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
_DEFAULT_CONTEXT_TOKENS = 2048


class ModelFolder(msgspec.Struct, frozen=True):
    """``name`` is canonical: the catalog's name, else the hub id, else the folder's name."""

    name: str
    path: Path
    source: Source
    revision: str | None
    config: Mapping[str, Any]
    weights_bytes: int
    created_s: float

    @property
    def architecture(self) -> str:
        return str(self.config.get("model_type", "unknown"))

    @property
    def context_tokens(self) -> int:
        nested = self.config.get("text_config")
        for section in (self.config, nested if isinstance(nested, dict) else {}):
            for key in _CONTEXT_KEYS:
                found = section.get(key)
                if isinstance(found, int) and found > 0:
                    return found
        return _DEFAULT_CONTEXT_TOKENS


def is_gguf(path: Path) -> bool:
    """True for a GGUF file, by its name or its first bytes: Ollama names its files by their hashes."""
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with open_regular(path) as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def weight_files(path: Path) -> list[Path]:
    return sorted(path.glob(WEIGHTS_PATTERN))


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a model folder.

    Raises:
        ModelCorrupt: not there, too long, or not a JSON object.
    """
    return read_json(path / "config.json", limits.MODEL_CONFIG_BYTES)


def read_json(file: Path, limit_bytes: int) -> dict[str, Any]:
    """A JSON object from a file of bounded size. Raises ModelCorrupt, naming the file."""
    try:
        raw = read_regular(file, limit_bytes)
    except OSError as error:
        raise ModelCorrupt(
            f"{file.name} in {file.parent} cannot be read: {error.strerror}.", hint=PULL_AGAIN
        ) from None
    if len(raw) > limit_bytes:
        raise ModelCorrupt(
            f"{file.name} in {file.parent} is over the limit of {limit_bytes} bytes.", hint=PULL_AGAIN
        )
    try:
        found = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ModelCorrupt(f"{file.name} in {file.parent} is not JSON: {error}.", hint=PULL_AGAIN) from None
    if not isinstance(found, dict):
        raise ModelCorrupt(f"{file.name} in {file.parent} is not a JSON object.", hint=PULL_AGAIN)
    return found


PULL_AGAIN = (
    "Remove the model and pull it again: fleetctl models remove NAME, then fleetctl models pull NAME."
)


def read_folder(path: Path, *, name: str, source: Source, revision: str | None) -> ModelFolder:
    """Look at a folder without hashing anything. Raises ModelCorrupt if it holds no model."""
    config = read_config(path)
    weights = weight_files(path)
    if not weights:
        raise ModelCorrupt(
            f"{path} holds no weights ({WEIGHTS_PATTERN}).",
            hint="Only safetensors and GGUF weights are read; convert others with mlx_lm.convert.",
        )
    try:
        stats = [file.stat() for file in weights]
    except OSError as error:
        raise ModelCorrupt(f"Weights in {path} are missing: {error.strerror}.", hint=PULL_AGAIN) from None
    return ModelFolder(
        name=name,
        path=path,
        source=source,
        revision=revision,
        config=config,
        weights_bytes=sum(stat.st_size for stat in stats),
        created_s=max(stat.st_mtime for stat in stats),
    )
