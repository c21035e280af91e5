"""A process that is killed at any step of its work leaves blocks that are right or missing, in the quota."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import crashing_store
import kv_blocks
import pytest
from crashing_store import PROMPTS, QUOTA_BYTES, SNAPSHOT

from fleetd.cache.block_store import BlockStore, CacheUnavailable

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """What each of the killed processes left."""
    # In memory where there is such a folder: a thousand small files are no test of the disk.
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=shared if shared.is_dir() else tmp_path_factory.getbasetemp()))
    done = subprocess.run(
        [sys.executable, crashing_store.__file__, str(folder)],
        env={"PYTHONPATH": f"{HERE.parent / 'support'}:{HERE.parents[1]}"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    yield [folder / str(step) for step in range(int(done.stdout) + 1)]
    shutil.rmtree(folder)


def test_every_step_leaves_blocks_that_are_right_or_missing_within_the_quota(left: list[Path]) -> None:
    assert len(left) > 50
    for home in left:
        settings = kv_blocks.settings(home, QUOTA_BYTES)
        held = sum(file.stat().st_size for file in kv_blocks.files(settings))
        assert held <= QUOTA_BYTES, home
        # Another worker goes on at once, without anything being repaired.
        store = BlockStore(settings)
        try:
            seen = [
                kv_blocks.read(store, name, number) for names in PROMPTS for number, name in enumerate(names)
            ]
            seen.append(kv_blocks.read(store, SNAPSHOT, 1))
        except CacheUnavailable:
            seen = []  # the damaged index; the next start mends it
        wanted = [kv_blocks.payload(name) for name in (*chain(*PROMPTS), SNAPSHOT)]
        assert all(found in (None, right) for found, right in zip(seen, wanted, strict=False)), home
        store.close()


def test_after_every_step_the_next_start_makes_files_and_index_agree(left: list[Path]) -> None:
    for home in left:
        settings = kv_blocks.settings(home, QUOTA_BYTES)
        store = BlockStore(settings)
        store.recover()
        store.validate()
        for names in PROMPTS:
            kv_blocks.write(store, names, worth=5.0)
            assert [kv_blocks.read(store, n, i) for i, n in enumerate(names)] == [
                kv_blocks.payload(n) for n in names
            ], home
            store.validate()
        store.close()
