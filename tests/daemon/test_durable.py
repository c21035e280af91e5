"""Files that survive a power cut: flushed to the disk itself where the system tells that from its cache."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from fleetd.storage import durable, paths

# The value of <sys/fcntl.h> on macOS; Python has the name only there.
F_FULLFSYNC = 51


class Drive:
    """What a file system is asked for, on a Mac whose drive flushes its cache, or on one that cannot."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, flushes: bool) -> None:
        self.asked: list[str] = []
        self._flushes = flushes
        monkeypatch.setattr(fcntl, "F_FULLFSYNC", F_FULLFSYNC, raising=False)
        monkeypatch.setattr(fcntl, "fcntl", self.control)
        monkeypatch.setattr(os, "fsync", lambda fd: self.asked.append("fsync"))

    def control(self, fd: int, command: int) -> int:
        assert (os.fstat(fd).st_size >= 0, command) == (True, F_FULLFSYNC)
        self.asked.append("full")
        if not self._flushes:
            raise OSError(errno.ENOTSUP, "Operation not supported")
        return 0


def test_a_mac_flushes_the_file_and_then_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Drive(monkeypatch, flushes=True)
    durable.replace(tmp_path / "roster", b"x")
    assert drive.asked == ["full", "full"]
    assert durable.create(tmp_path / "key.pem", b"y")
    assert drive.asked == ["full"] * 4
    paths.load_token(tmp_path / "api-token")
    assert drive.asked == ["full"] * 6


def test_a_drive_that_cannot_is_flushed_as_far_as_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = Drive(monkeypatch, flushes=False)
    durable.replace(tmp_path / "roster", b"x")
    assert (tmp_path / "roster").read_bytes() == b"x"
    assert drive.asked == ["full", "fsync", "full", "fsync"]


@pytest.mark.skipif(hasattr(fcntl, "F_FULLFSYNC"), reason="this system has another way to flush")
def test_elsewhere_fsync_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    durable.replace(tmp_path / "roster", b"x")
    assert len(flushed) == 2
