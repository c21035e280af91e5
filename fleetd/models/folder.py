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
_DEFAULT_CONTEXT_TOKENS = 2048


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
        return vector_files.longest_text(self.path, self.config, self.context_tokens)

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


def read_config(path: Path) -> dict[str, Any]:
    """The content of config.json of a model folder.

    Raises:
        ModelCorrupt: the file is not there, is too long, or holds no JSON object.
    """
    return read_json(path / "config.json", limits.MODEL_CONFIG_BYTES)


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
