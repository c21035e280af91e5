"""What another machine sent, and what rests on it, is known as such everywhere, and goes when it must."""

from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx
import pytest
from disk_worker import BLOCK, Worker, blocks_of, restored, settings_in
from kv_blocks import opened
from mlx_lm.models.cache import KVCache
from two_disks import ORIGIN, PROMPT, THERE, WHOLE, TwoMachines

from fleetd.cache import block_names
from fleetd.cache.pricing import PrefillCost
from fleetd.engine.prefixes.prefix_cache import NO_ORIGINS, PrefixCache
from fleetd.engine.protocol import Cancel, ForgetOrigins, KvStored

pytestmark = pytest.mark.usefixtures("on_cpu", "patient", "short_prompts")

FROM_THERE = frozenset([ORIGIN])


def fetched(machines: TwoMachines, **fields: Any) -> list[int]:
    """Let the machine that lacks the prompt fetch it; returns the prompt and its answer."""
    machines.ask(**fields)
    machines.send(machines.honest)
    done, _ = machines.finish()
    assert done.timings.fetched_tokens == WHOLE * BLOCK
    (entry,) = machines.here.scheduler.prefix._entries.values()
    return [int(token) for token in entry.tokens]


def origins(worker: Worker) -> list[frozenset[str]]:
    return [entry.origins for entry in worker.scheduler.prefix._entries.values()]


def test_what_rests_on_what_came_has_come_from_there_too(machines: TwoMachines) -> None:
    answered = fetched(machines)
    assert len(answered) > len(PROMPT), "with its answer"
    machines.here.ask("goes on", [*answered, *PROMPT[:40]])
    machines.here.ask("begins alike", [*PROMPT[: BLOCK + 20], 5, 6, 7])
    machines.here.ask("alone", PROMPT[::-1])
    assert origins(machines.here) == [FROM_THERE, FROM_THERE, NO_ORIGINS]


def test_a_prompt_that_waits_for_another_one_has_its_origins(machines: TwoMachines) -> None:
    machines.ask()
    machines.here.put("follows", [*PROMPT, 9, 9, 9])
    machines.lacking()
    machines.here.turn()
    assert [sequence.awaited is not None for sequence in machines.here.scheduler._prefilling] == [False, True]
    machines.send(machines.honest)
    machines.here.finish("follows")
    machines.finish()
    assert set(origins(machines.here)) == {FROM_THERE}


def test_the_beginning_of_a_cancelled_prompt_has_its_origins(machines: TwoMachines) -> None:
    machines.here.ask("begun", PROMPT[: BLOCK + 10])
    (own,) = machines.here.scheduler.prefix._entries.values()
    machines.here.scheduler.prefix._entries.clear()
    machines.here.scheduler.prefix.nbytes = 0
    machines.here.scheduler.prefix.store(
        [int(token) for token in own.tokens], own.cache, origins=frozenset(["another"])
    )
    machines.here.tier.cost, over = PrefillCost(token_s=1e-9), threading.Event()
    machines.ask()
    machines.send(lambda sock, sender, names: over.wait(60) and None, WHOLE - 1, last_first=True)
    while (fetching := machines.here.scheduler._prefilling[0].fetching) is None or fetching.front is None:
        machines.here.turn()
    while fetching.front.computed < BLOCK // 2:
        machines.here.turn()
    machines.here.scheduler.tell(Cancel("second"))
    assert machines.here.finish("second").reason == "cancelled"
    over.set()
    assert set(origins(machines.here)) == {frozenset(["another"])}


def test_what_came_is_forgotten_in_memory(machines: TwoMachines) -> None:
    fetched(machines)
    machines.here.ask("alone", PROMPT[::-1])
    machines.here.scheduler.tell(ForgetOrigins([ORIGIN]))
    machines.here.turn()
    assert origins(machines.here) == [NO_ORIGINS]
    machines.here.scheduler.validate()


def test_an_answer_that_ends_after_its_beginning_was_forgotten_is_kept_nowhere(machines: TwoMachines) -> None:
    machines.ask()
    machines.send(machines.honest)
    while not machines.here.scheduler.decoding:
        machines.here.turn()
    with opened(settings_in(machines.root / "here")) as store:
        assert store.forget_machine(THERE) == [ORIGIN]
    machines.here.scheduler.tell(ForgetOrigins([ORIGIN]))
    machines.finish()
    assert len(machines.here.scheduler.prefix) == 0
    machines.here.stop()
    assert blocks_of(settings_in(machines.root / "here")) == []


def test_what_was_fetched_is_known_as_such_after_a_restart(machines: TwoMachines, model: Any) -> None:
    fetched(machines)
    machines.here.stop()
    settings = settings_in(machines.root / "here")
    hit = restored(model, settings, PROMPT)
    assert (hit.tokens, hit.origins) == (WHOLE * BLOCK, FROM_THERE)
    with opened(settings) as store:
        store.forget_machine(THERE)
    assert restored(model, settings, PROMPT).tokens == 0
    assert blocks_of(settings) == []


def test_what_was_restored_goes_on_as_from_there(machines: TwoMachines, model: Any, tokenizer: Any) -> None:
    fetched(machines)
    machines.here.stop()
    again = Worker(model, tokenizer, settings_in(machines.root / "here"))
    again.ask("third", [*PROMPT, *PROMPT[:BLOCK]])
    assert origins(again) == [FROM_THERE]
    again.stop()


def test_what_was_fetched_is_not_sent_on(machines: TwoMachines) -> None:
    fetched(machines, tells_blocks=True)
    (kept,) = [event for event in machines.here.events if isinstance(event, KvStored)]
    assert not kept.own
    machines.here.ask("alone", PROMPT[::-1], tells_blocks=True)
    assert [event.own for event in machines.here.events if isinstance(event, KvStored)] == [False, True]
    machines.here.stop()
    names = [block_names.kept_as(name, local_only=False) for name in kept.names]
    with opened(settings_in(machines.root / "here")) as store:
        assert store.find(names).blocks == WHOLE
        assert store.find(names, own=True).blocks == 0
        room = memoryview(bytearray(1 << 24))

        def targets(header: Any) -> list[memoryview]:
            return [room[:size] for size in header.sizes]

        assert store.read(names[0], targets, own=True) is None
        found = store.read(names[0], targets)
        assert found is not None, "it is not forgotten because another machine has asked for it"
        assert found.origins == (ORIGIN,)


def test_a_prompt_that_begins_with_the_same_template_does_not_rest_on_what_came(
    machines: TwoMachines,
) -> None:
    fetched(machines)
    machines.here.ask("another", [*PROMPT[:24], *PROMPT[::-1]])
    assert origins(machines.here) == [FROM_THERE, NO_ORIGINS]


def test_of_two_that_serve_alike_the_one_that_was_computed_here_stays() -> None:
    prefix, tokens = PrefixCache(1 << 20), [1, 2, 3, 4]
    for came in (FROM_THERE, NO_ORIGINS, FROM_THERE):
        rows = KVCache()
        rows.update_and_fetch(mx.zeros((1, 1, 4, 4)), mx.zeros((1, 1, 4, 4)))
        prefix.store(tokens, [rows], origins=came)
    assert [entry.origins for entry in prefix._entries.values()] == [NO_ORIGINS]
    prefix.validate()
