"""The process that receives a part of a model: ``python -m fleetd.models.copy.receive_part``.

The daemon sends a ``PartOrder``. The process answers with a line that names the missing files, gets a
connected socket and the stream's key, and puts file by file into the part's folder. What has arrived whole
stays, whatever happens then.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import blake3

from fleetd import limits
from fleetd.errors import ModelCorrupt, PeerLost, ProtocolError
from fleetd.models import install, layer_files, manifest, names, parts
from fleetd.models.copy import child_process, messages
from fleetd.models.copy.child_process import DaemonLines
from fleetd.models.copy.messages import CopyNeed, PartOrder
from fleetd.models.copy.receive import Connect, connecting
from fleetd.models.parts import Part
from fleetd.models.pull_lines import PullProgress, Report
from fleetd.models.reporter import Reporter
from fleetd.models.safetensors_header import read_header
from fleetd.models.verify import check_configs
from fleetd.sealed.stream import SealedReceiver
from fleetd.text.decoding import from_msgpack


def receive_part(order: PartOrder, models_dir: Path, connect: Connect, report: Report) -> None:
    """Bring the files of some layers that are not here yet.

    Raises:
        ModelRefused, ModelCorrupt: the offer is not of the digest, or the files are no sound part of a model.
        PeerLost, SealBroken: the stream broke off.
        DiskFull: what has arrived whole stays.
    """
    messages.check_part(order.offer, order.digest)
    place = parts.place(models_dir, order.digest, order.source)
    with (
        install.locked(models_dir, place.name, report),
        install.clean_on_full_disk(models_dir, place, parts.drop_unfinished),
        install.cleared_if_unsound(place),
    ):
        fresh = manifest.Manifest(names.check(order.name), order.offer.whole.source, {})
        part = parts.opened(place, fresh)
        sizes = {name: size for name, size in order.sizes().items() if name not in part.known.files}
        if sizes:
            parts.make_room(models_dir, place, sum(sizes.values()))
            install.require_space(place, sum(sizes.values()))
            _fetch(part, sizes, order, connect, report)


def _fetch(part: Part, sizes: dict[str, int], order: PartOrder, connect: Connect, report: Report) -> None:
    total, done = sum(sizes.values()), 0

    def advance(name: str, count: int) -> None:
        nonlocal done
        done += count
        report(PullProgress(file=name, done_bytes=done, total_bytes=total, stage="copying"))

    report(PullProgress(file="", done_bytes=0, total_bytes=total, stage="connecting"))
    hashes = {file.name: file.blake3 for file in order.offer.whole.files}
    with connect([CopyNeed(name, 0) for name in sizes]) as stream:
        buffer = memoryview(bytearray(limits.SEALED_CHUNK_BYTES))
        for name, size in sizes.items():
            arrived = part.path / f"{name}{install.PART}"
            found = _receive_file(stream, arrived, name, size, buffer, advance)
            if found != hashes.get(name, found):
                raise ModelCorrupt(f"{name} arrived with another checksum than was offered.")
            if name.endswith(".safetensors"):
                read_header(arrived)
            part = parts.with_file(part, arrived, name, found)
            if name == layer_files.TABLE_NAME:
                # The last of the small files: a bad config ends it before the weights.
                check_configs(part.path)
        if stream.receive_into(buffer[:1]):
            raise ProtocolError("The other machine sent more than it was asked for.")
    layer_files.absent(part.path)


def _receive_file(
    stream: SealedReceiver,
    arrived: Path,
    name: str,
    size: int,
    buffer: memoryview,
    advance: Callable[[str, int], None],
) -> str:
    """Write a file as it comes. Returns its BLAKE3 in hex."""
    hasher, left = blake3.blake3(), size
    with arrived.open("wb") as out:
        while left:
            count = stream.receive_into(buffer[: min(left, len(buffer))])
            if count == 0:
                raise PeerLost(f"The other machine sent {name} without its last {left} bytes.")
            hasher.update(buffer[:count])
            out.write(buffer[:count])
            left -= count
            advance(name, count)
    return str(hasher.hexdigest())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fleetd.models.copy.receive_part")
    parser.add_argument("--models-dir", type=Path, required=True)
    options = parser.parse_args()

    def work(daemon: DaemonLines, reporter: Reporter) -> str:
        order = from_msgpack(daemon.message()[0], PartOrder)
        receive_part(order, options.models_dir, connecting(daemon, reporter), reporter)
        return order.name

    return child_process.run(work)


if __name__ == "__main__":
    sys.exit(main())
