"""What a machine says about a model that it would copy to another, and what that one makes of it.

An offer comes from another machine and says nothing that is believed: its files must add up to the digest
that was asked for, and may have only names and sizes that a model's data files have.
"""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.errors import ModelCorrupt, ModelRefused
from fleetd.models import digest as digests
from fleetd.models import manifest, names
from fleetd.models.folder import ModelFolder, Source
from fleetd.models.pull_lines import PullLine
from fleetd.models.weights import WEIGHTS_PATTERN

if TYPE_CHECKING:  # it imports the other end of a copy
    from fleetd.models.model_store import ModelStore

_FileName = Annotated[str, Meta(max_length=255)]
_Size = Annotated[int, Meta(ge=0, le=limits.COPY_BYTES)]
_Hash = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class OfferedFile(msgspec.Struct, frozen=True):
    name: _FileName
    size_bytes: _Size
    blake3: _Hash


class CopyOffer(msgspec.Struct, frozen=True):
    """``source`` and ``revision`` are where the other machine has it from; by what name it is known there is
    not said, because nothing may depend on it."""

    source: Source
    revision: Annotated[str, Meta(pattern=r"\A[0-9a-f]{40}\Z")] | None
    files: Annotated[list[OfferedFile], Meta(min_length=1, max_length=limits.COPY_FILES)]


class CopyNeed(msgspec.Struct, frozen=True):
    """A file, and how much of it is there already."""

    file: _FileName
    offset: _Size


class SendOrder(msgspec.Struct, frozen=True):
    """What the sending process is told, with the socket."""

    folder: str
    key: bytes
    needs: Annotated[list[CopyNeed], Meta(max_length=limits.COPY_FILES)]


class CopyLine(PullLine, frozen=True, omit_defaults=True):
    """A line of a copying process; ``needs`` asks the daemon for a stream of these."""

    needs: list[CopyNeed] | None = None


def offer_of(store: ModelStore, folder: ModelFolder) -> CopyOffer:
    """What can be offered of a model; hashes only what no record remembers.

    Raises:
        ModelRefused, ModelCorrupt: another machine would not take it.
    """
    records = store.file_records(folder)
    if len(records) > limits.COPY_FILES:
        raise ModelRefused(f"{folder.name} has {len(records)} files; {limits.COPY_FILES} can be copied.")
    offer = CopyOffer(
        source=folder.source,
        revision=folder.revision if folder.source == "hub" else None,
        files=[OfferedFile(name, record.size_bytes, record.blake3) for name, record in records.items()],
    )
    check(offer, digest_of(offer))
    return offer


def digest_of(offer: CopyOffer) -> str:
    records = {
        file.name: manifest.FileRecord(file.size_bytes, mtime_ns=0, inode=0, blake3=file.blake3)
        for file in offer.files
    }
    weights = frozenset(name for name in records if fnmatch.fnmatchcase(name, WEIGHTS_PATTERN))
    return digests.of_records(records, weights).hex


def check(offer: CopyOffer, digest: str) -> None:
    """Hold an offer against the digest that was asked for.

    Raises:
        ModelRefused: a file that is no plain data file of a model, or more of them than a model has.
        ModelCorrupt: something else than what was asked for.
    """
    seen: set[str] = set()
    for file in offer.files:
        if not names.is_file_name(file.name) or not manifest.is_part(file.name):
            raise ModelRefused(
                f"{file.name[:80]!r} is not the name of a model's data file.",
                hint="Pull the model from another machine, or from where it was published.",
            )
        # Some file systems hold names apart by more than case, some do not.
        if file.name.lower() in seen:
            raise ModelRefused(f"{file.name} is offered twice.")
        seen.add(file.name.lower())
        if not file.name.endswith(".safetensors") and file.size_bytes > limits.MODEL_JSON_BYTES:
            raise ModelRefused(
                f"{file.name} is said to have {file.size_bytes} bytes; "
                f"all but weights have at most {limits.MODEL_JSON_BYTES}."
            )
    total = sum(file.size_bytes for file in offer.files)
    if total > limits.COPY_BYTES:
        raise ModelRefused(f"The model is said to have {total} bytes, over the bound of {limits.COPY_BYTES}.")
    if (found := digest_of(offer)) != digest:
        raise ModelCorrupt(
            f"The files that were offered make up the model {found[:12]}, not {digest[:12]}.",
            hint="Pull the model from another machine, or from where it was published.",
        )
