"""The parts of other machines' models on this machine: where they lie, what there is of each, and what goes.

MODELS/.parts/DIGEST-SOURCE/    config, table of tensors, files of layers (``layer_files``), a manifest

A part is never taken for a model: nothing lists or resolves such a folder. The hashes of a model are those of
whole files, so they say nothing of a part; a part is believed only for work of the machine that it came from.
One that came from the hub (``hub_parts``) is good for all.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fleetd import limits
from fleetd.errors import ModelCorrupt
from fleetd.models import install, manifest
from fleetd.models.folder import ModelFolder, read_folder
from fleetd.models.layer_files import PARTS, layer_of, name_of, table
from fleetd.storage.durable import sync_file, sync_folder

#: The source of a part that came from the hub.
HUB = "hub"
_DIGEST_CHARS, _SOURCE_CHARS = 32, 16
_LAYER_BEGINS = name_of(0).partition("0")[0]


class Part(msgspec.Struct, frozen=True):
    """A part on the disk."""

    path: Path
    # Its files by name; none that has not arrived whole.
    known: manifest.Manifest

    @property
    def is_own(self) -> bool:
        """True if this machine answers with it, together with others."""
        return self.known.source == "part"

    def has_layers(self, first: int, last: int) -> bool:
        """True if the files of layers [first, last) are there, by their names."""
        return all(name_of(layer) in self.known.files for layer in range(first, last))


def place(models_dir: Path, digest: str, source: str) -> Path:
    """The folder of a part. ``source``: the machine that it is of, by its node id."""
    return models_dir / PARTS / f"{digest[:_DIGEST_CHARS]}-{source[:_SOURCE_CHARS].lower()}"


def is_from_hub(path: Path) -> bool:
    """True for the folder of a part that came from the hub."""
    return path.parent.name == PARTS and path.name.endswith(f"-{HUB}")


def find(path: Path) -> Part | None:
    """The part in a folder; None if there is none that can be used."""
    try:
        known = manifest.load(path / manifest.FILE_NAME)
    except ModelCorrupt:
        known = None
    return Part(path, known) if known is not None else None


class HeldPart(msgspec.Struct, frozen=True):
    """What there is of a model whose layers are here in part."""

    name: str
    layers: int
    of_layers: int
    disk_bytes: int
    # Of the whole model.
    weights_bytes: int
    own: bool
    from_hub: bool


def held(path: Path) -> HeldPart | None:
    """What a part's folder has; None if it has no layer. Reads small files."""
    part = find(path)
    if part is None or not (layers := layers_in(path)):
        return None
    try:
        tensors = table(path)
    except ModelCorrupt:
        return None
    return HeldPart(
        part.known.name,
        layers,
        len({layer_of(name) for name in tensors} - {None}),
        sum(record.size_bytes for record in part.known.files.values()),
        sum(tensor.size_bytes for tensor in tensors.values()),
        part.is_own,
        is_from_hub(path),
    )


def layers_in(path: Path) -> int:
    """How many layers a part has."""
    part = find(path)
    names = part.known.files if part is not None else {}
    return sum(name.startswith(_LAYER_BEGINS) for name in names)


def is_own(path: Path) -> bool:
    """True for the folder of a part with which this machine answers."""
    part = find(path)
    return part is not None and part.is_own


def folder(path: Path, name: str) -> ModelFolder:
    """A part as the folder that a worker loads layers from. Raises ModelCorrupt."""
    os.utime(path)
    return read_folder(path, name=name, source="folder", revision=None)


def opened(path: Path, fresh: manifest.Manifest) -> Part:
    """The part, or an empty one with the manifest ``fresh``. What has not arrived whole is gone."""
    part = find(path) or Part(path, msgspec.structs.replace(fresh, files={}))
    path.mkdir(parents=True, exist_ok=True)
    _drop_unfinished(part)
    files = {name: record for name, record in part.known.files.items() if (path / name).is_file()}
    return Part(path, msgspec.structs.replace(part.known, files=files))


def drop_unfinished(path: Path) -> None:
    """Delete what has not arrived whole of a part. The rest may be in use, and was fetched for long."""
    if (part := find(path)) is not None:
        _drop_unfinished(part)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _drop_unfinished(part: Part) -> None:
    for file in part.path.iterdir():
        record = part.known.files.get(file.name)
        if file.name != manifest.FILE_NAME and (record is None or not record.matches(file.stat())):
            file.unlink()


def with_file(part: Part, arrived: Path, name: str, digest: str) -> Part:
    """The part with a file that has arrived under another name. ``digest``: its BLAKE3, in hex."""
    sync_file(arrived)
    stat = arrived.stat()
    record = manifest.FileRecord(stat.st_size, stat.st_mtime_ns, stat.st_ino, digest)
    known = msgspec.structs.replace(part.known, files={**part.known.files, name: record})
    arrived.rename(part.path / name)
    return saved(part, known)


def saved(part: Part, known: manifest.Manifest) -> Part:
    """The part with another manifest, on the disk."""
    manifest.save(known, part.path / manifest.FILE_NAME)
    sync_folder(part.path)
    return Part(part.path, known)


def free_bytes(models_dir: Path) -> int:
    """Bytes of the disk that parts for others may take, those included that are there; 0 if there is no such
    disk."""
    existing = next((place for place in (models_dir, *models_dir.parents) if place.exists()), models_dir)
    try:
        others = [path for path in all_of(models_dir) if not is_own(path)]
        taken = sum(file.stat().st_size for path in others for file in path.iterdir())
        return max(0, shutil.disk_usage(existing).free + taken - limits.DISK_RESERVE_BYTES)
    except OSError:
        return 0


def make_room(models_dir: Path, besides: Path, need_bytes: int) -> None:
    """Delete parts that are here for others, those first that were not used for longest, until so many bytes
    are free."""
    others = [path for path in all_of(models_dir) if path != besides and not is_own(path)]
    for path in sorted(others, key=lambda path: path.stat().st_mtime):
        if shutil.disk_usage(models_dir).free >= need_bytes + limits.DISK_RESERVE_BYTES:
            return
        with install.free_to_change(models_dir, path.name) as free:
            if free:
                shutil.rmtree(path, ignore_errors=True)


def remove(models_dir: Path, name: str) -> bool:
    """Delete the parts of the model of this name. False if there are none."""
    found = [path for path in all_of(models_dir) if (part := find(path)) and part.known.name == name]
    for path in found:
        shutil.rmtree(path)
    return bool(found)


def remove_whole(models_dir: Path, digests: frozenset[str]) -> None:
    """Delete the parts of models that are here as a whole, by their digests."""
    whole = {digest[:_DIGEST_CHARS] for digest in digests if digest}
    for path in all_of(models_dir):
        if path.name.split("-")[0] in whole:
            shutil.rmtree(path, ignore_errors=True)


def all_of(models_dir: Path) -> Iterator[Path]:
    """The folders of all parts."""
    return (path for path in sorted((models_dir / PARTS).glob("*-*")) if path.is_dir())
