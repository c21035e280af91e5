"""The messages of a copy: offer, needs, order; and the check of an offer.

An offer comes from another machine and is not believed: its files must add up to the digest that was asked
for, and may have only names and sizes that a model's data files have.
"""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.errors import ModelCorrupt, ModelRefused
from fleetd.models import digest as digests
from fleetd.models import hub_parts, layer_files, manifest, names, parts
from fleetd.models.folder import ModelFolder, Source
from fleetd.models.hub_parts import HubListing
from fleetd.models.pull_lines import PullLine
from fleetd.models.weights import WEIGHTS_PATTERN

if TYPE_CHECKING:  # it imports the other end of a copy
    from fleetd.models.model_store import ModelStore

_Layer = Annotated[int, Meta(ge=0, le=limits.LAYERS)]
_FileName = Annotated[str, Meta(max_length=255)]
_Size = Annotated[int, Meta(ge=0, le=limits.COPY_BYTES)]
_Hash = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class OfferedFile(msgspec.Struct, frozen=True):
    """A file that the other machine has."""

    name: _FileName
    size_bytes: _Size
    # The hash of its content, in hex.
    blake3: _Hash


class CopyOffer(msgspec.Struct, frozen=True):
    """A model that the other machine has. Its name there is left out: nothing may depend on it."""

    # How the model came to that machine.
    source: Source
    # The commit of the hub; None if it is not from there.
    revision: Annotated[str, Meta(pattern=r"\A[0-9a-f]{40}\Z")] | None
    # All files that decide what it computes.
    files: Annotated[list[OfferedFile], Meta(min_length=1, max_length=limits.COPY_FILES)]


class PartOffer(msgspec.Struct, frozen=True):
    """A model of which the other machine gives single layers, as files by ``layer_files``."""

    whole: CopyOffer
    # Bytes of each layer's file, by its number.
    layers: Annotated[list[_Size], Meta(min_length=1, max_length=limits.LAYERS)]
    # Bytes of the file of what belongs to no layer; 0 if only machines that answer need it.
    ends: _Size
    # Bytes of the table of tensors.
    table: Annotated[int, Meta(gt=0, le=limits.MODEL_JSON_BYTES)]
    # What the hub lists, if the other machine has the model in part only: ``whole`` is then of small files.
    listing: HubListing | None = None


class PartOrder(msgspec.Struct, frozen=True):
    """The message to the process that receives layers [first, last) of a model."""

    offer: PartOffer
    # That the offer must be of, even if it says another.
    digest: str
    # The model's name on the machine that asked for the part.
    name: str
    # That machine, by its node id.
    source: str
    first: _Layer
    last: _Layer

    def sizes(self) -> dict[str, int]:
        """Bytes of each file of the part, by its name, small ones first."""
        offer = self.offer
        found = {file.name: file.size_bytes for file in offer.whole.files if file.name in digests.CONFIGS}
        found[layer_files.TABLE_NAME] = offer.table
        if offer.ends:
            found[layer_files.ENDS_NAME] = offer.ends
        numbered = list(enumerate(offer.layers))[self.first : self.last]
        return found | {layer_files.name_of(layer): size for layer, size in numbered}


class CopyNeed(msgspec.Struct, frozen=True):
    """A file that the receiving machine asks for."""

    file: _FileName
    # How many of its first bytes the receiving machine has already.
    offset: _Size


class SendOrder(msgspec.Struct, frozen=True):
    """The message to the sending process; the socket comes with it."""

    # The model's folder.
    folder: str
    # The key that seals the stream.
    key: bytes
    # The files to send, in this order.
    needs: Annotated[list[CopyNeed], Meta(max_length=limits.COPY_FILES)]


class CopyLine(PullLine, frozen=True, omit_defaults=True):
    """A line of a copying process."""

    # Asks the daemon for a stream of these files.
    needs: list[CopyNeed] | None = None


def offer_of(store: ModelStore, folder: ModelFolder) -> CopyOffer:
    """The offer of a model. Hashes only files without a record. Blocks.

    Raises:
        ModelRefused, ModelCorrupt: another machine would not take the model.
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


def part_offer_of(store: ModelStore, folder: ModelFolder) -> PartOffer:
    """The offer of single layers of a model; as ``offer_of``. Raises ModelUnsupported if it has none."""
    whole, found = offer_of(store, folder), layer_files.files_of(folder.path)
    sizes = {name: content.size_bytes for name, content in found.files.items()}
    return PartOffer(
        whole,
        [sizes[layer_files.name_of(layer)] for layer in range(found.layers)],
        sizes[layer_files.ENDS_NAME] if found.ends_everywhere else 0,
        sizes[layer_files.TABLE_NAME],
    )


def part_offer_from_hub(path: Path) -> PartOffer:
    """The offer of single layers of a model that is here in part; those that are here are given.

    Raises ModelCorrupt.
    """
    part, known = hub_parts.read(path), parts.find(path)
    records = known.known.files if known is not None else {}
    if layer_files.TABLE_NAME not in records:
        raise ModelCorrupt(f"There is no outline of a model in {path}.")
    small = [
        OfferedFile(name, records[name].size_bytes, records[name].blake3)
        for name in digests.CONFIGS & set(records)
    ]
    sizes = hub_parts.file_sizes(part)
    everywhere = layer_files.ENDS_NAME in hub_parts.file_names(part, 0, 1, own=False)
    return PartOffer(
        CopyOffer("hub", part.listing.at.commit, sorted(small, key=lambda file: file.name)),
        [sizes[layer_files.name_of(layer)] for layer in range(part.layers)],
        sizes[layer_files.ENDS_NAME] if everywhere else 0,
        records[layer_files.TABLE_NAME].size_bytes,
        part.listing,
    )


def check_part(offer: PartOffer, digest: str) -> None:
    """Check an offer of layers against the digest that was asked for. Raises as ``check``."""
    if offer.listing is None:
        check(offer.whole, digest)
        return
    _check_files(offer.whole)
    if offer.listing.digest != digest:
        raise ModelCorrupt(
            f"Layers of the model {offer.listing.digest[:12]} were offered, not of {digest[:12]}."
        )


def digest_of(offer: CopyOffer) -> str:
    """The digest that the offered files add up to, in hex."""
    records = {
        file.name: manifest.FileRecord(file.size_bytes, mtime_ns=0, inode=0, blake3=file.blake3)
        for file in offer.files
    }
    weights = frozenset(name for name in records if fnmatch.fnmatchcase(name, WEIGHTS_PATTERN))
    return digests.of_records(records, weights).hex


def check(offer: CopyOffer, digest: str) -> None:
    """Check an offer against the digest that was asked for.

    Raises:
        ModelRefused: a file is no plain data file of a model, or there are more than a model has.
        ModelCorrupt: the files are another model than the one that was asked for.
    """
    _check_files(offer)
    if (found := digest_of(offer)) != digest:
        raise ModelCorrupt(
            f"The files that were offered make up the model {found[:12]}, not {digest[:12]}.",
            hint="Pull the model from another machine, or from where it was published.",
        )


def _check_files(offer: CopyOffer) -> None:
    """Raises ModelRefused as ``check``."""
    seen: set[str] = set()
    for file in offer.files:
        if not names.is_file_name(file.name) or not manifest.is_part(file.name):
            raise ModelRefused(
                f"{file.name[:80]!r} is not the name of a model's data file.",
                hint="Pull the model from another machine, or from where it was published.",
            )
        # On some file systems two names that differ only in case are one file.
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
