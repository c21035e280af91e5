"""Where a machine keeps blocks, and how much of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from fleetd import limits


class DiskCacheSettings(msgspec.Struct, frozen=True):
    """``key_file``: where the key is, which is not in here."""

    folder: str
    key_file: str
    quota_bytes: int


def default_quota(folder: Path) -> int:
    """A tenth of the disk that is free or already used by blocks, and no more than some laptops can spare."""
    held = 0
    if folder.exists():
        held = sum(entry.stat().st_size for entry in folder.rglob("*") if entry.is_file())
        free = shutil.disk_usage(folder).free
    else:
        there = next(parent for parent in folder.parents if parent.exists())
        free = shutil.disk_usage(there).free
    return min(limits.CACHE_QUOTA_BYTES, int((free + held) * limits.CACHE_QUOTA_SHARE))
