"""Keys and values from another machine are those that computing gives: asked for, checked and kept."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from disk_worker import BLOCK, SLOW, Worker, settings_in
from two_disks import PROMPT, WHOLE, TwoMachines, forget_exact, keep_as_equivalent

from fleetd import limits
from fleetd.cache import block_names
from fleetd.cache.block_store import BlockStore
from fleetd.engine.layers.stage import Stage
from fleetd.engine.prefixes.fetched_check import FetchedCheck
from fleetd.engine.prefixes.prefix_cache import DENSE, EQUIVALENT
from fleetd.engine.protocol import (
    BLOCKS,
    Accepted,
    Cancel,
    KvMissing,
    KvStored,
    PrefillAlone,
    StreamTag,
)
from fleetd.engine.sequence_state.array_bytes import as_bytes
from fleetd.engine.shared_prefill.sharable import Sharable
from fleetd.sealed.stream import SealedSender

pytestmark = pytest.mark.usefixtures("on_cpu", "patient", "short_prompts")


def test_what_another_machine_has_read_is_not_read_again(machines: TwoMachines) -> None:
    machines.ask()
    lacking = machines.lacking()
    assert len(lacking.names) == len(lacking.computed_s) == WHOLE
    # What came is checked before it is of use.
    saved_s = [
        SLOW.seconds(0, end) - SLOW.check_s(end, end // BLOCK * lacking.block_bytes, states=False)
        for end in range(BLOCK, (WHOLE + 1) * BLOCK, BLOCK)
    ]
    assert lacking.computed_s == pytest.approx(saved_s)
    assert lacking.computed_s[0] == pytest.approx(BLOCK - limits.SHARE_SPOT_TOKENS, abs=0.1)
    machines.send(machines.honest)
    done, told = machines.finish()
    assert (done.usage.cached_tokens, done.timings.fetched_tokens) == (WHOLE * BLOCK, WHOLE * BLOCK)
    assert told is not None
    assert (told.blocks, told.n_bytes, told.code) == (WHOLE, WHOLE * lacking.block_bytes, "")


def test_what_came_lies_on_the_own_disk_afterwards(
    machines: TwoMachines, model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    machines.ask()
    machines.send(machines.honest)
    machines.finish()
    machines.here.stop()
    again = Worker(model, tokenizer, settings_in(tmp_path / "here"))
    done = again.ask("third", PROMPT, fetches=True)
    assert done.timings.restored_tokens == WHOLE * BLOCK
    assert not [e for e in again.events if isinstance(e, KvMissing)]
    again.stop()


def test_only_what_lacks_is_asked_for(machines: TwoMachines) -> None:
    machines.here.ask("begun", PROMPT[: BLOCK + 10])
    machines.ask()
    assert len(machines.lacking().names) == WHOLE - 1
    machines.send(machines.honest, WHOLE - 1)
    done, _ = machines.finish()
    assert done.timings.fetched_tokens == (WHOLE - 1) * BLOCK
    assert done.usage.cached_tokens == WHOLE * BLOCK


def test_a_machine_that_has_less_than_it_said_gives_what_it_has(machines: TwoMachines) -> None:
    def two(sock: socket.socket, sender: SealedSender, names: list[bytes]) -> None:
        machines.honest(sock, sender, names[:2])

    machines.ask()
    machines.send(two)
    done, told = machines.finish()
    assert done.timings.fetched_tokens == 2 * BLOCK
    assert told is not None
    assert told.code == ""


def test_nothing_comes_where_the_daemon_says_so(machines: TwoMachines) -> None:
    machines.ask()
    machines.lacking()
    machines.decide(0)
    done, told = machines.finish()
    assert (done.timings.fetched_tokens, told) == (0, None)


def test_a_daemon_that_says_nothing_is_not_waited_for(
    machines: TwoMachines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FETCH_DECIDE_S", 0.05)
    machines.ask()
    done, told = machines.finish()
    assert (done.timings.fetched_tokens, told) == (0, None)


def test_a_prompt_that_may_not_leave_is_not_asked_for(machines: TwoMachines) -> None:
    machines.ask(local_only=True)
    machines.finish()
    assert not [e for e in machines.here.events if isinstance(e, KvMissing)]


def test_what_came_is_checked_without_a_pause_between_the_steps(machines: TwoMachines) -> None:
    machines.ask()
    machines.send(machines.honest)
    sequence = machines.here.scheduler._prefilling[0]
    while (fetching := sequence.fetching) is None or fetching._thread is None:
        machines.here.turn()
    fetching._thread.join()
    while sequence.fetching is not None:
        assert machines.here.scheduler._ready
        machines.here.turn()
    machines.finish()


def test_a_fetch_lasts_from_the_decision_on(machines: TwoMachines) -> None:
    machines.ask()
    machines.lacking()
    fetching = machines.here.scheduler._prefilling[0].fetching
    assert fetching is not None
    # Asking took very long, the decision is some time ago.
    fetching._begun_s -= 9000.0
    machines.send(machines.honest, since_s=1000.0)
    done, told = machines.finish()
    assert told is not None
    assert 1000.0 <= told.seconds < 9000.0
    assert done.timings.fetch_s >= 9000.0


def test_memory_for_what_may_come_is_made_while_the_others_are_asked(machines: TwoMachines) -> None:
    machines.ask()
    machines.lacking()
    fetching = machines.here.scheduler._prefilling[0].fetching
    assert fetching is not None
    made = []
    while fetching._room_left is not None:
        made.append(len(fetching._parts))
        machines.here.turn()
    # A layer in a turn, as long as it may be for nothing.
    assert made == [1, 2]
    machines.send(machines.honest)
    done, _ = machines.finish()
    assert done.timings.fetched_tokens == WHOLE * BLOCK


def test_what_came_is_looked_at_in_turns(machines: TwoMachines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FETCH_TURN_S", 0.0)
    waited_for = threading.Event()

    def then(sock: socket.socket, sender: SealedSender, names: list[bytes]) -> None:
        waited_for.wait(60)
        machines.honest(sock, sender, names)

    machines.ask()
    machines.send(then)
    sequence = machines.here.scheduler._prefilling[0]
    while (fetching := sequence.fetching) is None or fetching._thread is None:
        machines.here.turn()
    # The turn that begins to wait would take the first step, too, if all had come by then.
    waited_for.set()
    fetching._thread.join()
    turns, steps = 0, machines.here.scheduler._figures().steps
    while sequence.fetching is not None:
        machines.here.turn()
        turns += 1
    # A daemon that hears of no steps takes its worker for stalled.
    assert machines.here.scheduler._figures().steps >= steps + turns
    # One for each layer, one that computes at the end and one at a drawn place, one to take it.
    assert turns == 2 + 2 + 1
    assert machines.finish()[0].timings.fetched_tokens == WHOLE * BLOCK


def test_what_came_is_not_copied_to_be_checked(
    machines: TwoMachines, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = FetchedCheck._compute
    stayed: list[bool] = []

    def places(cache: list[Any]) -> list[int]:
        return [as_bytes(array).ctypes.data for part in cache for array in (part.keys, part.values)]

    def watched(
        self: FetchedCheck, cache: list[Any], start: int, stop: int, *, onward: bool
    ) -> Generator[None, None, int]:
        before = places(cache)
        done = yield from compute(self, cache, start, stop, onward=onward)
        stayed.append(places(cache) == before)
        return done

    monkeypatch.setattr(FetchedCheck, "_compute", watched)
    machines.ask()
    machines.send(machines.honest)
    assert machines.finish()[0].timings.fetched_tokens == WHOLE * BLOCK
    assert stayed == [True, True]


def test_a_request_that_is_cancelled_meanwhile_leaves_nothing(machines: TwoMachines) -> None:
    over = threading.Event()

    def waits(sock: socket.socket, sender: SealedSender, names: list[bytes]) -> None:
        over.wait(60)

    machines.ask()
    machines.send(waits)
    machines.here.turn()
    machines.here.scheduler.tell(Cancel("second"))
    assert machines.here.finish("second").reason == "cancelled"
    over.set()
    machines.here.scheduler.validate()


def test_a_worker_tells_which_blocks_a_prompt_fills_if_others_may_know(machines: TwoMachines) -> None:
    def told(name: str, **fields: Any) -> list[KvStored]:
        machines.here.ask(name, PROMPT, **fields)
        return [e for e in machines.here.events if isinstance(e, KvStored)]

    assert told("not asked") == []
    assert told("stays", tells_blocks=True, local_only=True) == []
    (kept,) = told("asked", tells_blocks=True)
    # By the names under which another machine asks for them.
    store = BlockStore(machines.settings)
    assert store.find([block_names.kept_as(name, local_only=False) for name in kept.names]).blocks == WHOLE
    store.close()


def test_a_stream_that_is_not_wanted_any_more_is_closed(machines: TwoMachines) -> None:
    machines.ask()
    machines.lacking()
    near, far = socket.socketpair()
    with near, far:
        machines.here.scheduler.put_stream(StreamTag("second", BLOCKS, os.urandom(32), "connector"), near)
        machines.decide(0)
        assert machines.finish()[1] is None
        assert near.fileno() == -1


@pytest.mark.parametrize("where", ["there", "here"])
def test_an_answer_that_begins_with_other_numbers_is_labelled_wherever_these_lie(
    where: str, machines: TwoMachines
) -> None:
    # Those that another machine keeps, or the own disk's, before blocks of the other one that are exact.
    model, tokenizer, own = machines.model, machines.tokenizer, settings_in(machines.root / "own")
    at, tokens = (machines.settings, PROMPT) if where == "there" else (own, PROMPT[: BLOCK + 10])
    keep_as_equivalent(Worker(model, tokenizer, at), tokens)
    if where == "here":
        forget_exact(own, machines, tokens)
    machines.here.stop()
    sharable = Sharable.of(Stage.of(model), "cpu", {"mlx-lm": "1"})
    machines.here = Worker(model, tokenizer, own, sharable=sharable)
    machines.ask(shared=True)
    lacking = machines.lacking()
    assert len(lacking.equivalent_names) == len(lacking.names) == WHOLE - (where == "here")
    assert not set(lacking.equivalent_names) & set(lacking.names)
    machines.send(machines.honest, len(lacking.names), equivalent=where == "there")
    while not (accepted := [e for e in machines.here.events if isinstance(e, Accepted)]):
        machines.here.turn()
    # The check of what came has computed the rest.
    assert (accepted[0].cached, accepted[0].exact) == (len(PROMPT) - 1, False)
    machines.here.scheduler.tell(PrefillAlone("second"))
    done, told = machines.finish()
    assert done.timings.fetched_tokens == len(lacking.names) * BLOCK
    assert told is not None
    # An exact answer never begins with it.
    assert machines.here.scheduler.prefix.longest(PROMPT, DENSE) == 0
    assert machines.here.scheduler.prefix.longest(PROMPT, EQUIVALENT) == len(PROMPT) - 1


@pytest.mark.parametrize("fields", [{}, {"shared": True, "exact": True}], ids=["not shared", "by its wish"])
def test_a_prompt_whose_answer_must_be_exact_asks_for_no_other_numbers(
    fields: dict[str, bool], machines: TwoMachines
) -> None:
    if fields:
        machines.here.stop()
        sharable = Sharable.of(Stage.of(machines.model), "cpu", {"mlx-lm": "1"})
        own = settings_in(machines.root / "own")
        machines.here = Worker(machines.model, machines.tokenizer, own, sharable=sharable)
    machines.ask(**fields)
    assert machines.lacking().equivalent_names == []
    machines.decide(0)
    machines.finish()
