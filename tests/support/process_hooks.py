"""Hooks into daemons under test: a clock that jumps, a slow disk, messages and blocks that are not right.

A file beside the daemon's home, ``<home>.hooks``, says what holds now, as JSON; without it nothing does:

    clock_s       added to ``time.time()``
    zone          the local time zone
    disk_s        how long each flush and each SQL statement takes longer
    nonsense      the share of messages to peers, requests and answers, that nobody can read
    other_blocks  the share of fetches by peers that get the right numbers at the wrong places

Only programs that the tests fork have these hooks. As root they lose the right to write where the file modes
forbid it, so that a folder can be made read-only for them as for everybody.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any

_CAPABILITIES_3 = 0x20080522
_DAC_OVERRIDE, _DAC_READ_SEARCH = 1, 2


def file_of(home: Path) -> Path:
    """The file that the daemon of this home obeys."""
    return home.with_name(f"{home.name}.hooks")


def tell(home: Path, **now: Any) -> None:
    """What holds from now on."""
    draft = file_of(home).with_suffix(".draft")
    draft.write_text(json.dumps(now))
    draft.replace(file_of(home))


class _Now:
    """What the file said when it last changed."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._seen = -1
        self._said: dict[str, Any] = {}

    def get(self, name: str, usual: Any) -> Any:
        self._look()
        return self._said.get(name, usual)

    def _look(self) -> None:
        if self._path is None:
            if "--home" not in sys.argv:
                return  # a worker, or not yet a daemon
            self._path = file_of(Path(sys.argv[sys.argv.index("--home") + 1]))
        try:
            changed = self._path.stat().st_mtime_ns
            if changed == self._seen:
                return
            self._said = json.loads(self._path.read_text())
            self._seen = changed
        except (OSError, ValueError):
            return
        os.environ["TZ"] = self._said.get("zone", "UTC")
        time.tzset()


def install() -> None:
    """Into a process that is to become daemons."""
    now = _Now()
    _drop_rights_over_files()
    true_time, true_fsync, connect = time.time, os.fsync, sqlite3.connect

    def jumping() -> float:
        return true_time() + float(now.get("clock_s", 0.0))

    def slow_fsync(descriptor: int) -> None:
        time.sleep(float(now.get("disk_s", 0.0)))
        true_fsync(descriptor)

    class SlowConnection(sqlite3.Connection):
        def execute(self, *arguments: Any) -> sqlite3.Cursor:
            time.sleep(float(now.get("disk_s", 0.0)))
            return super().execute(*arguments)

    time.time = jumping
    os.fsync = slow_fsync
    sqlite3.connect = lambda *arguments, **options: connect(*arguments, factory=SlowConnection, **options)

    _lie_to_peers(now)


def _lie_to_peers(now: _Now) -> None:
    from fleetd.cache import block_stream
    from fleetd.p2p.session import transport

    send, send_blocks = transport.PeerStream.send, block_stream.send

    def garbled(self: Any, body: bytes) -> None:
        if body and random.random() < float(now.get("nonsense", 0.0)):
            # No MessagePack begins with this byte.
            body = b"\xc1" + random.randbytes(random.randrange(len(body) + 64))
        send(self, body)

    def send_other_blocks(sender: Any, names: Any, read: Any) -> int:
        if random.random() >= float(now.get("other_blocks", 0.0)):
            return send_blocks(sender, names, read)

        def shifted(name: bytes, targets: Any) -> Any:
            filled: list[memoryview] = []

            def noted(header: Any) -> list[memoryview]:
                filled[:] = targets(header)
                return filled

            header = read(name, noted)
            for view in filled if header is not None else ():
                half = len(view) // 8 * 4  # numbers of four bytes, or of two
                view[:] = bytes(view[half:]) + bytes(view[:half])
            return header

        return send_blocks(sender, names, shifted)

    transport.PeerStream.send = garbled  # type: ignore[method-assign]
    block_stream.send = send_other_blocks


def _drop_rights_over_files() -> None:
    if os.geteuid() != 0 or sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0)
    data = (ctypes.c_uint32 * 6)()
    # Two blocks of effective, permitted, inheritable; both rights are in the first.
    if libc.capget(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    for word in range(3):
        data[word] &= ~(1 << _DAC_OVERRIDE | 1 << _DAC_READ_SEARCH)
    if libc.capset(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capset")
