"""Bring some layers of a model from the hub: the headers of its files, then their tensors' bytes alone.

outline     config and tokenizer, each checked by its hash; dtype, shape and place of all tensors
layers      a file each (``layer_files``), put together from ranges of the hub's files

The hashes of weights are those of whole files and say nothing of a range. What guards a range is TLS, and the
commit and the hash that the hub names with it; from then on the hash of each layer's file as it arrived.
"""

from __future__ import annotations

import contextlib
import fnmatch
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from fleetd import limits
from fleetd.errors import DownloadFailed, ModelCorrupt, ModelRefused, ModelUnsupported
from fleetd.models import hub_parts, install, layer_files, manifest, parts
from fleetd.models.hub_parts import HubCommit, HubListing, HubPart, HubPartOrder, RemoteFile, RemoteTensor
from fleetd.models.layer_files import TensorShape
from fleetd.models.parts import Part
from fleetd.models.pull import hub, ranges
from fleetd.models.pull.ranges import WantedBytes
from fleetd.models.pull_lines import PullProgress, Report
from fleetd.models.safetensors_header import header_length, parse, read_header
from fleetd.models.verify import check_configs
from fleetd.models.weights import WEIGHTS_PATTERN

# So much of a file comes with the first request for its header.
_HEAD_BYTES = limits.MIB
_RESUMES = "Load the model again; the layers that have arrived are kept."


def pull_part(order: HubPartOrder, models_dir: Path, report: Report) -> Path:
    """Bring what is not here yet of a model's outline and of the layers that are ordered. Returns the folder.

    Raises:
        ModelNotFound, ModelUnsupported, DownloadFailed, DiskFull, ModelCorrupt, ModelRefused
    """
    listing = _known(order, models_dir)
    if listing is None:
        report(PullProgress(file="", done_bytes=0, total_bytes=0, stage="connecting"))
        listing = _listed(order, models_dir)
    if order.digest and listing.digest != order.digest:
        raise ModelCorrupt(
            f"The hub lists other files for {order.hub_id} than the machine that asks knows.",
            hint="Load the model again there: it asks the hub anew.",
        )
    place = hub_parts.place(models_dir, listing.digest)
    models_dir.mkdir(parents=True, exist_ok=True)
    with (
        install.locked(models_dir, place.name, report),
        install.clean_on_full_disk(models_dir, place, parts.drop_unfinished),
        hub.typed_failures(order.hub_id, _RESUMES),
    ):
        part, found = _outlined(listing, place, order, report)
        wanted = hub_parts.file_names(found, order.first, order.last, own=order.own and order.last > 0)
        missing = [name for name in wanted if name not in part.known.files]
        files = _layer_files(found, missing)
        need = sum(file.size_bytes for file in files.values())
        parts.make_room(models_dir, place, need)
        install.require_space(place, need)
        _fetch(part, found.listing, files, need, report)
        with _cleared_if_unsound(place):
            layer_files.absent(place)
    return place


@contextlib.contextmanager
def _cleared_if_unsound(place: Path) -> Iterator[None]:
    """Delete the part if its files turn out to be none of a model. A break of the network is no reason."""
    try:
        yield
    except (ModelCorrupt, ModelRefused):
        shutil.rmtree(place, ignore_errors=True)
        raise


# ---- The outline -----------------------------------------------------------------------------------------


def _known(order: HubPartOrder, models_dir: Path) -> HubListing | None:
    """The listing of the part that is here; None if there is none, or the newest commit is wanted."""
    for _, part in hub_parts.all_of(models_dir):
        at, digest = part.listing.at, part.listing.digest
        if at.hub_id == order.hub_id and (digest == order.digest or at.commit == order.commit):
            return part.listing
    return None


def _listed(order: HubPartOrder, models_dir: Path) -> HubListing:
    """What the hub lists now; of an own model that is here in part, without a hub, what it listed then."""
    try:
        with hub.typed_failures(order.hub_id, _RESUMES):
            commit, files = hub.listing(order.hub_id, order.commit)
    except DownloadFailed:
        for path, part in hub_parts.all_of(models_dir):
            if order.commit is None and part.listing.at.hub_id == order.hub_id and parts.is_own(path):
                return part.listing
        raise
    if not any(fnmatch.fnmatchcase(file.name, WEIGHTS_PATTERN) for file in files):
        raise ModelUnsupported(
            f"{order.hub_id} has its weights as GGUF, which is imported whole.",
            hint=f"Get all of it: fleetctl models pull {order.hub_id}",
        )
    kept = [
        file for file in files if manifest.is_part(file.name) and not layer_files.is_layer_file(file.name)
    ]
    return HubListing(HubCommit(order.hub_id, commit), kept)


def _outlined(listing: HubListing, place: Path, order: HubPartOrder, report: Report) -> tuple[Part, HubPart]:
    """The part with all that is no weights."""
    at = listing.at
    own = order.own or parts.is_own(place)
    fresh = manifest.Manifest(at.name, "part" if own else "hub", {}, revision=at.commit)
    part = parts.opened(place, fresh)
    if part.known.source != fresh.source:
        part = parts.saved(part, msgspec.structs.replace(part.known, source=fresh.source))
    small = [file for file in listing.files if hub_parts.is_outline_file(file.name)]
    with _cleared_if_unsound(place):
        for file in small:
            if file.name not in part.known.files:
                hub.fetch(at.hub_id, at.commit, file, place, _quiet(file, report))
                part = parts.with_file(
                    part, place / file.name, file.name, manifest.hash_file(place / file.name)
                )
        check_configs(place)
        if hub_parts.FILE_NAME not in part.known.files or layer_files.TABLE_NAME not in part.known.files:
            tensors = _tensors(listing, report)
            shapes = {name: tensor.shape for name, tensor in tensors.items()}
            part = _with_json(part, layer_files.TABLE_NAME, shapes)
            part = _with_json(part, hub_parts.FILE_NAME, HubPart(listing, tensors))
        found = hub_parts.read(place)
        layers = {layer_files.layer_of(name) for name in found.tensors} - {None}
        layer_files.check_numbers(Path(at.hub_id), {layer: None for layer in layers if layer is not None})
    return part, found


def _quiet(file: RemoteFile, report: Report) -> Any:
    def advance(done: int) -> None:
        report(
            PullProgress(file=file.name, done_bytes=done, total_bytes=file.size_bytes, stage="downloading")
        )

    return advance


def _with_json(part: Part, name: str, content: Any) -> Part:
    arrived = part.path / f"{name}{install.PART}"
    arrived.write_bytes(msgspec.json.encode(content))
    return parts.with_file(part, arrived, name, manifest.hash_file(arrived))


def _tensors(listing: HubListing, report: Report) -> dict[str, RemoteTensor]:
    """Where all tensors are, by the headers of the hub's files. Raises ModelCorrupt."""
    found: dict[str, RemoteTensor] = {}
    weights = [
        (number, file)
        for number, file in enumerate(listing.files)
        if fnmatch.fnmatchcase(file.name, WEIGHTS_PATTERN)
    ]
    for count, (number, file) in enumerate(weights):
        report(PullProgress(file=file.name, done_bytes=count, total_bytes=len(weights), stage="looking up"))
        raw = b"".join(ranges.read(listing.at, file, 0, min(_HEAD_BYTES, file.size_bytes)))
        behind = 8 + header_length(raw[:8], file.size_bytes, file.path)
        if behind > len(raw):
            raw += b"".join(ranges.read(listing.at, file, len(raw), behind))
        for name, info in parse(raw[8:behind], file.size_bytes, file.path).items():
            if name in found:
                raise ModelCorrupt(f"{name!r} is in two files of {listing.at.hub_id}.")
            shape = TensorShape(info.dtype, info.shape)
            found[name] = RemoteTensor(number, info.begin, info.end, shape)
    return dict(sorted(found.items()))


# ---- Layers ----------------------------------------------------------------------------------------------


class _LayerFile(msgspec.Struct, frozen=True):
    """A file of a layer as it is put together: ``head``, then bytes of the hub's files, by their number."""

    head: bytes
    wanted: Mapping[int, list[WantedBytes]]

    @property
    def size_bytes(self) -> int:
        return len(self.head) + sum(each.end - each.begin for many in self.wanted.values() for each in many)


def _layer_files(found: HubPart, names: list[str]) -> dict[str, _LayerFile]:
    """How the files of these names are put together, as ``layer_files`` has them."""
    contents = hub_parts.layer_contents(found, names)
    if empty := [name for name, tensors in contents.items() if not tensors]:
        raise ModelUnsupported(f"The model has no {empty[0]}: it has {found.layers} layers.")
    return {name: _layer_file(tensors) for name, tensors in contents.items()}


def _layer_file(tensors: Mapping[str, RemoteTensor]) -> _LayerFile:
    head, wanted = hub_parts.head_of(tensors), dict[int, list[WantedBytes]]()
    at = len(head)
    for tensor in tensors.values():
        wanted.setdefault(tensor.file, []).append(WantedBytes(tensor.begin, tensor.end, at))
        at += tensor.end - tensor.begin
    return _LayerFile(head, wanted)


def _fetch(
    part: Part, listing: HubListing, files: Mapping[str, _LayerFile], total: int, report: Report
) -> None:
    done = 0
    for name, content in files.items():

        def advance(count: int, name: str = name) -> None:
            nonlocal done
            done += count
            report(PullProgress(file=name, done_bytes=done, total_bytes=total, stage="downloading"))

        arrived = part.path / f"{name}{install.PART}"
        with arrived.open("wb") as out:
            out.write(content.head)
            advance(len(content.head))
            for number, wanted in content.wanted.items():
                for each in ranges.coalesced(wanted):
                    ranges.write(listing.at, listing.files[number], each, out, advance)
        read_header(arrived)
        part = parts.with_file(part, arrived, name, manifest.hash_file(arrived))
