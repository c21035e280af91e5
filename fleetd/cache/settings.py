"""If a machine keeps blocks, and how much of them."""

from __future__ import annotations

import msgspec

from fleetd import limits


class DiskCacheSettings(msgspec.Struct, frozen=True):
    """``key_file``: where the key is, which is not in here. ``quota_bytes``: 0 is ``default_quota``."""

    folder: str
    key_file: str
    quota_bytes: int = 0


def default_quota(free_bytes: int, held_bytes: int) -> int:
    """A tenth of the disk that is free or holds blocks already, and no more than a laptop can spare."""
    return min(limits.CACHE_QUOTA_BYTES, int((free_bytes + held_bytes) * limits.CACHE_QUOTA_SHARE))
