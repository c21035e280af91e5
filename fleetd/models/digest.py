"""The digest that identifies a model on the wire: of its weights, configuration and tokenizer.

Two folders with the same files have the same digest, wherever they lie, whatever they are called and
whenever they were written. A record beside fleetd's models keeps each file's hash by its size, mtime and
inode.
"""

from __future__ import annotations

from pathlib import Path

import blake3
import msgspec

from fleetd.errors import ModelCorrupt
from fleetd.models import manifest
from fleetd.models.folder import ModelFolder
from fleetd.models.weights import HEAD_NAME, weight_files

#: The files that say how the weights are computed with.
CONFIGS = frozenset({"config.json", "generation_config.json"})
_VERSION = b"fleetd model 1\n"


class ModelDigest(msgspec.Struct, frozen=True):
    """A model's identity; all fields are BLAKE3 in hex."""

    # Of the three parts together: this identifies the model.
    hex: str
    # Of the weights, the configuration and all other files, each alone: they tell in what two models differ.
    weights: str
    config: str
    tokenizer: str

    def __str__(self) -> str:
        return self.hex


def of_records(records: dict[str, manifest.FileRecord], weights: frozenset[str]) -> ModelDigest:
    """The digest of files by their records. ``weights``: the names of those that are weights. Pure."""
    parts = {
        "weights": {name: record for name, record in records.items() if name in weights},
        "config": {name: record for name, record in records.items() if name in CONFIGS},
        "tokenizer": {
            name: record
            for name, record in records.items()
            if name not in weights
            and name not in CONFIGS
            and not name.endswith((".safetensors", ".index.json"))
        },
    }
    hashes = {
        part: _hash(
            msgspec.json.encode(
                [(name, item.size_bytes, item.blake3) for name, item in sorted(found.items())]
            )
        )
        for part, found in parts.items()
    }
    return ModelDigest(hex=_hash(msgspec.json.encode(hashes, order="sorted")), **hashes)


def digest(folder: ModelFolder, record: Path) -> ModelDigest:
    """The digest of a model folder; arguments as for ``records``."""
    return of_records(records(folder, record), frozenset(file.name for file in weight_files(folder.path)))


def remembered(path: Path, record: Path | None) -> str:
    """The digest of a model folder, or "" if a file had to be hashed; ``record`` as for ``records``."""
    found = _remembered(path, record)
    return "" if found is None else found.hex


def remembered_weights(path: Path, record: Path | None) -> str:
    """The digest of a folder's weights alone, or "" if a file had to be hashed."""
    found = _remembered(path, record)
    return "" if found is None else found.weights


def _remembered(path: Path, record: Path | None) -> ModelDigest | None:
    # A head beside the weights may come and go: it decides no number of the model.
    files = [file for file in manifest.part_files(path) if file.name != HEAD_NAME]
    for file in (record, own_manifest(path, record)):
        try:
            known = manifest.load(file) if file is not None else None
        except ModelCorrupt:
            continue
        found = {f.name: known.files[f.name] for f in files if f.name in known.files} if known else {}
        if found and all(f.name in found and found[f.name].matches(f.stat()) for f in files):
            return of_records(found, frozenset(weight.name for weight in weight_files(path)))
    return None


def own_manifest(path: Path, record: Path | None) -> Path | None:
    """The folder's own manifest if its hashes may be believed; None for a folder that fleetd did not install.

    The owner of a folder elsewhere could write the hashes of another model into it. ``record``: the folder's
    record in the models folder; None if there is no models folder.
    """
    return path / manifest.FILE_NAME if record is None or path.parent == record.parent.parent else None


def records(folder: ModelFolder, record: Path) -> dict[str, manifest.FileRecord]:
    """Records of the folder's files, by name. Hashes a file that neither ``record`` nor the folder's own
    manifest knows, and brings ``record``, a cache, up to date. Blocks."""
    try:
        known = manifest.load(record)
    except ModelCorrupt:
        known = None
    own = own_manifest(folder.path, record)
    known = known or (manifest.load(own) if own is not None else None)
    files = manifest.record_files(manifest.part_files(folder.path), known)
    if known is None or files != known.files:
        fresh = manifest.Manifest(folder.name, folder.source, files, revision=folder.revision)
        manifest.save(fresh, record)
    return files


def _hash(raw: bytes) -> str:
    return str(blake3.blake3(_VERSION + raw).hexdigest())
