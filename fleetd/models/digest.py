"""What identifies a model on the wire: a digest of its weights, configuration and tokenizer.

Two folders with the same files have the same digest, wherever they lie, whatever they are called and
whenever they were written. Hashes are remembered by (size, mtime, inode) in a record beside fleetd's
models.
"""

from __future__ import annotations

from pathlib import Path

import blake3
import msgspec

from fleetd.errors import ModelCorrupt
from fleetd.models import manifest
from fleetd.models.folder import ModelFolder
from fleetd.models.weights import weight_files

_CONFIGS = frozenset({"config.json", "generation_config.json"})
_VERSION = b"fleetd model 1\n"


class ModelDigest(msgspec.Struct, frozen=True):
    """``hex`` covers the three parts, which are there to say what differs."""

    hex: str
    weights: str
    config: str
    tokenizer: str

    def __str__(self) -> str:
        return self.hex


def of_records(records: dict[str, manifest.FileRecord], weights: frozenset[str]) -> ModelDigest:
    """The digest of files known by name, size and hash. Pure."""
    parts = {
        "weights": {name: record for name, record in records.items() if name in weights},
        "config": {name: record for name, record in records.items() if name in _CONFIGS},
        "tokenizer": {
            name: record
            for name, record in records.items()
            if name not in weights
            and name not in _CONFIGS
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
    """The digest of a model folder if that takes no hashing, "" otherwise; ``record`` as for ``records``."""
    files = manifest.part_files(path)
    for file in (record, own_manifest(path, record)):
        try:
            known = manifest.load(file) if file is not None else None
        except ModelCorrupt:
            continue
        found = {f.name: known.files[f.name] for f in files if f.name in known.files} if known else {}
        if found and all(f.name in found and found[f.name].matches(f.stat()) for f in files):
            return of_records(found, frozenset(weight.name for weight in weight_files(path))).hex
    return ""


def own_manifest(path: Path, record: Path | None) -> Path | None:
    """The manifest whose hashes stand for files that look unchanged: only that of an installed folder.

    In a folder elsewhere its owner may write that these files are another model's. ``record``: of the folder,
    beside what is installed; None if there is no such place.
    """
    return path / manifest.FILE_NAME if record is None or path.parent == record.parent.parent else None


def records(folder: ModelFolder, record: Path) -> dict[str, manifest.FileRecord]:
    """Hash what neither ``record`` (a cache, kept current) nor the folder's own manifest remembers."""
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
