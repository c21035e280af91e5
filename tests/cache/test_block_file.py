"""A block's file opens only as it was written, by whom it was written, for what it was written."""

from __future__ import annotations

import io
from collections.abc import Sequence

import kv_blocks
import pytest

from fleetd import limits
from fleetd.cache import block_file
from fleetd.cache.block_file import BlockDamaged, BlockHeader
from fleetd.cache.block_names import names
from fleetd.cache.machine_key import MachineKey

KEY = MachineKey(b"k" * 32)
CHUNK = limits.SEALED_CHUNK_BYTES
(NAME,) = kv_blocks.prompt(1, 1)


def sealed(size: int, key: MachineKey = KEY, name: bytes = NAME) -> bytes:
    pieces = block_file.seal(key, name, kv_blocks.header(0, size), kv_blocks.buffers(name, size))
    return b"".join(map(bytes, pieces))


def opened(data: bytes, size: int, key: MachineKey = KEY, name: bytes = NAME) -> bytes:
    whole = bytearray(size)

    def targets(header: BlockHeader) -> Sequence[memoryview]:
        if header != kv_blocks.header(0, size):
            raise BlockDamaged("not what was expected")
        return [memoryview(whole)[: header.sizes[0]], memoryview(whole)[header.sizes[0] :]]

    block_file.unseal(key, name, io.BytesIO(data).readinto, targets)
    return bytes(whole)


@pytest.mark.parametrize("size", [0, 1, 500, CHUNK - 40, CHUNK * 2 + 7])
def test_what_was_sealed_opens_and_is_as_long_as_was_said(size: int) -> None:
    data = sealed(size)
    assert len(data) == block_file.sealed_bytes(kv_blocks.header(0, size))
    assert opened(data, size) == kv_blocks.payload(NAME, size)


def test_a_file_whose_length_fills_chunks_exactly_opens() -> None:
    framed = len(sealed(1000)) - 1000
    for size in range(2 * CHUNK - framed, 2 * CHUNK - framed + 60, 5):
        assert opened(sealed(size), size) == kv_blocks.payload(NAME, size)


def test_any_byte_that_is_changed_makes_it_no_block() -> None:
    data = sealed(60)
    for at in range(len(data)):
        for bit in (1, 128):
            changed = bytearray(data)
            changed[at] ^= bit
            with pytest.raises(BlockDamaged):
                opened(bytes(changed), 60)


def test_any_other_length_makes_it_no_block() -> None:
    data = sealed(60)
    for n in range(len(data)):
        with pytest.raises(BlockDamaged):
            opened(data[:n], 60)
    with pytest.raises(BlockDamaged):
        opened(data + b"\0", 60)
    with pytest.raises(BlockDamaged):
        opened(data + data, 60)


def test_a_chunk_that_is_missing_or_moved_makes_it_no_block() -> None:
    size = 3 * CHUNK
    data, chunk = sealed(size), CHUNK + 28
    first = block_file.PREFACE_BYTES
    chunks = [data[at : at + chunk] for at in range(first, len(data), chunk)]
    for order in ([1, 0, 2, 3], [0, 2, 3], [0, 1, 1, 3], [0, 1, 2]):
        with pytest.raises(BlockDamaged):
            opened(data[:first] + b"".join(chunks[i] for i in order), size)


def test_another_machine_s_file_and_another_block_s_do_not_open() -> None:
    other = MachineKey(b"o" * 32)
    (second,) = kv_blocks.prompt(2, 1)
    for data in (sealed(60, key=other), sealed(60, name=second)):
        with pytest.raises(BlockDamaged):
            opened(data, 60)


def test_another_version_s_file_does_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(block_file, "VERSION", 2)
        later = sealed(60)
    with pytest.raises(BlockDamaged):
        opened(later, 60)


def test_a_file_says_nothing_of_what_is_in_it_and_no_two_are_alike() -> None:
    one, two = sealed(5000), sealed(5000)
    assert one[len(b"fleetd kv1") :] != two[len(b"fleetd kv1") :]
    text = kv_blocks.payload(NAME, 5000)
    assert all(text[at : at + 8] not in one for at in range(0, 5000, 8))


def test_buffers_that_are_shorter_than_the_header_says_are_refused() -> None:
    pieces = block_file.seal(KEY, NAME, kv_blocks.header(0, 500), kv_blocks.buffers(NAME, 400))
    with pytest.raises(ValueError, match="shorter"):
        list(pieces)


def test_a_name_covers_all_tokens_before_it_and_all_that_decides_the_bytes() -> None:
    n = limits.CACHE_BLOCK_TOKENS
    tokens = list(range(3 * n + 5))
    found = names(b"basis", "dense", tokens)
    assert len(found) == len(set(found)) == 3
    assert names(b"basis", "dense", tokens[: 2 * n]) == found[:2]
    assert names(b"basis", "dense", tokens[: n - 1]) == []
    edited = [*tokens]
    edited[n] = 7
    assert [a == b for a, b in zip(names(b"basis", "dense", edited), found, strict=True)] == [
        True,
        False,
        False,
    ]
    for basis, namespace in ((b"basi", "sdense"), (b"other", "dense"), (b"basis", "equivalent")):
        assert not set(names(basis, namespace, tokens)) & set(found)


def test_file_names_tell_nothing_without_the_key() -> None:
    assert KEY.file_name(NAME) != MachineKey(b"o" * 32).file_name(NAME)
    assert NAME.hex() not in KEY.file_name(NAME)
    assert "k" * 8 not in repr(KEY)
