"""The daemon's part: it agrees at the start, tells, and clears; a disk that refuses stops nothing."""

from __future__ import annotations

from pathlib import Path

import kv_blocks
import pytest
from kv_blocks import files, prompt, write

from fleetd.cache.block_store import BlockStore
from fleetd.cache.service import DiskCache
from fleetd.cache.settings import DiskCacheSettings
from fleetd.errors import ConfigError


def service(settings: DiskCacheSettings, *, on: bool = True, note: str = "") -> DiskCache:
    made = DiskCache(settings, on=on, note=lambda: note)
    made.start()
    return made


def test_it_tells_what_workers_wrote_and_clears_it(store: BlockStore, settings: DiskCacheSettings) -> None:
    cache = service(settings, note="the disk is full")
    assert cache.for_workers == settings
    written = write(store, prompt(1, 2))
    assert (cache.report().n_bytes, cache.report().note) == (written, "the disk is full")
    assert cache.clear().n_bytes == written
    assert files(settings) == []
    assert cache.report().n_bytes == 0
    # The wear stays known.
    assert cache.report().models[0].written_bytes == written
    # And what comes then is kept again.
    write(store, prompt(1, 2))
    assert cache.report().n_bytes == written


def test_switched_off_nothing_stays(store: BlockStore, settings: DiskCacheSettings) -> None:
    write(store, prompt(1, 2))
    store.close()
    cache = service(settings, on=False)
    assert cache.for_workers is None
    assert files(settings) == []
    assert not Path(settings.key_file).exists()
    assert cache.report().on is False


def test_where_nothing_was_ever_kept_switching_off_makes_no_folder(settings: DiskCacheSettings) -> None:
    service(settings, on=False)
    assert not Path(settings.folder).exists()
    assert not Path(settings.key_file).parent.exists()


def test_a_disk_that_refuses_is_named_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file is in the way")
    cache = service(kv_blocks.settings(tmp_path))
    assert cache.report().on
    assert cache.report().note


def test_a_key_that_cannot_be_deleted_is_an_error_that_names_it(
    store: BlockStore, settings: DiskCacheSettings
) -> None:
    write(store, prompt(1, 1))
    key = Path(settings.key_file)
    key.unlink()
    (key / "x").mkdir(parents=True)
    with pytest.raises(ConfigError, match="could not be cleared") as raised:
        service(settings).clear()
    assert str(key) in raised.value.hint
