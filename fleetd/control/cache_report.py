"""What `fleetctl cache` shows: the blocks of keys and values on this machine's disk."""

from __future__ import annotations

import msgspec


class ModelBlocks(msgspec.Struct, frozen=True):
    """One model's blocks on the disk, then what they were good for since the counting began.

    ``block_tokens``: tokens whose keys and values the blocks hold. ``hits``: prompts whose beginning was read
    from the disk, of ``restored_tokens`` in all; ``saved_s``: seconds that computing them would have taken
    longer, as predicted.
    """

    model: str
    blocks: int = 0
    n_bytes: int = 0
    block_tokens: int = 0
    hits: int = 0
    restored_tokens: int = 0
    saved_s: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0


class MachineFetches(msgspec.Struct, frozen=True):
    """What another machine sent of prompts, and what was sent to it, since the daemon started.

    ``prompts``: whose beginning it sent, ``tokens`` in all, in ``took_s`` where ``predicted_s`` were
    expected; ``saved_s``: seconds that computing them would have taken longer. ``failed``: such fetches.
    """

    machine: str
    prompts: int = 0
    tokens: int = 0
    n_bytes: int = 0
    took_s: float = 0.0
    predicted_s: float = 0.0
    saved_s: float = 0.0
    failed: int = 0
    sent_prompts: int = 0
    sent_bytes: int = 0


class CacheReport(msgspec.Struct, frozen=True):
    """``on``: whether prompts are kept on the disk; ``note``: why nothing is written at the moment, "" if it
    is. ``read_bytes_per_s``: of the disk, and ``cached_bytes_per_s``: of files that the system has in memory,
    as measured; 0 before that."""

    on: bool = False
    note: str = ""
    folder: str = ""
    n_bytes: int = 0
    quota_bytes: int = 0
    read_bytes_per_s: float = 0.0
    cached_bytes_per_s: float = 0.0
    models: list[ModelBlocks] = []
    machines: list[MachineFetches] = []
