"""Parts of models that came from the hub, without the whole model: what there is of each, and where.

MODELS/.parts/DIGEST-hub/    as ``parts`` has them, and ``fleetd-hub.json``: where the hub has the tensors

The digest is that of what the hub lists: repository, commit, and name, size and hash of each file. Whole
files have another one, by their bytes. All machines ask the hub for the same commit: none believes another.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated

import blake3
import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.errors import ModelCorrupt
from fleetd.models import catalog, digest, layer_files, names, parts
from fleetd.models.folder import ModelFolder, read_config
from fleetd.models.json_files import PULL_AGAIN
from fleetd.models.layer_files import ENDS_NAME, TensorShape, name_of
from fleetd.models.opening import read_regular
from fleetd.models.vector_files import purpose_of
from fleetd.text.bounded import Count, Natural
from fleetd.text.decoding import from_json

#: Where the tensors of a part are on the hub.
FILE_NAME = "fleetd-hub.json"
_VERSION = b"fleetd hub listing 1\n"
_COMMIT = r"\A[0-9a-f]{40}\Z"


class RemoteFile(msgspec.Struct, frozen=True):
    """A file of a repository on the hub."""

    name: str
    size_bytes: Count
    # The hash of its content, in hex, if it lies in large-file storage.
    sha256: str | None
    # The hash that git gives the file, in hex, for other files.
    git_sha1: str | None
    # Its path in the repository, which is longer for a step of a model for vectors.
    path: str


class HubCommit(msgspec.Struct, frozen=True):
    """A state of a repository on the hub."""

    hub_id: Annotated[str, Meta(min_length=3, max_length=limits.MODEL_NAME_CHARS)]
    commit: Annotated[str, Meta(pattern=_COMMIT)]

    @property
    def name(self) -> str:
        """The model's name on this machine."""
        entry = catalog.find(self.hub_id)
        return entry.name if entry is not None else self.hub_id


class HubListing(msgspec.Struct, frozen=True):
    """The files of a model at a commit, as the hub lists them."""

    at: HubCommit
    files: list[RemoteFile]

    @property
    def digest(self) -> str:
        """Identifies the model for machines that have it from the hub in part; BLAKE3 in hex."""
        listed = sorted((file.path, file.size_bytes, file.sha256, file.git_sha1) for file in self.files)
        raw = msgspec.json.encode([self.at.hub_id, self.at.commit, listed])
        return str(blake3.blake3(_VERSION + raw).hexdigest())


class RemoteTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of a file on the hub."""

    # The number of its file in the listing.
    file: Natural
    # The range of its bytes, from the start of the file.
    begin: Count
    end: Count
    shape: TensorShape


class HubPart(msgspec.Struct, frozen=True):
    """The content of ``FILE_NAME``."""

    listing: HubListing
    # All of the model, by name.
    tensors: Mapping[str, RemoteTensor]

    @property
    def layers(self) -> int:
        """How many layers the model has."""
        return len({layer_files.layer_of(name) for name in self.tensors} - {None})


class HubPartOrder(msgspec.Struct, frozen=True):
    """What is to be brought from the hub."""

    hub_id: str
    # None: the one that ``main`` names now, or that is here if the hub cannot be reached.
    commit: str | None = None
    # That the hub's listing must have; "": any.
    digest: str = ""
    # Layers [first, last); none if both are 0.
    first: int = 0
    last: int = 0
    # For this machine's own answers: with what belongs to no layer.
    own: bool = False


def place(models_dir: Path, listed: str) -> Path:
    """The folder of a part, by the digest of what the hub lists."""
    return parts.place(models_dir, listed, parts.HUB)


def read(path: Path) -> HubPart:
    """Where the tensors of a part are on the hub. Raises ModelCorrupt."""
    file = path / FILE_NAME
    try:
        found = from_json(read_regular(file, limits.MODEL_JSON_BYTES), HubPart)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelCorrupt(f"{file} cannot be read: {error}.", hint=PULL_AGAIN) from None
    if place(path.parent.parent, found.listing.digest) != path:
        raise ModelCorrupt(f"{file} is of another model.", hint=PULL_AGAIN)
    return found


def digest_of(path: Path, models_dir: Path | None) -> str:
    """The digest of the model of which a folder is a part from the hub, "" of any other folder. All parts of
    a commit have the same. ``models_dir``: only parts in it are believed; None believes all."""
    if not parts.is_from_hub(path) or models_dir not in (None, path.parent.parent):
        return ""
    try:
        return read(path).listing.digest
    except ModelCorrupt:
        return ""


def all_of(models_dir: Path) -> Iterator[tuple[Path, HubPart]]:
    """The parts that came from the hub, whose outline is here."""
    for path in parts.all_of(models_dir):
        known = parts.find(path) if parts.is_from_hub(path) else None
        if known is not None and FILE_NAME in known.known.files:
            try:
                yield path, read(path)
            except ModelCorrupt:
                continue


def own(models_dir: Path, hub_id: str, commit: str | None = None) -> ModelFolder | None:
    """The part of a model that this machine answers with, together with others; the one that was used last.

    Args:
        commit: the only one that counts; None: any.
    """
    found = [
        (path.stat().st_mtime, path, part)
        for path, part in all_of(models_dir)
        if part.listing.at.hub_id == hub_id and parts.is_own(path)
    ]
    for _, path, part in sorted(found, key=lambda each: each[0], reverse=True):
        if commit in (None, part.listing.at.commit):
            return folder(path, part)
    return None


def folder(path: Path, part: HubPart) -> ModelFolder:
    """A part as a model's folder, with the size of the whole model. Raises ModelCorrupt."""
    config, at = read_config(path), part.listing.at
    return ModelFolder(
        name=names.check(at.name),
        path=path,
        source="part",
        revision=at.commit,
        config=config,
        weights_bytes=sum(tensor.end - tensor.begin for tensor in part.tensors.values()),
        created_s=(path / FILE_NAME).stat().st_mtime,
        purpose=purpose_of(path, config, at.name),
    )


def file_names(part: HubPart, first: int, last: int, *, own: bool) -> list[str]:
    """The files of layers [first, last), and of what belongs to no layer, if it is wanted or all need it."""
    layers = [name_of(layer) for layer in range(first, last)]
    ends = [name for name in part.tensors if layer_files.layer_of(name) is None]
    if own or (layers and layer_files.needed_everywhere(ends)):
        return [ENDS_NAME, *layers]
    return layers


def file_sizes(part: HubPart) -> dict[str, int]:
    """Bytes of each layer's file, and of that of what belongs to no layer, by name."""
    contents = layer_contents(part, [ENDS_NAME, *(name_of(layer) for layer in range(part.layers))])
    return {
        name: len(head_of(tensors)) + sum(each.end - each.begin for each in tensors.values())
        for name, tensors in contents.items()
    }


def layer_contents(part: HubPart, files: Iterable[str]) -> dict[str, dict[str, RemoteTensor]]:
    """The tensors of layers' files, by the files' names; sorted by name, as they lie in them."""
    found: dict[str, dict[str, RemoteTensor]] = {name: {} for name in files}
    for name, tensor in sorted(part.tensors.items()):
        layer = layer_files.layer_of(name)
        file = ENDS_NAME if layer is None else name_of(layer)
        if file in found:
            found[file][name] = tensor
    return found


def head_of(tensors: Mapping[str, RemoteTensor]) -> bytes:
    """The head of a layer's file, as ``layer_files`` writes it."""
    entries, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.end - tensor.begin
        entries[name] = {
            "dtype": tensor.shape.dtype,
            "shape": list(tensor.shape.shape),
            "data_offsets": [begin, end],
        }
    return layer_files.header_bytes(entries)


def serves(path: Path, first: int, last: int) -> bool:
    """True if a part has all that a machine needs to serve layers [first, last). Reads small files."""
    try:
        part = read(path)
    except ModelCorrupt:
        return False
    known = parts.find(path)
    wanted = {layer_files.TABLE_NAME, *file_names(part, first, last, own=False)}
    return known is not None and wanted <= known.known.files.keys()


def is_outline_file(name: str) -> bool:
    """True for files that say what a model is, and are no weights."""
    return name in digest.CONFIGS or not name.endswith((".safetensors", ".index.json"))


def commit_of(revision: str | None) -> str | None:
    """A revision if it is a commit; None for a branch or none."""
    return revision if revision is not None and re.match(_COMMIT, revision) else None
