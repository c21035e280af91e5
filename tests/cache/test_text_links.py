"""A prompt is found by its text before it is tokenized: by the blocks that its beginnings fill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import kv_blocks
import pytest
from kv_blocks import keep, prompt, write

from fleetd.cache import text_links
from fleetd.cache.block_store import BlockStore, CacheUnavailable
from fleetd.cache.index import FoundText, Index
from fleetd.cache.service import DiskCache
from fleetd.cache.settings import DiskCacheSettings
from fleetd.plan.affinity import BLOCK_CHARS, chain

NAMES = prompt(1, 6)
TEXT = "".join(chr(65 + n) * BLOCK_CHARS for n in range(12))
LINKS = chain(TEXT, b"k")


@pytest.fixture
def cache(settings: DiskCacheSettings) -> Iterator[DiskCache]:
    made = DiskCache(settings, on=True, note=lambda: "")
    made.start()
    yield made
    made.close()


def test_a_text_is_found_as_far_as_its_blocks_are_on_the_disk(store: BlockStore, cache: DiskCache) -> None:
    """Each block is filled by two links."""
    cache.begin_with("digest", LINKS, NAMES, 0.5)
    assert cache.longest("digest", LINKS) == FoundText(), "nothing is written yet"
    keep(store, NAMES[:4])
    found = cache.longest("digest", LINKS)
    # The last block that is there is filled from its end on until the next one is.
    assert found.links == 9
    assert found.nbytes == cache.report().n_bytes
    # A longer text that begins so, another one that differs in its third piece, another model.
    assert cache.longest("digest", chain(TEXT + "z" * 9000, b"k")).links == 9
    other = TEXT[: 2 * BLOCK_CHARS] + "z" * BLOCK_CHARS + TEXT[3 * BLOCK_CHARS :]
    assert cache.longest("digest", chain(other, b"k")).links == 2
    assert cache.longest("digest2", LINKS) == FoundText()


def test_what_is_evicted_is_not_found_by_its_text(tmp_path: Path) -> None:
    cache = DiskCache(kv_blocks.settings(tmp_path, quota_bytes=5000), on=True, note=lambda: "")
    cache.start()
    store = BlockStore(kv_blocks.settings(tmp_path, quota_bytes=5000))
    keep(store, NAMES)
    cache.begin_with("digest", LINKS, NAMES, 0.5)
    assert cache.longest("digest", LINKS).links == 12
    write(store, prompt(2, 6), worth=9.0)
    assert cache.longest("digest", LINKS).links < 8
    store.close()
    cache.close()


def test_clearing_forgets_texts_and_an_old_key_finds_none(store: BlockStore, cache: DiskCache) -> None:
    keep(store, NAMES)
    cache.begin_with("digest", LINKS, NAMES, 0.5)
    cache.clear()
    keep(store, NAMES)
    assert cache.longest("digest", LINKS) == FoundText()


def test_the_oldest_texts_go_where_there_are_too_many(tmp_path: Path) -> None:
    index = Index(tmp_path / "index.db", 1 << 30, most_beginnings=4)
    key = index.key_id
    index.begin_with(key, [(f"old{n}", "b") for n in range(4)])
    index.begin_with(key, [("old0", "b"), ("new", "b")])
    left = index._db.execute("SELECT link FROM beginnings").fetchall()
    assert {row[0] for row in left} == {"old0", "new", "old2", "old3"}
    index.close()


def test_a_disk_that_refuses_finds_nothing(
    store: BlockStore, cache: DiskCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise CacheUnavailable("it hangs")

    keep(store, NAMES)
    cache.begin_with("digest", LINKS, NAMES, 0.5)
    monkeypatch.setattr(BlockStore, "longest", refuses)
    monkeypatch.setattr(BlockStore, "begin_with", refuses)
    cache.begin_with("digest", LINKS, NAMES, 0.5)
    assert cache.longest("digest", LINKS) == FoundText()


def test_links_of_another_model_are_other_ones() -> None:
    assert text_links.kept_as("a", b"bc") != text_links.kept_as("ab", b"c")
    assert text_links.filled_blocks("d", LINKS[:3], NAMES, 0.3) == []


def test_the_bytes_of_a_text_are_those_of_its_blocks_however_unlike(
    store: BlockStore, cache: DiskCache
) -> None:
    """The last block of three holds a state besides its rows; of a text in few links, some are not named."""
    keep(store, NAMES[:2], 400)
    keep(store, NAMES[:3], 4000)
    cache.begin_with("digest", LINKS[:6], NAMES[:3], 0.5)
    assert cache.longest("digest", LINKS[:6]).nbytes == cache.report().n_bytes
    cache.begin_with("few", LINKS[:2], NAMES[:3], 1.5)
    assert cache.longest("few", LINKS[:2]).links == 2
    assert cache.longest("few", LINKS[:2]).nbytes > cache.report().n_bytes
