"""The sending process of a copy: ``python -m fleetd.models.copy.send``, started by the daemon (``client``).

Its one message is a ``SendOrder``; the bytes go to the socket that comes with it. Another machine chose the
files: only data files are opened, and only in folders that may hold the model's files.
"""

from __future__ import annotations

import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from fleetd import limits
from fleetd.errors import ModelCorrupt, ModelRefused
from fleetd.models import layer_files, manifest, names, parts, verify
from fleetd.models.copy import child_process
from fleetd.models.copy.child_process import DaemonLines
from fleetd.models.copy.messages import CopyNeed, SendOrder
from fleetd.models.layer_files import FileContent, is_layer_file
from fleetd.models.pull_lines import PullProgress, Report
from fleetd.sealed.stream import SealedSender
from fleetd.text.decoding import from_msgpack


def send(order: SendOrder, sender: SealedSender, report: Report) -> None:
    """Send the rest of each file, in order, and end the stream.

    Raises:
        ModelRefused: a name is none that a model's file may have.
        ModelCorrupt: a file is not there, or is shorter than the part that the other machine has.
        PeerLost: the other machine went away, or takes no bytes.
    """
    folder = Path(order.folder)
    homes = verify.homes(folder)
    # Of a model that is here in part, the files of layers lie there.
    by_layers = not parts.is_from_hub(folder) and any(is_layer_file(need.file) for need in order.needs)
    layers = _layers(folder, homes) if by_layers else {}
    # All files are found before the first byte is sent: a wrong name must not cost a transfer.
    found = [(need, layers.get(need.file) or _find(folder, need, homes)) for need in order.needs]
    total = sum(max(0, content.size_bytes - need.offset) for need, content in found)
    buffer = memoryview(bytearray(limits.SEALED_CHUNK_BYTES))
    done = 0
    for need, content in found:
        for piece in content.pieces(need.offset, buffer):
            sender.send(piece)
            done += len(piece)
            report(PullProgress(need.file, done_bytes=done, total_bytes=total, stage="sending"))
    sender.finish()


def _layers(folder: Path, homes: list[Path]) -> Mapping[str, FileContent]:
    """The files of single layers, by name. Raises ModelRefused, ModelCorrupt, ModelUnsupported."""
    found = layer_files.files_of(folder).files
    sources = {file for content in found.values() for file, _, _ in content.ranges}
    if outside := [file for file in sources if not any(file.is_relative_to(home) for home in homes)]:
        raise ModelRefused(f"{outside[0]} is not a file in the model's folder.")
    return found


def _find(folder: Path, need: CopyNeed, homes: list[Path]) -> FileContent:
    """The file with links resolved, in its size now. Raises ModelRefused, ModelCorrupt."""
    if not names.is_file_name(need.file) or not manifest.is_part(need.file):
        raise ModelRefused(f"{need.file[:80]!r} is not the name of a model's data file.")
    try:
        file = (folder / need.file).resolve(strict=True)
        found = file.stat()
    except (OSError, RuntimeError):
        raise ModelCorrupt(f"{need.file} is not in {folder}.") from None
    if not any(file.is_relative_to(home) for home in homes) or not stat.S_ISREG(found.st_mode):
        raise ModelRefused(f"{folder / need.file} is not a file in the model's folder.")
    if need.offset > found.st_size:
        raise ModelCorrupt(
            f"{need.file} has {found.st_size} bytes; those after {need.offset} were asked for."
        )
    return FileContent(b"", ((file, 0, found.st_size),))


def _work(daemon: DaemonLines, report: Report) -> str:
    body, sock = daemon.stream()
    order = from_msgpack(body, SendOrder)
    with sock:
        send(order, SealedSender(sock, order.key, "acceptor", steady=True), report)
    return Path(order.folder).name


if __name__ == "__main__":
    sys.exit(child_process.run(_work))
