"""Blocks of made-up bytes, which follow from their names, for tests of the disk cache."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from fleetd import limits
from fleetd.cache import block_names
from fleetd.cache.block_file import BlockDamaged, BlockHeader
from fleetd.cache.block_store import BlockStore
from fleetd.cache.settings import DiskCacheSettings

LAYOUT = "test"
BASIS = b"one model on one machine"


def settings(home: Path, quota_bytes: int = 1 << 30) -> DiskCacheSettings:
    return DiskCacheSettings(str(home / "cache" / "kv"), str(home / "identity" / "kv.key"), quota_bytes)


def prompt(seed: int, blocks: int, basis: bytes = BASIS, namespace: str = "dense") -> list[bytes]:
    """Names of the blocks of one prompt; those of another seed begin otherwise."""
    tokens = [seed] * (blocks * limits.CACHE_BLOCK_TOKENS)
    return block_names.names(basis, namespace, tokens)


def payload(name: bytes, size: int = 500) -> bytes:
    return (hashlib.sha256(b"payload" + name).digest() * (size // 32 + 1))[:size]


def header(number: int, size: int = 500) -> BlockHeader:
    return BlockHeader(LAYOUT, number + 1, [size - size // 2, size // 2])


def buffers(name: bytes, size: int = 500) -> list[memoryview]:
    whole = memoryview(payload(name, size))
    return [whole[: size - size // 2], whole[size - size // 2 :]]


def write(
    store: BlockStore,
    names: Sequence[bytes],
    size: int = 500,
    model: str = "tiny",
    worth: float = 1.0,
    *,
    origins: tuple[str, ...] = (),
) -> int:
    """Write a prompt's blocks; returns the bytes written. ``origins``: labels of the machines they are of."""
    prompt = store.prompt(names, worth)
    written = sum(
        store.write(
            prompt,
            number,
            model,
            replace(header(number, size), origins=origins),
            partial(buffers, name, size),
        )
        for number, name in enumerate(names)
    )
    store.price(names, worth)
    return written


def keep(
    store: BlockStore,
    names: Sequence[bytes],
    size: int = 500,
    *,
    local_only: bool = False,
    states: Sequence[int] = (),
    origins: tuple[str, ...] = (),
) -> None:
    """Write blocks as a worker does: by these names other machines ask for them, unless they are local.
    ``states``: the numbers of those that have a snapshot at their end. ``origins``: as in ``write``."""
    kept = [block_names.kept_as(name, local_only=local_only) for name in names]
    write(store, kept, size, origins=origins)
    snapshots = {number: block_names.state_name(kept[number]) for number in states}
    prompt = store.prompt(kept, 1.0, snapshots)
    for number, name in snapshots.items():
        head = replace(header(number, size), origins=origins)
        store.write(prompt, number, "tiny", head, partial(buffers, name, size), state=True)


@contextmanager
def opened(chosen: DiskCacheSettings) -> Iterator[BlockStore]:
    """A store, closed at the end."""
    store = BlockStore(chosen)
    try:
        yield store
    finally:
        store.close()


def read(store: BlockStore, name: bytes, number: int, size: int = 500) -> bytes | None:
    """A block's payload; None if it is not there."""
    whole = bytearray(size)

    def targets(found: BlockHeader) -> list[memoryview]:
        if found != header(number, size):
            raise BlockDamaged("not what was expected")
        return [memoryview(whole)[: size - size // 2], memoryview(whole)[size - size // 2 :]]

    return None if store.read(name, targets) is None else bytes(whole)


def files(chosen: DiskCacheSettings) -> list[Path]:
    return sorted((Path(chosen.folder) / "blocks").glob("*"))
