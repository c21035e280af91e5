"""The receiving process of a copy: ``python -m fleetd.models.copy.receive``, started by the daemon.

The daemon sends a ``CopyOffer``. The process answers with a line that names the missing files, gets a
connected socket and the stream's key, and installs the model. If it is interrupted, the files that have
arrived stay, and the next process for the same content goes on with them.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blake3

from fleetd import limits
from fleetd.errors import ModelCorrupt, PeerLost, ProtocolError
from fleetd.models import install, manifest, names
from fleetd.models.copy import child_process, messages
from fleetd.models.copy.child_process import DaemonLines
from fleetd.models.copy.messages import CopyLine, CopyNeed, CopyOffer, OfferedFile
from fleetd.models.folder import read_folder
from fleetd.models.pull_lines import PullProgress, Report
from fleetd.models.reporter import Reporter
from fleetd.models.verify import check_configs
from fleetd.sealed.stream import SealedReceiver
from fleetd.text.decoding import from_msgpack

Connect = Callable[[list[CopyNeed]], contextlib.AbstractContextManager[SealedReceiver]]


@dataclass(slots=True)
class _Missing:
    """A file that has not arrived whole."""

    file: OfferedFile
    # How many of its first bytes have arrived.
    have_bytes: int
    # The BLAKE3 of these bytes, which goes on.
    hasher: Any


def receive(
    offer: CopyOffer, digest: str, name: str, models_dir: Path, connect: Connect, report: Report
) -> None:
    """Install the offered files as the model ``name``, unless there is a model of this name.

    Raises:
        ModelRefused, ModelCorrupt: the offer or the files are not those of ``digest``, or no sound model.
        PeerLost, SealBroken: the stream broke off; the files that have arrived stay.
        DiskFull: nothing stays.
    """
    messages.check(offer, digest)
    folder = names.folder_name(names.check(name))
    staged = install.partial_folder(models_dir, folder)
    with install.locked(models_dir, folder, report):
        if (models_dir / folder / "config.json").is_file():  # another process brought it meanwhile
            read_folder(models_dir / folder, name=name, source=offer.source, revision=None)
            return
        with install.clean_on_full_disk(models_dir, staged):
            install.resume(staged, offer.revision or f"digest:{digest}", [file.name for file in offer.files])
            _fetch(_missing(offer, staged, report), offer, staged, connect, report)
            with install.cleared_if_unsound(staged):
                install.publish(
                    staged,
                    models_dir,
                    folder,
                    name=name,
                    source=offer.source,
                    revision=offer.revision,
                    report=report,
                )


def _missing(offer: CopyOffer, staged: Path, report: Report) -> list[_Missing]:
    """The files that have not arrived whole, small ones first: a bad config ends it before the weights."""
    here = install.staged_bytes(staged)
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        report(PullProgress(file="", done_bytes=done, total_bytes=here, stage="checking what is here"))

    found = (
        _look(file, staged, advance)
        for file in sorted(offer.files, key=lambda file: (_is_large(file), file.size_bytes, file.name))
    )
    return [missing for missing in found if missing is not None]


def _look(file: OfferedFile, staged: Path, advance: Callable[[int], None]) -> _Missing | None:
    whole, part = staged / file.name, staged / f"{file.name}{install.PART}"
    for place in (whole, part):
        if not place.is_file():
            continue
        hasher = blake3.blake3()
        size = place.stat().st_size
        if size <= file.size_bytes:
            manifest.hash_into(hasher, place, advance)
        if size == file.size_bytes and hasher.hexdigest() == file.blake3:
            place.rename(whole)
            return None
        if place == part and size < file.size_bytes:
            return _Missing(file, size, hasher)
        place.unlink()
    return _Missing(file, 0, blake3.blake3())


def _fetch(missing: list[_Missing], offer: CopyOffer, staged: Path, connect: Connect, report: Report) -> None:
    if not missing:
        return
    total = sum(file.size_bytes for file in offer.files)
    lacking = sum(item.file.size_bytes - item.have_bytes for item in missing)
    install.require_space(staged, lacking)
    done = total - lacking

    def advance(file: str, count: int) -> None:
        nonlocal done
        done += count
        report(PullProgress(file=file, done_bytes=done, total_bytes=total, stage="copying"))

    report(PullProgress(file="", done_bytes=done, total_bytes=total, stage="connecting"))
    configs_checked = False
    with connect([CopyNeed(item.file.name, item.have_bytes) for item in missing]) as stream:
        buffer = memoryview(bytearray(limits.SEALED_CHUNK_BYTES))
        for item in missing:
            if _is_large(item.file) and not configs_checked:
                with install.cleared_if_unsound(staged):
                    check_configs(staged)
                configs_checked = True
            _fetch_file(item, staged, stream, buffer, advance)
        if stream.receive_into(buffer[:1]):
            raise ProtocolError("The other machine sent more than it was asked for.")


def _fetch_file(
    item: _Missing,
    staged: Path,
    stream: SealedReceiver,
    buffer: memoryview,
    advance: Callable[[str, int], None],
) -> None:
    file = item.file
    part = staged / f"{file.name}{install.PART}"
    left = file.size_bytes - item.have_bytes
    with part.open("ab") as out:
        while left:
            count = stream.receive_into(buffer[: min(left, len(buffer))])
            if count == 0:
                raise PeerLost(f"The other machine sent {file.name} without its last {left} bytes.")
            item.hasher.update(buffer[:count])
            out.write(buffer[:count])
            left -= count
            advance(file.name, count)
    if item.hasher.hexdigest() != file.blake3:
        part.unlink()
        raise ModelCorrupt(
            f"{file.name} arrived with another checksum than was offered, and was thrown away.",
            hint="Pull again; if it stays, verify the model on the machine that it came from.",
        )
    part.rename(staged / file.name)


def _is_large(file: OfferedFile) -> bool:
    """True for a file that may be large: one in the format of weights."""
    return file.name.endswith(".safetensors")


# ---- The process -----------------------------------------------------------------------------------------


def connecting(daemon: DaemonLines, reporter: Reporter) -> Connect:
    """Asks the daemon for the stream."""

    @contextlib.contextmanager
    def connect(needs: list[CopyNeed]) -> Iterator[SealedReceiver]:
        reporter.line(CopyLine(needs=needs))
        key, sock = daemon.stream()
        with sock:
            yield SealedReceiver(sock, key, "connector")

    return connect


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fleetd.models.copy.receive")
    parser.add_argument("--models-dir", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--digest", required=True)
    options = parser.parse_args()

    def work(daemon: DaemonLines, reporter: Reporter) -> str:
        offer = from_msgpack(daemon.message()[0], CopyOffer)
        connect = connecting(daemon, reporter)
        receive(offer, options.digest, options.name, options.models_dir, connect, reporter)
        return str(options.name)

    return child_process.run(work)


if __name__ == "__main__":
    sys.exit(main())
