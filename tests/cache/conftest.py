from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import kv_blocks
import pytest

from fleetd.cache.block_store import BlockStore
from fleetd.cache.settings import DiskCacheSettings

sys.path.append(str(Path(__file__).parent))


@pytest.fixture
def settings(tmp_path: Path) -> DiskCacheSettings:
    return kv_blocks.settings(tmp_path)


@pytest.fixture
def store(settings: DiskCacheSettings) -> Iterator[BlockStore]:
    opened = BlockStore(settings)
    yield opened
    opened.close()
