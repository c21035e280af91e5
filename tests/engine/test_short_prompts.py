"""A prompt of one chunk waits for at most one chunk of another's, whatever that one waits for or begins with;
and none waits for ever."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny_models
from disk_worker import Worker, settings_in
from turned_pair import TurnedPair
from turned_scheduler import CHUNK, TinyFamily, Turned, drawn, family
from two_disks import TwoMachines

from fleetd.engine.loop.scheduler import PASSING_MOST, PATIENCE_TURNS
from fleetd.engine.measure.memory import KvBudget
from fleetd.engine.protocol import Finished, Prefill, TokenPrompt

pytestmark = pytest.mark.usefixtures("on_cpu", "cpu_installed")
SHORT = 20


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TinyFamily:
    return family(tmp_path_factory.mktemp("llama"), "llama")


def short_prompts() -> Iterator[tuple[str, list[int]]]:
    """Names and prompts that begin in no way alike."""
    for number in itertools.count(100):
        yield f"short{number}", drawn(SHORT, number)


# ---- Beside prompts that are read alone ------------------------------------------------------------------


@pytest.mark.parametrize("longs", [1, 2, 3])
def test_one_that_comes_in_any_turn_is_answered_in_the_next(llama: TinyFamily, longs: int) -> None:
    """A turn is under way when it comes: that is the chunk that it waits for."""
    for arrives in (2, *range(PATIENCE_TURNS, PATIENCE_TURNS + 5)):
        bench = Turned(llama)
        for number in range(longs):
            bench.ask(f"long{number}", drawn(700 + 100 * number, number + 1))
        bench.turn(arrives)
        bench.ask("short", drawn(SHORT, 100))
        assert bench.turns_to("short") == 1, f"it came after {arrives} turns"


def test_several_that_come_at_once_wait_for_one_chunk_and_each_other(llama: TinyFamily) -> None:
    for arrives in (12, *range(PATIENCE_TURNS, PATIENCE_TURNS + 4)):
        bench = Turned(llama)
        for number in range(3):
            bench.ask(f"long{number}", drawn(700 + 100 * number, number + 1))
        bench.turn(arrives)
        for number in range(2):
            bench.ask(f"short{number}", drawn(SHORT, 100 + number))
        assert max(bench.turns_to("short0"), bench.turns_to("short1")) <= 3


def test_long_ones_are_read_on_while_short_ones_never_end(llama: TinyFamily) -> None:
    bench = Turned(llama)
    bench.ask("long", drawn(6 * CHUNK, 1))
    bench.ask("longer", drawn(7 * CHUNK, 2))
    shorts = short_prompts()
    for _ in range(20 * PATIENCE_TURNS):
        if bench.of("long", Finished) and bench.of("longer", Finished):
            break
        bench.ask(*next(shorts))
        bench.turn()
    else:
        pytest.fail("they wait for ever")


def test_a_prompt_that_is_in_memory_but_for_one_chunk_is_a_short_one(llama: TinyFamily) -> None:
    bench = Turned(llama)
    bench.ask("first turn", drawn(900, 1))
    bench.finish()
    bench.ask("long", drawn(500, 2))
    bench.turn(2)
    bench.ask("second turn", drawn(900, 1) + drawn(SHORT, 3))
    assert bench.turns_to("second turn") == 1


# ---- Beside prompts that wait for memory -----------------------------------------------------------------


def test_a_few_short_ones_pass_one_for_which_memory_is_short(llama: TinyFamily) -> None:
    bench = Turned(llama, budget=KvBudget.of(2000 * 1024, 1024), max_streams=16)
    bench.ask("runs", drawn(400, 1), max_tokens=40)
    bench.turns_to("runs")
    bench.ask("waits", drawn(1500, 2))
    bench.turn()
    passed = []
    for name, tokens in itertools.islice(short_prompts(), PASSING_MOST + 2):
        bench.ask(name, tokens)
        bench.turn(2)
        passed.append(bool(bench.of(name, Prefill)))
    assert passed == [True] * PASSING_MOST + [False] * 2
    assert not bench.of("waits", Prefill)
    bench.finish()
    assert bench.of("waits", Finished)


# ---- Beside prompts that begin elsewhere -----------------------------------------------------------------


def read_beside(
    ask: Callable[[str, list[int]], None], turn: Callable[[], None], read: Callable[[str], bool], long: str
) -> int:
    """Ask short prompts, one after the other, until the long one is read. Returns how many there were.

    Each is read in its turn or, if the long one had to have a chunk, in the next; its first token is that of
    the next decode step.

    Args:
        read: the prompt of this name is read.
    """
    for number, (name, tokens) in enumerate(short_prompts()):
        if read(long):
            return number
        assert number < 2000, "the long one waits for ever"
        ask(name, tokens)
        for _ in range(2):
            if not read(name):
                turn()
        assert read(name)
    raise AssertionError


@pytest.mark.parametrize("kind", ["layers", "tokens"])
def test_beside_one_that_is_shared_with_helpers(llama: TinyFamily, kind: str) -> None:
    pair = TurnedPair(llama)
    pair.ask("long", 800)
    pair.share("long", kind)

    def ask(name: str, tokens: list[int]) -> None:
        pair.ask(name, prompt=TokenPrompt(tokens), shared=False)

    def read(name: str) -> bool:
        return any(each.done >= each.total - 1 for each in pair.home.of(name, Prefill))

    assert read_beside(ask, pair.turn, read, "long") > 1
    pair.finish("long")
    assert pair.gave_up("long") == ""
    pair.close()


@pytest.mark.usefixtures("patient")
def test_beside_one_that_comes_from_the_disk(model: Any, tokenizer: Any, tmp_path: Any) -> None:
    prompt = tiny_models.prompt(700)
    first = Worker(model, tokenizer, settings_in(tmp_path))
    first.ask("kept", prompt)
    first.stop()
    worker = Worker(model, tokenizer, settings_in(tmp_path))
    worker.put("long", prompt)
    beside(worker, "long")
    assert worker.finish("long").timings.restored_tokens
    worker.stop()


@pytest.mark.usefixtures("patient", "short_prompts")
@pytest.mark.parametrize("last_first", [False, True])
def test_beside_one_that_comes_from_another_machine(machines: TwoMachines, last_first: bool) -> None:
    machines.ask()
    machines.send(machines.honest, last_first=last_first)
    beside(machines.here, "second")
    done, fetched = machines.finish()
    assert fetched is not None
    assert done.timings.fetched_tokens


def beside(worker: Worker, long: str) -> None:
    def read(name: str) -> bool:
        reports = [each for each in worker.events if isinstance(each, Prefill) and each.id == name]
        return any(each.done >= each.total - 1 for each in reports)

    def ask(name: str, tokens: list[int]) -> None:
        worker.put(name, tokens, max_tokens=1)

    assert read_beside(ask, worker.turn, read, long) > 1
