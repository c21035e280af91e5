"""A process that dies at the K-th step of a block store's work, for every K: `crashing_store.py FOLDER`.

Prints how many steps there are; FOLDER/K is what the process that died at step K left, and FOLDER/0 what one
left that did not die.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path

import kv_blocks

from fleetd.cache.block_file import sealed_bytes
from fleetd.cache.block_names import state_name
from fleetd.cache.block_store import BlockStore
from fleetd.storage import durable

# Room for three blocks and a half.
QUOTA_BYTES = sealed_bytes(kv_blocks.header(0)) * 7 // 2
PROMPTS = [kv_blocks.prompt(seed, 2) for seed in range(1, 5)]
# At the end of the third.
SNAPSHOT = state_name(PROMPTS[2][1])


def work(home: Path, die_at: int) -> int:
    """Returns how many steps it took."""
    steps = 0

    def at(_place: str) -> None:
        nonlocal steps
        steps += 1
        if steps == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    store = BlockStore(kv_blocks.settings(home, QUOTA_BYTES), at=at)
    store.recover()
    kv_blocks.write(store, PROMPTS[0])
    # Evicts.
    kv_blocks.write(store, PROMPTS[1], worth=2.0)
    kv_blocks.read(store, PROMPTS[1][0], 0)
    # A damaged file is deleted when it is read.
    kv_blocks.files(kv_blocks.settings(home))[0].write_bytes(b"damaged")
    for names in PROMPTS[:2]:
        for number, name in enumerate(names):
            kv_blocks.read(store, name, number)
    store.clear()
    kv_blocks.write(store, PROMPTS[2])
    _write_snapshot(store)
    store.close()
    # The next run has less room.
    store = BlockStore(kv_blocks.settings(home, QUOTA_BYTES // 2), at=at)
    store.recover()
    store.close()
    # And the one after it finds its index damaged.
    (home / "cache" / "kv" / "index.db").write_bytes(b"no database at all" * 1000)
    store = BlockStore(kv_blocks.settings(home, QUOTA_BYTES), at=at)
    store.recover()
    kv_blocks.write(store, PROMPTS[3])
    store.close()
    return steps


def _write_snapshot(store: BlockStore) -> None:
    prompt = store.prompt(PROMPTS[2], 1.0, {1: SNAPSHOT})
    buffers = partial(kv_blocks.buffers, SNAPSHOT)
    store.write(prompt, 1, "tiny", kv_blocks.header(1), buffers, state=True)


def main(folder: Path) -> None:
    # A killed process loses nothing that it wrote; only a power cut would.
    durable.flush = lambda fd: None
    steps = work(folder / "0", 0)
    for die_at in range(1, steps + 1):
        child = os.fork()
        if child == 0:
            work(folder / str(die_at), die_at)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            sys.exit(f"step {die_at} was not reached: {status}")
    print(steps)  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
