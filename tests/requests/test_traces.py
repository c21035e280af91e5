"""Traces on the disk: bounded, newest first, and never in the way of an answer."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from fleetd import limits
from fleetd.control.prefill_plan import OptionView, StepView
from fleetd.control.prefill_trace import Trace, TraceStep
from fleetd.requests.traces import Traces
from fleetd.storage.store import Store

CHOSEN = OptionView("layers", ["mini", "this"], 1.5, [StepView("prefill", 1.0)], chosen=True, cuts=[0, 3, 4])
LOSER = OptionView("local", ["this"], 3.0, code="slower", reason="3.0 s here alone.")


def trace(request_id: str, at_s: float = 1.0) -> Trace:
    steps = [TraceStep("chunk 1", "mini", 0.1, 0.6, 0.5, 1000, 0)]
    told = Trace(request_id, at_s, "m", 1000, 10, CHOSEN, [LOSER], steps, "shared", "equivalent")
    return replace(told, prefill_s=1.4, ttft_s=1.6)


def test_a_trace_comes_back_as_it_was(store: Store) -> None:
    traces = Traces(store)
    traces.record(trace("r1"))
    assert traces.newest(20).traces == [trace("r1")]


def test_the_newest_come_first_and_one_can_be_named(store: Store) -> None:
    traces = Traces(store)
    for number in range(5):
        traces.record(trace(f"r{number}"))
    assert [found.id for found in traces.newest(3).traces] == ["r4", "r3", "r2"]
    assert [found.id for found in traces.newest(3, "r1").traces] == ["r1"]
    assert traces.newest(3, "r9").traces == []


def test_a_request_is_found_by_the_id_that_its_client_was_told(store: Store) -> None:
    """Every choice has one of its own, and one from another machine has more behind that."""
    traces = Traces(store)
    for found in ("cmpl-ab-0", "cmpl-ab-1.c0ffee", "cmpl-abc-0", "cmpl-ab"):
        traces.record(trace(found))
    ids = [found.id for found in traces.newest(9, "cmpl-ab").traces]
    assert ids == ["cmpl-ab", "cmpl-ab-1.c0ffee", "cmpl-ab-0"]
    assert [found.id for found in traces.newest(9, "cmpl-ab-0").traces] == ["cmpl-ab-0"]


def test_a_listener_is_told_of_each_that_ended_since_it_asked(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "EVENT_TRACES", 3)
    traces = Traces(store)
    traces.record(trace("before"))
    number, ended = traces.ended(-1)
    assert ended == []
    assert traces.ended(number) == (number, [])
    for name in ("a", "b"):
        traces.record(trace(name))
    number, ended = traces.ended(number)
    assert [found.id for found in ended] == ["a", "b"]
    for name in ("c", "d", "e", "f"):
        traces.record(trace(name))
    # One that looks too seldom misses the oldest.
    assert [found.id for found in traces.ended(number)[1]] == ["d", "e", "f"]


@pytest.mark.parametrize("damage", [b"", b"\xc1", b"\x81\xa2id\xa1\xff", b"\x91" * 100_000])
def test_a_damaged_trace_is_left_out(store: Store, damage: bytes) -> None:
    """A disk may flip any bit, also one in a text."""
    traces = Traces(store)
    traces.record(trace("damaged"))
    traces.record(trace("sound"))
    store.call(lambda db: db.execute("UPDATE trace SET body = ? WHERE request_id = 'damaged'", (damage,)))
    assert [found.id for found in traces.newest(9).traces] == ["sound"]


def test_only_so_many_are_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TRACES", 3)
    traces = Traces(store)
    for number in range(5):
        traces.record(trace(f"r{number}"))
    assert [found.id for found in traces.newest(10).traces] == ["r4", "r3", "r2"]


def test_what_goes_on_takes_the_place_of_what_it_was_and_pushes_no_other_out(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TRACES", 3)
    traces = Traces(store)
    traces.record(trace("before"))
    for number in range(10):
        traces.record(replace(trace("long", 2.0), took_s=float(number)))
        if number == 4:
            traces.record(trace("meanwhile"))
    found = traces.newest(10).traces
    assert [each.id for each in found] == ["long", "meanwhile", "before"]
    assert found[0].took_s == 9.0
    # Another request under the same name is another one.
    traces.record(trace("long", 3.0))
    assert [each.id for each in traces.newest(10).traces] == ["long", "long", "meanwhile"]


def test_a_disk_that_fails_costs_a_line_in_the_log_and_nothing_else(tmp_path: Path) -> None:
    clock = iter([0.0, 1.0, 2.0, limits.REPEAT_LOG_S + 1]).__next__
    broken = Store(tmp_path / "no-folder" / "db")
    traces = Traces(broken, monotonic=clock)
    with capture_logs() as logs:
        traces.record(trace("r1"))
        assert traces.newest(3).traces == []
        broken.close()
        traces.record(trace("r2"))
        assert traces.newest(3).traces == []
    assert [entry["event"] for entry in logs] == ["traces.degraded"] * 2


def test_one_of_another_version_is_left_out(store: Store) -> None:
    traces = Traces(store)
    traces.record(trace("r1"))

    def foreign(db: sqlite3.Connection) -> None:
        db.execute("INSERT INTO trace (request_id, at_s, body) VALUES ('r2', 0, ?)", (b"\x81\xa1x\x01",))

    store.call(foreign)
    assert [found.id for found in traces.newest(3).traces] == ["r1"]
