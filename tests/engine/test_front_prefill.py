"""The last block comes first: the prompt is computed towards what comes."""

from __future__ import annotations

import socket
import threading

import pytest
from disk_worker import BLOCK, Worker, settings_in
from two_disks import (
    PROMPT,
    WHOLE,
    TwoMachines,
    damaged,
    every_byte,
    first_then,
    forget_exact,
    gone,
    keep_as_equivalent,
)

from fleetd.cache.block_store import BlockStore
from fleetd.cache.pricing import PrefillCost
from fleetd.engine.layers.stage import Stage
from fleetd.engine.prefixes.front_prefill import FrontPrefill
from fleetd.engine.prefixes.prefix_cache import DENSE, EQUIVALENT
from fleetd.engine.protocol import (
    Cancel,
    Failed,
)
from fleetd.engine.shared_prefill.sharable import Sharable
from fleetd.sealed.stream import SealedSender

pytestmark = pytest.mark.usefixtures("on_cpu", "patient", "short_prompts")


QUICK = PrefillCost(token_s=1e-9)


def once_the_last_came(machines: TwoMachines) -> FrontPrefill:
    """What computes the beginning, once the last block is here. Till then it is too slow to compute any."""
    scheduler = machines.here.scheduler
    while (fetching := scheduler._prefilling[0].fetching) is None or fetching.front is None:
        machines.here.turn()
    front = fetching.front
    while front.lowest == front._last:
        machines.here.turn()
    front._cost = QUICK
    return front


def test_a_machine_that_computes_slowly_waits_for_all_blocks(machines: TwoMachines) -> None:
    machines.ask()
    machines.send(machines.honest, last_first=True)
    done, told = machines.finish()
    assert (done.usage.cached_tokens, done.timings.fetched_tokens) == (WHOLE * BLOCK, WHOLE * BLOCK)
    assert told is not None
    assert (told.blocks, told.code) == (WHOLE, "")


def test_the_beginning_is_computed_while_the_rest_comes(machines: TwoMachines) -> None:
    computed = threading.Event()
    machines.ask()
    # The second one from the end comes only when the first block has been computed.
    machines.send(first_then(1, lambda: computed.wait(60) or None, machines), last_first=True)
    front = once_the_last_came(machines)
    while front.computed < BLOCK:
        machines.here.turn()
    computed.set()
    done, told = machines.finish()
    assert told is not None
    assert told.code == ""
    fetched = done.timings.fetched_tokens
    assert fetched in (BLOCK, 2 * BLOCK)
    assert told.blocks * BLOCK == fetched
    # What was computed here is not called cached.
    assert done.usage.cached_tokens == fetched
    assert done.timings.prefill_s > 0


def test_what_lies_between_is_computed_where_the_other_machine_leaves(machines: TwoMachines) -> None:
    machines.ask()
    machines.send(first_then(1, lambda: None, machines), last_first=True)
    once_the_last_came(machines)
    done, told = machines.finish()
    assert told is not None
    assert (done.usage.cached_tokens, done.timings.fetched_tokens, told.blocks) == (BLOCK, BLOCK, 1)


def test_what_was_computed_meanwhile_counts_where_nothing_comes(machines: TwoMachines) -> None:
    machines.here.tier.cost = QUICK
    machines.ask()
    machines.send(gone, last_first=True)
    done, _ = machines.finish()
    assert (done.usage.cached_tokens, done.timings.fetched_tokens) == (0, 0)


def test_the_other_end_is_not_trusted_because_this_one_was_computed_here(machines: TwoMachines) -> None:
    machines.here.tier.cost = QUICK
    machines.ask()
    machines.send(damaged(machines, every_byte), last_first=True)
    done, told = machines.finish()
    assert (done.timings.fetched_tokens, done.usage.cached_tokens) == (0, 0)
    assert told is None or told.blocks == 0


def test_a_prompt_goes_on_from_memory_towards_what_comes(machines: TwoMachines) -> None:
    machines.here.ask("begun", PROMPT[: BLOCK + 10])
    machines.ask()
    machines.send(first_then(1, lambda: None, machines), WHOLE - 1, last_first=True)
    once_the_last_came(machines)
    done, _ = machines.finish()
    assert done.timings.fetched_tokens == BLOCK
    # The answer to the first one was the next token here.
    assert done.usage.cached_tokens == BLOCK + 10 + BLOCK


def test_without_memory_for_both_ends_the_prompt_waits(machines: TwoMachines) -> None:
    machines.here.tier.cost = QUICK
    budget = machines.here.scheduler.budget
    budget.budget_bytes = budget.sizes.of(len(PROMPT) + 300)
    machines.ask()
    machines.send(machines.honest, last_first=True)
    done, _ = machines.finish()
    assert done.timings.fetched_tokens == WHOLE * BLOCK


def test_a_request_that_is_cancelled_half_way_leaves_what_it_computed(machines: TwoMachines) -> None:
    over = threading.Event()
    machines.ask()
    machines.send(first_then(1, lambda: over.wait(60) and None, machines), last_first=True)
    scheduler, front = machines.here.scheduler, once_the_last_came(machines)
    while front.computed < BLOCK:
        machines.here.turn()
    scheduler.tell(Cancel("second"))
    assert machines.here.finish("second").reason == "cancelled"
    over.set()
    scheduler.validate()
    assert scheduler.prefix.longest(PROMPT, DENSE) >= BLOCK


def test_what_goes_on_from_another_accelerators_numbers_is_never_kept_as_exact(
    machines: TwoMachines,
) -> None:
    model, own, over = machines.model, settings_in(machines.root / "own"), threading.Event()
    keep_as_equivalent(Worker(model, machines.tokenizer, own), PROMPT[: BLOCK + 10])
    forget_exact(own, machines, PROMPT[: BLOCK + 10])
    machines.here.stop()
    sharable = Sharable.of(Stage.of(model), "cpu", {"mlx-lm": "1"})
    machines.here = Worker(model, machines.tokenizer, own, sharable=sharable)
    prefix = machines.here.scheduler.prefix
    machines.ask(shared=True)
    machines.send(first_then(1, lambda: over.wait(60) and None, machines), WHOLE - 1, last_first=True)
    front = once_the_last_came(machines)
    while front.computed < BLOCK // 2:
        machines.here.turn()
    machines.here.scheduler.tell(Cancel("second"))
    assert machines.here.finish("second").reason == "cancelled"
    over.set()
    computed = prefix.longest(PROMPT, EQUIVALENT)
    assert computed > BLOCK, "it is kept, as what it is"
    assert prefix.longest(PROMPT, DENSE) == 0
    machines.here.stop()
    store = BlockStore(own)
    assert store.find(machines.here.tier._names(PROMPT, DENSE, local_only=False)).blocks == 0
    store.close()
    machines.here = Worker(model, machines.tokenizer, own)


def test_a_prompt_that_cannot_be_computed_meanwhile_ends_the_fetch(
    machines: TwoMachines, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung_up = threading.Event()

    def waits(sock: socket.socket, sender: SealedSender, names: list[bytes]) -> None:
        while sock.recv(1 << 16):
            pass
        hung_up.set()

    def fails(front: FrontPrefill) -> int:
        raise RuntimeError("no memory is left")

    monkeypatch.setattr(FrontPrefill, "step", fails)
    machines.here.tier.cost = QUICK
    machines.ask()
    machines.send(waits, last_first=True)
    while not any(isinstance(event, Failed) for event in machines.here.events):
        machines.here.turn()
    assert hung_up.wait(60)
    machines.here.scheduler.validate()
