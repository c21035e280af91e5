"""A model on this machine: a folder with config, weights and tokenizer, and the facts read from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from fleetd import limits
from fleetd.control.model_facts import ModelPurpose, ModelShape
from fleetd.errors import ModelCorrupt
from fleetd.models import vector_files
from fleetd.models.images import has_encoder, reads_images
from fleetd.models.json_files import PULL_AGAIN, read_json
from fleetd.models.opening import open_regular
from fleetd.models.weights import missing_weights, weight_files

# "part": some layers of a model of the hub, for answers of this machine together with others.
Source = Literal["embedded", "hub", "folder", "added", "gguf", "lm-studio", "part"]

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
_DEFAULT_CONTEXT_TOKENS, _MOST_CONTEXT_TOKENS = 2048, 1 << 40
# What is read of a config before its model is loaded, with the least and the most that a model has.
_RANGES: dict[str, tuple[int, int]] = {
    "hidden_size": (1, 1 << 20),
    "num_hidden_layers": (1, 4096),
    "num_attention_heads": (1, 4096),
    "num_key_value_heads": (1, 4096),
    "head_dim": (1, 1 << 16),
    "intermediate_size": (0, 1 << 24),
    "vocab_size": (1, 1 << 24),
    "max_position_embeddings": (1, _MOST_CONTEXT_TOKENS),
}
# Most characters of a value in a message.
_SHOWN_CHARS = 80


class ModelFolder(msgspec.Struct, frozen=True):
    """A model folder and its facts."""

    # The canonical name: the catalog's, else the hub id, else the folder's name.
    name: str
    # The folder.
    path: Path
    # How the model came to this machine.
    source: Source
    # The commit of the hub; None if it is not from there, or not known.
    revision: str | None
    # The content of config.json.
    config: Mapping[str, Any]
    # Bytes of all files of weights together.
    weights_bytes: int
    # When the newest file of weights was written, in seconds since the epoch.
    created_s: float
    # What it gives.
    purpose: ModelPurpose = "chat"
    # Numbers in a vector of a text; 0 if its purpose is another.
    vector_width: int = 0
    # Whether prompts may have images in them.
    images: bool = False

    @property
    def shape(self) -> ModelShape:
        """What the files say without a load."""
        return ModelShape(
            self.architecture,
            self.weights_bytes,
            self.longest_text if self.purpose != "chat" else self.context_tokens,
            purpose=self.purpose,
            vector_width=self.vector_width,
            images=self.images,
        )

    @property
    def longest_text(self) -> int:
        """Tokens of the longest text that a model for vectors or for reranking reads."""
        try:
            return vector_files.longest_text(self.path, self.config, self.context_tokens)
        except ModelCorrupt:
            return self.context_tokens  # a load says what is wrong

    @property
    def architecture(self) -> str:
        """``model_type`` of the config; "unknown" if it has none."""
        return str(self.config.get("model_type", "unknown"))

    @property
    def context_tokens(self) -> int:
        """The longest context by the config, in tokens."""
        nested = self.config.get("text_config")
        for section in (self.config, nested if isinstance(nested, dict) else {}):
            for key in _CONTEXT_KEYS:
                found = section.get(key)
                if isinstance(found, int) and 0 < found <= _MOST_CONTEXT_TOKENS:
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


def read_config(path: Path) -> dict[str, Any]:
    """The content of config.json of a model folder.

    Raises:
        ModelCorrupt: the file is not there, is too long, holds no JSON object, or a value that no model has.
    """
    file = path / "config.json"
    config = read_json(file, limits.MODEL_CONFIG_BYTES)
    for key, kind, what in (("model_type", str, "a text"), ("text_config", dict, "an object")):
        if not isinstance(config.get(key), kind | None):
            raise _odd_value(file, key, config[key], what)
    for section in (config, config.get("text_config") or {}):
        for key, (low, high) in _RANGES.items():
            found = section.get(key)
            if found is not None and (type(found) is not int or not low <= found <= high):
                raise _odd_value(file, key, found, f"an integer from {low} to {high}")
    return config


def _odd_value(file: Path, key: str, found: object, what: str) -> ModelCorrupt:
    return ModelCorrupt(f"{file}: {key} is {repr(found)[:_SHOWN_CHARS]}, not {what}.", hint=PULL_AGAIN)


def read_folder(path: Path, *, name: str, source: Source, revision: str | None) -> ModelFolder:
    """The facts of a folder; nothing is hashed. Raises ModelCorrupt if it holds no model."""
    config = read_config(path)
    weights = weight_files(path)
    if not weights:
        missing_weights(path)  # says what lies there instead
    try:
        stats = [file.stat() for file in weights]
    except OSError as error:
        raise ModelCorrupt(f"Weights in {path} are missing: {error.strerror}.", hint=PULL_AGAIN) from None
    purpose = vector_files.purpose_of(path, config, name)
    return ModelFolder(
        name=name,
        path=path,
        source=source,
        revision=revision,
        config=config,
        weights_bytes=sum(stat.st_size for stat in stats),
        created_s=max(stat.st_mtime for stat in stats),
        purpose=purpose,
        vector_width=vector_files.width_or_none(path, config) if purpose == "embedding" else 0,
        images=purpose == "chat" and reads_images(config) and has_encoder(path),
    )
