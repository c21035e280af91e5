"""The roster on disk: kills, full disks and damage lose no pairing."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from machines import machine

from fleetd import limits
from fleetd.errors import ConfigError, DiskFull, Forbidden, RosterRefused
from fleetd.p2p.membership.roster import Roster
from fleetd.p2p.membership.roster_file import RosterFile
from fleetd.p2p.membership.roster_record import RosterRecord
from fleetd.storage import durable


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "roster"


def some(count: int) -> tuple[RosterRecord, ...]:
    roster = Roster(machine(0))
    for number in range(1, count + 1):
        roster.admit(machine(number).certificate, "ä name", True)
    return roster.records()


def test_what_was_saved_is_loaded(path: Path) -> None:
    assert RosterFile(path).load() == ()
    for count in (3, 1, 0):
        RosterFile(path).save(some(count))
        assert RosterFile(path).load() == some(count)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["roster"]


def test_the_largest_roster_fits(path: Path) -> None:
    longest = some(1)[0]
    padded = RosterRecord(
        bytes(limits.CERTIFICATE_BYTES), "\U0001f600" * 64, longest.signer, 1 << 62, True, True, bytes(64)
    )
    RosterFile(path).save([padded] * 2 * limits.ROSTER_RECORDS)
    assert path.stat().st_size < limits.ROSTER_FILE_BYTES
    assert len(RosterFile(path).load()) == 2 * limits.ROSTER_RECORDS


def test_the_size_of_the_file_is_bounded(path: Path) -> None:
    for size, reason in (
        (limits.ROSTER_FILE_BYTES, "checksum"),
        (limits.ROSTER_FILE_BYTES + 1, "larger than"),
    ):
        path.write_bytes(b"fleetd roster 1\n" + bytes(size - 16))
        with pytest.raises(RosterRefused, match=reason):
            RosterFile(path).load()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data[:20],
        lambda data: data + b"\0",
        lambda data: b"F" + data[1:],
        lambda data: b"garbage",
    ],
)
def test_damaged_roster_is_never_taken_for_an_empty_one(path: Path, damage: Callable[[bytes], bytes]) -> None:
    RosterFile(path).save(some(2))
    damaged = damage(path.read_bytes())
    path.write_bytes(damaged)
    with pytest.raises(RosterRefused, match=str(path)) as caught:
        RosterFile(path).load()
    assert "backup" in caught.value.hint
    assert path.read_bytes() == damaged  # for whoever wants to mend it


def test_a_flipped_bit_anywhere_is_noticed(path: Path) -> None:
    RosterFile(path).save(some(1))
    right = path.read_bytes()
    for bit in range(0, len(right) * 8, 29):
        wrong = bytearray(right)
        wrong[bit // 8] ^= 1 << bit % 8
        path.write_bytes(wrong)
        with pytest.raises(RosterRefused):
            RosterFile(path).load()


def test_a_roster_with_something_else_in_it_is_refused(path: Path) -> None:
    RosterFile(path).save([("not a record",)])  # type: ignore[list-item]
    with pytest.raises(RosterRefused, match="damaged"):
        RosterFile(path).load()


def test_symlink_planted_as_roster_is_neither_read_nor_written_through(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    RosterFile(other).save(some(2))
    before = other.read_bytes()
    path.symlink_to(other)
    with pytest.raises(Forbidden, match="symbolic link"):
        RosterFile(path).load()
    RosterFile(path).save(some(1))
    assert other.read_bytes() == before
    assert RosterFile(path).load() == some(1)


# ---- Full disks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_keeps_the_old_roster(path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    RosterFile(path).save(some(2))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        with pytest.raises(DiskFull, match="no space left"):
            RosterFile(path).save(some(3))
    assert [entry.name for entry in path.parent.iterdir()] == ["roster"]
    assert RosterFile(path).load() == some(2)
    RosterFile(path).save(some(3))


def test_a_disk_that_is_full_after_part_of_the_file_keeps_the_old_roster(path: Path) -> None:
    """The kernel's own bound: some of the bytes are written, then no more."""
    RosterFile(path).save(some(2))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, hard))
    try:
        with pytest.raises(DiskFull, match="file too large"):
            RosterFile(path).save(some(20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [entry.name for entry in path.parent.iterdir()] == ["roster"]
    assert RosterFile(path).load() == some(2)


def test_a_small_disk_that_is_really_full(path: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if mount is None or umount is None or sys.platform != "linux":
        pytest.skip("no mount command of Linux: a disk that is really full was NOT tested")
    options = ["-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)]
    mounted = subprocess.run([mount, *options], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(
            f"no file system may be mounted here: NOT tested with a full one ({mounted.stderr.strip()})"
        )
    try:
        file = RosterFile(small / "roster")
        file.save(some(20))
        (small / "filler").write_bytes(bytes(32 << 10))
        with pytest.raises(DiskFull, match="no space left"):
            file.save(some(60))
        assert file.load() == some(20)
        (small / "filler").unlink()
        file.save(some(60))
        assert file.load() == some(60)
    finally:
        subprocess.run([umount, str(small)], check=True)


def test_a_folder_or_a_pipe_in_the_place_of_the_roster_is_refused(path: Path) -> None:
    """Neither read nor waited for."""
    path.mkdir()
    with pytest.raises(Forbidden, match="not a file"):
        RosterFile(path).load()
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(Forbidden, match="not a file"):
        RosterFile(path).load()


def test_a_folder_that_is_gone_is_told(path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        RosterFile(path / "deeper").save(some(1))


# ---- Kills -----------------------------------------------------------------------------------------------


def kill_writers(folder: Path, count: int) -> int:
    """How many of the kills came amid a write."""
    writer = Path(__file__).with_name("roster_writer.py")
    done = subprocess.run(
        [sys.executable, str(writer), str(folder), str(count), "1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    lost, acknowledged, amid, *left = done.stdout.split()
    assert lost == "0"
    assert int(acknowledged) >= count
    assert left == ["roster"]
    return int(amid)


def test_killed_writers_lose_nothing_that_they_acknowledged(tmp_path: Path) -> None:
    kill_writers(tmp_path, 25)


@pytest.mark.long
def test_500_killed_writers_lose_nothing_that_they_acknowledged(tmp_path: Path) -> None:
    assert kill_writers(tmp_path, 500) > 0  # or the kills would have met nothing


def test_it_is_on_the_disk_before_it_has_its_name(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill leaves the page cache alone; only the order of the calls shows what a power cut would do."""
    calls: list[str] = []
    for name in ("write", "fsync"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, real=real: (calls.append(name), real(*a))[1])
    real_replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda *a: (calls.append("rename"), real_replace(*a))[1])
    durable.replace(path, b"x")
    assert calls == ["write", "fsync", "rename", "fsync"]
