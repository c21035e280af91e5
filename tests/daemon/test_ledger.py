"""The usage ledger against a model of itself, and against a disk that refuses."""

from __future__ import annotations

import asyncio
import gc
import tempfile
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from fleetd import limits
from fleetd.control.usage_report import UsageTotals
from fleetd.engine.protocol import Timings, Usage
from fleetd.errors import EngineDied
from fleetd.requests.ledger import SCORE_ROUTE, Gain, Ledger, Reservation
from fleetd.storage.store import Store, StoreUnavailable

NOON_S = 1_790_000_000.0
DAY_S = 86_400.0


def row(request_id: str = "r", at_s: float = NOON_S, model: str = "m") -> Reservation:
    return Reservation(request_id, model, "this", "chat", at_s)


def raw(store: Store) -> dict[str, tuple[str, str, int]]:
    """request → (state, reason, completion tokens)."""
    return store.call(
        lambda db: {
            found[0]: tuple(found[1:])
            for found in db.execute("SELECT request_id, state, reason, completion_tokens FROM usage")
        }
    )


USED = Usage(prompt_tokens=10, cached_tokens=4, completion_tokens=5)
TOOK = Timings(queue_s=0.5, prefill_s=1.0, decode_s=2.0)


async def test_reserve_then_settle(store: Store, ledger: Ledger) -> None:
    await ledger.reserve(row())
    assert raw(store) == {"r": ("reserved", "", 0)}
    ledger.settle(row(), USED, TOOK, "stop")
    assert raw(store) == {"r": ("settled", "stop", 5)}


async def test_a_refund_bills_nothing(store: Store, ledger: Ledger) -> None:
    await ledger.reserve(row())
    ledger.refund(row(), "engine_died")
    assert raw(store) == {"r": ("refunded", "engine_died", 0)}


async def test_an_entry_is_settled_with_what_was_noted_or_refunded_with_what_ended_it(
    store: Store, ledger: Ledger
) -> None:
    async with ledger.entry(row("done")) as spent:
        assert raw(store)["done"] == ("reserved", "", 0)
        spent.usage, spent.timings = USED, TOOK
    with pytest.raises(EngineDied):
        async with ledger.entry(row("died")):
            raise EngineDied("It is gone.")
    with pytest.raises(asyncio.CancelledError):
        async with ledger.entry(row("left")):
            raise asyncio.CancelledError
    assert raw(store) == {
        "done": ("settled", "stop", 5),
        "died": ("refunded", "engine_died", 0),
        "left": ("refunded", "cancelled", 0),
    }


async def test_the_first_closing_wins(store: Store, ledger: Ledger) -> None:
    await ledger.reserve(row())
    ledger.refund(row(), "engine_died")
    ledger.settle(row(), USED, TOOK, "stop")
    assert raw(store) == {"r": ("refunded", "engine_died", 0)}


async def test_a_crash_is_refunded_at_the_next_start(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    await Ledger(store).reserve(row("lost"))
    await Ledger(store).reserve(row("kept"))
    Ledger(store).settle(row("kept"), USED, TOOK, "stop")
    store.close()
    store = Store(tmp_path / "db")
    assert Ledger(store).recover() == 1
    assert raw(store) == {"lost": ("refunded", "crash", 0), "kept": ("settled", "stop", 5)}
    assert Ledger(store).recover() == 0
    store.close()


async def test_usage_adds_up_by_day_and_model(store: Store) -> None:
    ledger = Ledger(store, now=lambda: NOON_S)
    for number, (model, days_ago) in enumerate([("a", 0), ("a", 0), ("b", 0), ("a", 1), ("a", 8)]):
        this = row(str(number), NOON_S - days_ago * DAY_S, model)
        await ledger.reserve(this)
        if number == 1:
            ledger.refund(this, "engine_died")
        else:
            ledger.settle(this, USED, TOOK, "stop")
    report = ledger.usage(7)
    assert [(r.model, r.requests, r.failed, r.completion_tokens) for r in report.rows] == [
        ("a", 2, 1, 5),
        ("b", 1, 0, 5),
        ("a", 1, 0, 5),
    ]
    assert report.rows[0].day > report.rows[2].day
    assert report.totals == UsageTotals(4, 1, 30, 12, 15, 3.0, 6.0)
    assert ledger.usage(9).totals.requests == 5
    assert len(ledger.usage(1).rows) == 2
    names = {"day", "model", "node", "requests", "failed", "prompt_tokens", "cached_tokens"}
    names |= {"completion_tokens", "prefill_s", "decode_s", "scored_tokens"}
    names |= {"first_tokens", "first_s", "saved_s", "drafts_s", "smart_s", "shared"}
    assert set(msgspec.to_builtins(report)["rows"][0]) == names


async def test_scoring_is_counted_in_tokens_and_is_no_request(store: Store) -> None:
    ledger = Ledger(store, now=lambda: NOON_S)
    await ledger.reserve(row("answer"))
    ledger.settle(row("answer"), USED, TOOK, "stop")
    for number in range(3):
        scored = Reservation(f"answer.score{number}", "m", "this", SCORE_ROUTE, NOON_S)
        await ledger.reserve(scored)
        if number:
            ledger.settle(scored, Usage(prompt_tokens=100), Timings(prefill_s=7.0), "stop")
        else:
            ledger.refund(scored, "declined")
    assert ledger.usage(1).totals == UsageTotals(1, 0, 10, 4, 5, 1.0, 2.0, scored_tokens=200)


async def test_first_tokens_and_what_was_saved_add_up(store: Store) -> None:
    ledger = Ledger(store, now=lambda: NOON_S)
    for name, first_s, saved_s in (("a", 0.5, 3.0), ("b", 1.5, -1.0), ("cancelled", None, 0.0)):
        await ledger.reserve(row(name))
        ledger.settle(row(name), USED, TOOK, "stop", first_s=first_s, gain=Gain(saved_s))
    totals = ledger.usage(1).totals
    assert (totals.requests, totals.first_tokens, totals.first_s, totals.saved_s) == (3, 2, 2.0, 2.0)


async def test_old_rows_are_pruned(store: Store) -> None:
    ledger = Ledger(store, now=lambda: NOON_S)
    for days_ago in (0, 9, 11):
        await ledger.reserve(row(str(days_ago), NOON_S - days_ago * DAY_S))
    assert ledger.prune(10) == 1
    assert set(raw(store)) == {"0", "9"}


async def test_a_clock_that_has_jumped_ahead_makes_no_row_old(store: Store) -> None:
    for days_ago in (0, 9):
        await Ledger(store).reserve(row(str(days_ago), NOON_S - days_ago * DAY_S))
    assert Ledger(store, now=lambda: NOON_S + 1000 * DAY_S).prune(10) == 0
    assert set(raw(store)) == {"0", "9"}


async def test_a_full_disk_costs_one_line_a_minute_and_no_answer(tmp_path: Path) -> None:
    clock_s = [0.0]
    store = Store(tmp_path / "missing" / "db")
    ledger = Ledger(store, monotonic=lambda: clock_s[0])
    unheard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unheard.append(context))
    with capture_logs() as logs:
        for number in range(20):
            await ledger.reserve(row(str(number)))
            ledger.settle(row(str(number)), USED, TOOK, "stop")
        assert ledger.usage(1).rows == []
        assert [line["event"] for line in logs] == ["ledger.degraded"]
        clock_s[0] = limits.REPEAT_LOG_S
        await ledger.reserve(row("later"))
        # Nobody waits long for a reservation; calls keep their order.
        with pytest.raises(StoreUnavailable):
            raw(store)
        assert len(logs) == 2
    (tmp_path / "missing").mkdir()  # the disk is back: the whole row comes with the settlement
    ledger.settle(row("later"), USED, TOOK, "stop")
    assert raw(store) == {"later": ("settled", "stop", 5)}
    store.close()
    gc.collect()
    assert unheard == []  # asyncio has nothing to add to that one line


async def test_a_hung_disk_delays_an_answer_by_a_quarter_second_at_most(
    store: Store, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LEDGER_WAIT_S", 0.01)
    hung = threading.Event()
    store.submit(lambda db: hung.wait())
    await ledger.reserve(row())  # returns although the disk has not
    hung.set()
    assert raw(store) == {"r": ("reserved", "", 0)}


async def test_a_closed_store_does_not_fail_a_request(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    store.close()
    ledger = Ledger(store)
    with capture_logs() as logs:
        await ledger.reserve(row())
        ledger.refund(row(), "draining")
    assert [line["event"] for line in logs] == ["ledger.degraded"]


Step = tuple[str, int, int]
steps = st.lists(
    st.tuples(
        st.sampled_from(["settle", "refund", "again", "restart"]), st.integers(0, 4), st.integers(0, 99)
    ),
    max_size=25,
)


@examples(40)
@given(steps)
def test_any_order_of_steps_matches_the_model(script: list[Step]) -> None:
    """Closings of reserved, unreserved and closed rows, with crashes in between."""
    model: dict[str, tuple[str, str, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "db")
        ledger = Ledger(store)
        for action, number, tokens in script:
            name = str(number)
            open_row = model.get(name, ("reserved", "", 0))[0] == "reserved"
            match action:
                case "settle":
                    ledger.settle(row(name), Usage(completion_tokens=tokens), TOOK, "stop")
                    if open_row:
                        model[name] = ("settled", "stop", tokens)
                case "refund":
                    ledger.refund(row(name), "draining")
                    if open_row:
                        model[name] = ("refunded", "draining", 0)
                case "again":
                    reservation = row(name)
                    store.call(
                        lambda db, r=reservation: db.execute(  # type: ignore[misc]
                            "INSERT INTO usage (request_id, started_s, model, node, route, state)"
                            " VALUES (?, ?, 'm', 'this', 'chat', 'reserved') ON CONFLICT DO NOTHING",
                            (r.request_id, r.at_s),
                        )
                    )
                    model.setdefault(name, ("reserved", "", 0))
                case _:
                    store.close()
                    store = Store(Path(folder) / "db")
                    ledger = Ledger(store)
                    lost = [key for key, value in model.items() if value[0] == "reserved"]
                    assert ledger.recover() == len(lost)
                    model |= dict.fromkeys(lost, ("refunded", "crash", 0))
        assert raw(store) == model
        store.close()


async def test_usage_by_the_hour_has_the_median_and_what_nine_of_ten_met(store: Store) -> None:
    ledger = Ledger(store, now=lambda: NOON_S)
    for number in range(10):
        this = row(str(number), NOON_S - (3600 if number == 9 else 0))
        await ledger.reserve(this)
        ledger.settle(this, USED, TOOK, "stop", first_s=float(number))
    report = ledger.usage(1, "hour")
    assert [(one.requests, one.day[-3:]) for one in report.rows] == [(9, ":00"), (1, ":00")]
    assert report.rows[0].day > report.rows[1].day
    assert [(one.day, one.p50_s, one.p90_s) for one in report.first_token] == [
        (report.rows[0].day, 4.0, 8.0),
        (report.rows[1].day, 9.0, 9.0),
    ]


async def test_what_was_saved_is_split_by_what_saved_it(store: Store) -> None:
    ledger = Ledger(store, now=lambda: NOON_S)
    gains = [Gain(5.0, 1.0, 4.0), Gain(3.0, shared=True), Gain()]
    for number, gain in enumerate(gains):
        await ledger.reserve(row(str(number)))
        ledger.settle(row(str(number)), USED, TOOK, "stop", gain=gain)
    totals = ledger.usage(1).totals
    assert (totals.saved_s, totals.drafts_s, totals.smart_s, totals.shared) == (8.0, 1.0, 4.0, 1)
