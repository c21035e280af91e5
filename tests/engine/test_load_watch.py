"""A load goes on while its worker reads, takes memory or computes; one that stands still is given up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from fleetd import limits
from fleetd.engine.daemon_side.load_watch import LoadWatch
from fleetd.engine.protocol import Loading
from fleetd.errors import EngineStalled
from fleetd.hardware.process_work import ProcessWork, work_of
from fleetd.limits import MIB
from fleetd.plan.load_times import stall_s

DID = ProcessWork(5 * MIB, 5 * MIB, 5.0)


def watched() -> LoadWatch:
    watch = LoadWatch("m", 60.0, Loading("starting"), 0.0)
    watch.looked(DID, 1.0)
    return watch


def test_a_load_that_does_nothing_is_over_in_time() -> None:
    watch = watched()
    watch.looked(DID, 61.0)
    assert watch.over(61.0) is None
    stalled = watch.over(61.1)
    assert isinstance(stalled, EngineStalled)
    assert "read and computed nothing for 60 s" in stalled.message


@pytest.mark.parametrize(
    "more", [{"read_bytes": 6 * MIB}, {"resident_bytes": 6 * MIB}, {"cpu_s": 5.01}], ids=str
)
def test_whatever_a_load_does_gives_it_time(more: dict[str, float]) -> None:
    watch = watched()
    watch.looked(replace(DID, **more), 50.0)
    assert watch.over(110.0) is None
    assert watch.over(110.1) is not None


def test_what_a_worker_says_gives_it_time() -> None:
    watch = watched()
    watch.told(Loading("verifying", 1, 9), 50.0)
    assert watch.over(110.0) is None


def test_a_load_that_computes_without_end_is_over_some_time() -> None:
    watch = LoadWatch("m", 60.0, Loading("starting"), 0.0)
    for second in range(int(limits.ENGINE_LOAD_S) + 1):
        watch.looked(ProcessWork(cpu_s=second), second)
        assert watch.over(second) is None
    late_s = limits.ENGINE_LOAD_S + 1
    watch.looked(ProcessWork(cpu_s=late_s), late_s)
    assert "did not load within" in str(watch.over(late_s))


def test_reading_is_told_by_what_was_read_or_taken() -> None:
    """However slowly: a model that takes an hour to read has that hour."""
    watch = watched()
    watch.told(Loading("verifying", 3 * MIB, 9 * MIB), 2.0)
    assert watch.looked(replace(DID, read_bytes=9 * MIB), 3.0) == Loading("verifying", 3 * MIB, 9 * MIB)
    watch.told(Loading("reading", 0, 8 * MIB), 4.0)
    late_s = 4.0 + 2 * limits.ENGINE_LOAD_S
    for at_s, read, taken, done in ((5.0, 10, 5, 1), (6.0, 10, 9, 4), (late_s, 10, 8, 4), (late_s, 40, 9, 8)):
        found = watch.looked(ProcessWork(read * MIB, taken * MIB, 5.0), at_s)
        assert found == Loading("reading", done * MIB, 8 * MIB)
    assert watch.over(late_s) is None
    assert watch.over(late_s + 61.0) is not None


def test_a_slow_machine_has_several_times_what_a_load_takes_there() -> None:
    assert stall_s(0.0) == stall_s(limits.LOAD_STALL_S / limits.LOAD_LATE) == limits.LOAD_STALL_S
    assert stall_s(30.0) == limits.LOAD_LATE * 30.0
    assert stall_s(1e9) == limits.ENGINE_LOAD_S


def test_the_work_of_a_process_is_read(tmp_path: Path) -> None:
    before = work_of(os.getpid())
    (tmp_path / "file").write_bytes(bytes(MIB))
    assert len((tmp_path / "file").read_bytes()) == MIB
    found = work_of(os.getpid())
    assert found.resident_bytes > MIB
    assert found.cpu_s >= before.cpu_s > 0
    # macOS does not tell what was read.
    assert found.read_bytes - before.read_bytes >= MIB or found.read_bytes == 0
    assert work_of(0x7FFFFFFF) == ProcessWork()
