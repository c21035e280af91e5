"""Models that other programs keep on this machine, read only: LM Studio's folders and Ollama's store.

LM Studio   ~/.lmstudio/models/PUBLISHER/MODEL/          a folder of safetensors, or GGUF files
Ollama      ~/.ollama/models/manifests/REGISTRY/NAMESPACE/MODEL/TAG names, in its layer of type
            "…image.model", a GGUF file in ~/.ollama/models/blobs/

A folder of safetensors is used where it lies, like those of the Hugging Face cache. A GGUF file has to be
imported first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from fleetd.errors import ModelCorrupt
from fleetd.limits import MODEL_CONFIG_BYTES, OLLAMA_MANIFEST_BYTES, OTHER_STORE_MODELS
from fleetd.models.hub_cache import is_complete
from fleetd.models.json_files import read_json
from fleetd.models.opening import read_regular

_MODEL_LAYER = "application/vnd.ollama.image.model"
_BLOB = re.compile(r"sha256[:-]([0-9a-f]{64})")
# The longest path that a system has.
_PATH_BYTES = 4096
# Later files of a model that is spread over several, and the part of a model that reads pictures.
_NOT_A_MODEL = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$|^mmproj", re.IGNORECASE)


class FoundFile(msgspec.Struct, frozen=True):
    """A GGUF file of another program."""

    # The name that the program gives it.
    name: str
    path: Path
    size_bytes: int
    # The program's name, for people.
    program: str


def lm_studio_folders(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """The folders in which LM Studio keeps models: the one that its settings name, then its defaults."""
    home = _home(environment)
    roots = [home / ".lmstudio", home / ".cache" / "lm-studio"]
    pointer = home / ".lmstudio-home-pointer"
    try:
        roots.insert(0, Path(read_regular(pointer, _PATH_BYTES).decode().strip()))
    except (OSError, UnicodeDecodeError):
        pass  # LM Studio was never started here, or keeps models in the default place
    found: list[Path] = []
    for root in roots:
        chosen = _json(root / "settings.json").get("downloadsFolder")
        for folder in (Path(chosen) if isinstance(chosen, str) and chosen else None, root / "models"):
            if folder is not None and folder.is_absolute() and folder not in found and folder.is_dir():
                found.append(folder)
    return found


def lm_studio_models(environment: Mapping[str, str] = os.environ) -> Iterator[tuple[str, Path]]:
    """All complete folders of safetensors: hub id (PUBLISHER/MODEL) and folder of each."""
    for folder in _lm_studio_model_folders(environment):
        if is_complete(folder):
            yield f"{folder.parent.name}/{folder.name}", folder


def gguf_files(environment: Mapping[str, str] = os.environ) -> list[FoundFile]:
    """GGUF files of LM Studio and Ollama, by name; at most OTHER_STORE_MODELS."""
    found = [*_of_lm_studio(environment), *_of_ollama(environment)]
    return sorted(found[:OTHER_STORE_MODELS], key=lambda file: (file.program, file.name.lower()))


def _lm_studio_model_folders(environment: Mapping[str, str]) -> Iterator[Path]:
    count = 0
    for root in lm_studio_folders(environment):
        for publisher in _entries(root):
            for folder in _entries(publisher):
                count += 1
                if count > OTHER_STORE_MODELS:
                    return
                yield folder


def _of_lm_studio(environment: Mapping[str, str]) -> Iterator[FoundFile]:
    for folder in _lm_studio_model_folders(environment):
        for file in _entries(folder):
            if file.suffix.lower() != ".gguf" or _NOT_A_MODEL.search(file.name):
                continue
            if (size := _size(file)) is not None:
                yield FoundFile(file.name, file, size, "LM Studio")


def _of_ollama(environment: Mapping[str, str]) -> Iterator[FoundFile]:
    for models in _ollama_folders(environment):
        try:
            tags = list(islice((models / "manifests").glob("*/*/*/*"), OTHER_STORE_MODELS))
        except OSError:
            continue
        for tag in tags:
            blob = _blob(tag, models / "blobs")
            if blob is not None and (size := _size(blob)) is not None:
                *_, namespace, model, _ = tag.parts
                owner = "" if namespace == "library" else f"{namespace}/"
                yield FoundFile(f"{owner}{model}:{tag.name}", blob, size, "Ollama")


def _ollama_folders(environment: Mapping[str, str]) -> list[Path]:
    if chosen := environment.get("OLLAMA_MODELS"):
        return [Path(chosen).expanduser()]
    # The second folder belongs to the service that Ollama's installer makes on Linux.
    return [_home(environment) / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models")]


def _blob(manifest: Path, blobs: Path) -> Path | None:
    layers = _json(manifest, OLLAMA_MANIFEST_BYTES).get("layers")
    for layer in layers if isinstance(layers, list) else []:
        if isinstance(layer, dict) and layer.get("mediaType") == _MODEL_LAYER:
            digest = layer.get("digest")
            # The manifest's text becomes part of a path: only a plain digest may.
            if isinstance(digest, str) and (match := _BLOB.fullmatch(digest)):
                return blobs / f"sha256-{match[1]}"
    return None


def _home(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("HOME") or Path.home())


def _json(file: Path, limit: int = MODEL_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in a file, {} if the file cannot be read: it belongs to another program."""
    try:
        return read_json(file, limit)
    except ModelCorrupt:
        return {}


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError:
        return []


def _size(file: Path) -> int | None:
    """The file's size in bytes; None if it is not there or may not be read."""
    try:
        return file.stat().st_size if os.access(file, os.R_OK) else None
    except OSError:
        return None
