"""A database that fails at one statement, at each of them in turn, in every way that SQLite can say."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from failing_database import FAULTS, FailingDatabase

from fleetd.control.prefill_plan import OptionView
from fleetd.control.prefill_trace import Trace
from fleetd.engine.protocol import Timings, Usage
from fleetd.requests.ledger import Ledger, Reservation
from fleetd.requests.traces import Traces
from fleetd.storage.store import Store, StoreUnavailable

WHOLE = {"settled": "settled", "refunded": "refunded", "open": "reserved"}
AT_S = 1_790_000_000.0
CHOSEN = OptionView("local", ["this"], 1.0)


async def day(path: Path) -> None:
    """All that a daemon asks of its database; only where it says so may anything be raised."""
    store = Store(path)
    ledger, traces = Ledger(store, now=lambda: AT_S), Traces(store)

    def allowed(work: Callable[[], object]) -> None:
        try:
            work()
        except StoreUnavailable:
            pass

    allowed(ledger.recover)
    for name in ("settled", "refunded", "open"):
        row = Reservation(name, "m", "this", "chat", AT_S)
        await ledger.reserve(row)
        if name == "settled":
            ledger.settle(row, Usage(prompt_tokens=1), Timings(), "stop")
        elif name == "refunded":
            ledger.refund(row, "engine_died")
    traces.record(Trace("settled", AT_S, "m", 1, 0, CHOSEN, [], [], "local", "exact", 1.0, 1.0))
    allowed(lambda: ledger.prune(3))
    assert len(ledger.usage(1).rows) <= 1
    assert len(traces.newest(5).traces) <= 1
    allowed(store.check)
    await asyncio.to_thread(store.close)


@pytest.mark.one_loop
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_database_that_fails_at_any_statement_costs_no_more_than_that(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str
) -> None:
    statement = 0
    while True:
        path, database = tmp_path / f"{statement}.db", FailingDatabase(statement, fault)
        with monkeypatch.context() as patch:
            patch.setattr(sqlite3, "connect", database.connecting())
            await day(path)
        # The next day is a usual one, on the same file.
        store = Store(path)
        await Ledger(store).reserve(Reservation("after", "m", "this", "chat", AT_S))
        states = store.call(lambda db: dict(db.execute("SELECT request_id, state FROM usage").fetchall()))
        assert states.pop("after") == "reserved"
        wrong = [name for name, state in states.items() if state not in (WHOLE[name], "reserved")]
        assert wrong == []
        if fault != "damaged":  # then the file is moved aside, and a new one is begun
            # One write is lost at most: a row, or what closes it, which the next start refunds.
            assert len(WHOLE.items() - states.items()) <= 1
        assert store.check() == []
        store.close()
        if not database.failed:
            assert statement > 20
            assert states == WHOLE
            return
        statement += 1


def test_a_damaged_file_that_cannot_be_moved_is_an_unusable_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "fleetd.db"
    path.write_bytes(b"not a database at all\n" * 100)
    store = Store(path)

    def refuse(self: Path, target: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        with pytest.raises(StoreUnavailable, match="Read-only"):
            Ledger(store).recover()
    assert Ledger(store).recover() == 0
    store.close()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE sqlite_master SET name = CAST(x'c4c4' AS TEXT), sql = 'rubbish' WHERE name = 'usage'",
        "UPDATE usage SET model = CAST(x'c4c4' AS TEXT)",
    ],
    ids=["its schema", "a row"],
)
def test_a_file_in_which_a_text_is_none_is_moved_aside(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "fleetd.db"
    store = Store(path)
    store.call(
        lambda db: db.execute(
            "INSERT INTO usage (request_id, started_s, model, node, route, state)"
            " VALUES ('r', ?, 'm', 'n', 'chat', 'settled')",
            (AT_S,),
        )
    )
    store.close()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("PRAGMA writable_schema = ON")
        db.execute(damage)
    store = Store(path)
    ledger = Ledger(store, now=lambda: AT_S)
    assert ledger.recover() == 0
    assert ledger.usage(1).rows == []
    assert store.check() == []
    assert list(tmp_path.glob("fleetd.db.damaged-*"))
    store.close()
