"""A model that is here in part, as the hub's outline leaves it, made from a folder that has all of it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from fleetd.models import hub_parts, layer_files, manifest, parts
from fleetd.models.folder import ModelFolder
from fleetd.models.hub_parts import HubCommit, HubListing, HubPart, RemoteFile, RemoteTensor
from fleetd.models.layer_files import TensorShape
from fleetd.models.safetensors_header import read_header

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def outline(whole: Path, models_dir: Path, hub_id: str = "org/own", layers: range = range(0)) -> ModelFolder:
    """The part of a model that this machine answers with. ``layers``: those whose files are there."""
    weights = whole / "model.safetensors"
    listing = HubListing(
        HubCommit(hub_id, COMMIT),
        [RemoteFile(weights.name, weights.stat().st_size, "0" * 64, None, weights.name)],
    )
    tensors = {
        name: RemoteTensor(0, info.begin, info.end, TensorShape(info.dtype, info.shape))
        for name, info in sorted(read_header(weights).items())
    }
    path = hub_parts.place(models_dir, listing.digest)
    part = parts.opened(path, manifest.Manifest(hub_id, "part", {}, revision=COMMIT))
    contents = layer_files.files_of(whole).files
    buffer = memoryview(bytearray(1 << 16))
    wanted = [layer_files.TABLE_NAME, *map(layer_files.name_of, layers)]
    written = {name: b"".join(bytes(each) for each in contents[name].pieces(0, buffer)) for name in wanted}
    written |= {file.name: file.read_bytes() for file in whole.glob("*.json") if manifest.is_part(file.name)}
    written[hub_parts.FILE_NAME] = msgspec.json.encode(HubPart(listing, tensors))
    for name, raw in written.items():
        arrived = path / f"{name}.part"
        arrived.write_bytes(raw)
        part = parts.with_file(part, arrived, name, manifest.hash_file(arrived))
    found = hub_parts.own(models_dir, hub_id)
    assert found is not None
    return found
