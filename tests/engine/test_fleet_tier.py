"""Keys and values from another machine are those that computing gives, and no failure of it is waited for."""

from __future__ import annotations

import dataclasses
import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import tiny_architectures
import tiny_models
from disk_worker import BLOCK, SLOW, Worker, settings_in
from tiny_architectures import FAMILIES
from two_disks import WHOLE, TwoMachines
from wire_changes import changes

from fleetd import limits
from fleetd.cache import block_names, block_stream
from fleetd.cache.block_file import BlockHeader
from fleetd.cache.block_store import BlockStore
from fleetd.cache.machine_key import MachineKey
from fleetd.cache.pricing import PrefillCost
from fleetd.cache.settings import DiskCacheSettings
from fleetd.engine.fetched_check import FetchedCheck
from fleetd.engine.front_prefill import FrontPrefill
from fleetd.engine.prefix_cache import DENSE, PLAN
from fleetd.engine.protocol import (
    BLOCKS,
    Accepted,
    Cancel,
    Failed,
    Kept,
    Lacking,
    PrefillAlone,
    StreamTag,
)
from fleetd.engine.sequence_state import checkpoints
from fleetd.engine.sequence_state.array_bytes import as_bytes
from fleetd.engine.sequence_state.blocks import ArrivingSnapshot
from fleetd.engine.sequence_state.rings import RingState
from fleetd.engine.shared_prefill.sharable import Sharable
from fleetd.engine.stage import Stage
from fleetd.requests.kv_fetching.choice import checked_by
from fleetd.sealed.stream import SealedSender

pytestmark = pytest.mark.usefixtures("on_cpu", "patient")
# Three blocks and more.
PROMPT = tiny_models.prompt(3 * BLOCK + BLOCK // 2 + 4)


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of three blocks are asked for, of which two lack, and have a state at the end of each."""
    monkeypatch.setattr(limits, "FETCH_LEAST_TOKENS", 2 * BLOCK)
    monkeypatch.setattr(limits, "CHECKPOINT_BLOCK_TOKENS", BLOCK)
    monkeypatch.setattr(limits, "FETCH_CHECK_BLOCKS", 2)


@pytest.fixture
def make_machines(tokenizer: Any, tmp_path: Path) -> Iterator[Callable[..., TwoMachines]]:
    with ExitStack() as stack:

        def make(model: Any, prompt: list[int] = PROMPT) -> TwoMachines:
            made = TwoMachines(model, tokenizer, tmp_path, prompt)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def machines(model: Any, make_machines: Callable[..., TwoMachines]) -> TwoMachines:
    return make_machines(model)


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
    assert not [e for e in again.events if isinstance(e, Lacking)]
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
    assert not [e for e in machines.here.events if isinstance(e, Lacking)]


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


def damaged(
    machines: TwoMachines, change: Callable[[int, int, int, memoryview], None]
) -> Callable[..., None]:
    """Blocks sent with other bytes than those on the disk. ``change`` is told the number of what is sent, and
    of the buffer in it."""

    def work(sock: socket.socket, sender: SealedSender, names: list[bytes]) -> None:
        store = BlockStore(machines.settings)
        count = iter(range(len(names)))

        def read(name: bytes, targets: Callable[[BlockHeader], Any]) -> BlockHeader | None:
            held: list[memoryview] = []

            def kept(header: BlockHeader) -> Any:
                buffers = targets(header)
                held.extend(buffers)
                return buffers

            header = store.read(name, kept)
            number = next(count)
            for part, buffer in enumerate(held):
                change(number, part, len(held), buffer)
            return header

        block_stream.send(sender, names, read)
        store.close()

    return work


def every_byte(number: int, part: int, parts: int, buffer: memoryview) -> None:
    buffer[:] = bytes(b ^ 1 for b in buffer)


def not_a_number(number: int, part: int, parts: int, buffer: memoryview) -> None:
    if number == 1:
        buffer[:4] = b"\xff\xff\xff\x7f"


@pytest.mark.parametrize("change", [every_byte, not_a_number])
def test_other_bytes_are_found_and_not_used(machines: TwoMachines, change: Callable[..., None]) -> None:
    machines.ask()
    machines.send(damaged(machines, change))
    done, told = machines.finish()
    assert (done.timings.fetched_tokens, done.usage.cached_tokens) == (0, 0)
    assert told is not None
    assert (told.code, told.blocks) == ("peer_wrong", 0)


IN_THE_MIDDLE = changes("acceptor", "connector")


@pytest.mark.parametrize(
    ("name", "last_first"),
    [
        # Each change in one of the orders in the quick run.
        pytest.param(name, last_first, marks=() if last_first is bool(number % 2) else pytest.mark.long)
        for number, name in enumerate(IN_THE_MIDDLE)
        for last_first in (False, True)
    ],
)
def test_attack_a_machine_in_the_middle_changes_no_answer(
    machines: TwoMachines, name: str, last_first: bool
) -> None:
    machines.ask()
    # At the payload of the second block that comes, so that no more than two are whole.
    machines.send(machines.honest, last_first=last_first, change=partial(IN_THE_MIDDLE[name], 3))
    done, told = machines.finish()
    assert done.timings.fetched_tokens in (0, BLOCK, 2 * BLOCK)
    assert told is not None
    assert told.code in ("seal_broken", "peer_lost")


def broken_seal(sock: socket.socket, sender: SealedSender, names: list[bytes]) -> None:
    sock.sendall(os.urandom(100_000))


def no_block(sock: socket.socket, sender: SealedSender, names: list[bytes]) -> None:
    sender.send(b"\xff\xff\xff\xff" + bytes(100))
    sender.finish()


def half_a_header(sock: socket.socket, sender: SealedSender, names: list[bytes]) -> None:
    sender.send(b"\x10\x00\x00\x00abc")
    sender.finish()


def gone(sock: socket.socket, sender: SealedSender, names: list[bytes]) -> None:
    pass


@pytest.mark.parametrize("work", [broken_seal, no_block, half_a_header, gone])
def test_a_stream_that_is_not_one_costs_nothing_but_itself(
    machines: TwoMachines, work: Callable[..., None]
) -> None:
    machines.ask()
    machines.send(work)
    done, told = machines.finish()
    assert done.timings.fetched_tokens == 0
    assert told is not None
    assert told.code in ("seal_broken", "peer_lost", "peer_wrong")


def test_a_machine_that_stalls_is_given_up_and_what_came_counts(
    machines: TwoMachines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FETCH_BLOCK_S", 0.5)
    over = threading.Event()

    def stalls(sock: socket.socket, sender: SealedSender, names: list[bytes]) -> None:
        class Stalled(Exception):
            pass

        store = BlockStore(machines.settings)

        def read(name: bytes, targets: Callable[[BlockHeader], Any]) -> BlockHeader | None:
            if name == names[1]:
                raise Stalled
            return store.read(name, targets)

        try:
            block_stream.send(sender, names, read)
        except Stalled:
            over.wait(60)
        store.close()

    machines.ask()
    machines.send(stalls)
    done, told = machines.finish()
    over.set()
    assert done.timings.fetched_tokens in (0, BLOCK)
    assert told is not None
    assert told.code == "peer_late"


def first_block_then_nothing(machines: TwoMachines, over: threading.Event) -> Callable[..., None]:
    """Sends a block, and keeps the stream open."""

    def work(sock: socket.socket, sender: SealedSender, names: list[bytes]) -> None:
        store = BlockStore(machines.settings)

        def read(name: bytes, targets: Callable[[BlockHeader], Any]) -> BlockHeader | None:
            if name == names[1]:
                over.wait(60)
                return None
            return store.read(name, targets)

        block_stream.send(sender, names, read)
        store.close()

    return work


@pytest.mark.parametrize("last_first", [False, True])
def test_attack_a_machine_that_trickles_is_waited_for_no_longer_than_all_may_take(
    machines: TwoMachines, last_first: bool
) -> None:
    over = threading.Event()
    machines.ask()
    # Each single block may take a minute here.
    machines.send(first_block_then_nothing(machines, over), last_first=last_first, within_s=0.5)
    done, told = machines.finish()
    over.set()
    assert done.timings.fetched_tokens in (0, BLOCK)
    assert told is not None
    assert told.code == "peer_late"


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


@pytest.mark.parametrize("last_first", [False, True])
def test_a_machine_that_ends_before_it_has_sent_what_it_said_it_keeps_is_late(
    machines: TwoMachines, last_first: bool
) -> None:
    def nothing(sock: socket.socket, sender: SealedSender, names: list[bytes]) -> None:
        sender.finish()

    machines.ask()
    machines.send(nothing, last_first=last_first)
    done, told = machines.finish()
    assert done.timings.fetched_tokens == 0
    assert told is not None
    assert (told.code, told.blocks) == ("peer_late", 0)


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
    turns = 0
    while sequence.fetching is not None:
        machines.here.turn()
        turns += 1
    # One for each layer, one that computes, one to take it.
    assert turns == 2 + 1 + 1
    assert machines.finish()[0].timings.fetched_tokens == WHOLE * BLOCK


def test_what_came_is_not_copied_to_be_checked(
    machines: TwoMachines, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = FetchedCheck._compute
    stayed: list[bool] = []

    def places(cache: list[Any]) -> list[int]:
        return [as_bytes(array).ctypes.data for part in cache for array in (part.keys, part.values)]

    def watched(self: FetchedCheck, cache: list[Any], start: int, stop: int) -> Iterator[None]:
        before = places(cache)
        yield from compute(self, cache, start, stop)
        stayed.append(places(cache) == before)

    monkeypatch.setattr(FetchedCheck, "_compute", watched)
    machines.ask()
    machines.send(machines.honest)
    assert machines.finish()[0].timings.fetched_tokens == WHOLE * BLOCK
    assert stayed == [True]


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
    def told(name: str, **fields: Any) -> list[Kept]:
        machines.here.ask(name, PROMPT, **fields)
        return [e for e in machines.here.events if isinstance(e, Kept)]

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


# ---- Models that cannot be cut at a token: snapshots come after the rows ---------------------------------

# A gated delta rule beside attention, sliding windows beside it, Mamba 2 alone, which has no rows.
KINDS = ["qwen3_5", "gemma3_text", "mamba2"]


def of_kind(kind: str) -> tuple[Any, list[int]]:
    """A model of a family, and a prompt for it."""
    return tiny_architectures.tiny(kind), [token % tiny_architectures.VOCAB for token in PROMPT]


@pytest.mark.parametrize(
    "kind",
    [*KINDS, *(pytest.param(kind, marks=pytest.mark.long) for kind in sorted(FAMILIES.keys() - set(KINDS)))],
)
def test_every_family_is_fetched_and_the_answer_is_that_of_a_machine_alone(
    kind: str, make_machines: Callable[..., TwoMachines]
) -> None:
    machines = make_machines(*of_kind(kind))
    machines.ask()
    lacking = machines.lacking()
    assert lacking.states is checkpoints.needed(machines.here.tier.empty)
    assert lacking.rows is checkpoints.any_rows(machines.here.tier.empty)
    machines.send(machines.honest)
    done, told = machines.finish()
    assert (done.usage.cached_tokens, done.timings.fetched_tokens) == (WHOLE * BLOCK, WHOLE * BLOCK)
    assert told is not None
    assert (told.blocks, told.code) == (WHOLE, "")
    assert (told.n_bytes > WHOLE * lacking.block_bytes) is lacking.states
    # What came lies on the own disk afterwards.
    machines.here.stop()
    again = Worker(machines.model, machines.tokenizer, settings_in(machines.root / "here"))
    assert again.ask("third", machines.prompt).timings.restored_tokens == WHOLE * BLOCK
    assert again.text("third") == machines.expected
    again.stop()


def refused(machines: TwoMachines, change: Callable[[int, int, int, memoryview], None]) -> None:
    """What is sent otherwise is found, not used and not forgiven."""
    machines.ask()
    machines.send(damaged(machines, change))
    done, told = machines.finish()
    assert (done.timings.fetched_tokens, done.usage.cached_tokens) == (0, 0)
    assert told is not None
    assert (told.code, told.blocks) == ("peer_wrong", 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_of_other_numbers_is_found_and_not_used(
    kind: str, make_machines: Callable[..., TwoMachines]
) -> None:
    machines = make_machines(*of_kind(kind))
    last = 1 if kind == "mamba2" else WHOLE + 1

    def numbers(number: int, part: int, parts: int, buffer: memoryview) -> None:
        if number == last and part:
            every_byte(number, part, parts, buffer)

    refused(machines, numbers)


def test_where_bytes_must_be_equal_one_changed_bit_of_a_state_is_found(
    make_machines: Callable[..., TwoMachines],
) -> None:
    machines = make_machines(*of_kind("qwen3_5"))
    machines.here.scheduler._stored.sharable = SimpleNamespace(any_chunks=True)  # type: ignore[assignment]

    def one_bit(number: int, part: int, parts: int, buffer: memoryview) -> None:
        if number == WHOLE + 1 and part == parts - 1:
            buffer[-2] ^= 64

    refused(machines, one_bit)


def test_windows_that_say_they_turned_otherwise_are_not_used(
    make_machines: Callable[..., TwoMachines],
) -> None:
    def turned(number: int, part: int, parts: int, buffer: memoryview) -> None:
        if number == WHOLE + 1 and not part:
            rings = msgspec.msgpack.decode(buffer, type=list[RingState])
            buffer[:] = msgspec.msgpack.encode([dataclasses.replace(r, index=r.index - 1) for r in rings])

    refused(make_machines(*of_kind("gemma3_text")), turned)


def instead(
    machines: TwoMachines, change: Callable[[BlockHeader, bytes], tuple[bytes, bytes]]
) -> Callable[..., None]:
    """Honest blocks of rows, and snapshots of which ``change`` makes a header and a payload."""

    def work(sock: socket.socket, sender: SealedSender, names: list[bytes]) -> None:
        block_stream.send(NotFinished(sender), names[:WHOLE], (store := BlockStore(machines.settings)).read)
        for name in names[WHOLE:]:
            payload = bytearray()

            def targets(header: BlockHeader, payload: bytearray = payload) -> list[memoryview]:
                payload.extend(bytes(header.nbytes))
                whole, ends = memoryview(payload), list(itertools.accumulate(header.sizes, initial=0))
                return [whole[a:b] for a, b in itertools.pairwise(ends)]

            header = store.read(name, targets)
            assert header is not None
            text, sent = change(header, bytes(payload))
            sender.send(len(text).to_bytes(4, "little") + text)
            sender.send(sent)
        sender.finish()
        store.close()

    return work


class NotFinished:
    """A sender on which more is sent later."""

    def __init__(self, sender: SealedSender) -> None:
        self.send = sender.send

    def finish(self) -> None: ...


def with_rings(rings: bytes) -> Callable[[BlockHeader, bytes], tuple[bytes, bytes]]:
    def change(header: BlockHeader, payload: bytes) -> tuple[bytes, bytes]:
        sizes = [len(rings), *header.sizes[1:]]
        text = msgspec.msgpack.encode(msgspec.structs.replace(header, sizes=sizes))
        return text, rings + payload[header.sizes[0] :]

    return change


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\x90"


def nested_header(header: BlockHeader, payload: bytes) -> tuple[bytes, bytes]:
    # A field that the reader does not know, and skips.
    text = msgspec.msgpack.encode(header)
    return bytes([text[0] + 1]) + b"\xa1x" + nested(200_000) + text[1:], payload


def longer_windows(header: BlockHeader, payload: bytes) -> tuple[bytes, bytes]:
    """Twice the memory, of the same sender's own account."""
    states = payload[header.sizes[0] :]
    known = msgspec.msgpack.decode(payload[: header.sizes[0]], type=list[RingState])
    rings = msgspec.msgpack.encode([dataclasses.replace(ring, held=2 * ring.held) for ring in known])
    sizes = [len(rings), *(2 * size for size in header.sizes[1:])]
    text = msgspec.msgpack.encode(msgspec.structs.replace(header, sizes=sizes))
    return text, rings + states + states


def no_header(header: BlockHeader, payload: bytes) -> tuple[bytes, bytes]:
    return b"\xa2\xff\xff", payload


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(with_rings(b"\xdd\x00\x08\x00\x00" + b"\x80" * (1 << 19)), id="half a million rings"),
        pytest.param(with_rings(b"\x91\x81\xa1x" + nested(200_000)), id="nested rings"),
        pytest.param(nested_header, id="a nested header"),
        pytest.param(longer_windows, id="longer windows"),
        pytest.param(no_header, id="no UTF-8"),
    ],
)
def test_attack_a_snapshot_that_is_none_ends_neither_the_worker_nor_the_request(
    change: Callable[[BlockHeader, bytes], tuple[bytes, bytes]],
    make_machines: Callable[..., TwoMachines],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machines = make_machines(*of_kind("gemma3_text"))
    monkeypatch.setattr(ArrivingSnapshot, "cache", lambda *_: pytest.fail("it was used"))
    machines.ask()
    machines.send(instead(machines, change))
    done, told = machines.finish()
    assert (done.timings.fetched_tokens, done.usage.cached_tokens) == (0, 0)
    assert told is not None
    assert (told.code, told.blocks) == ("peer_wrong", 0)


@pytest.mark.parametrize("where", ["cache", "targets"])
def test_whatever_breaks_over_what_came_the_prompt_is_computed(
    where: str, make_machines: Callable[..., TwoMachines], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any) -> None:
        raise MemoryError

    machines = make_machines(*of_kind("gemma3_text"))
    machines.ask()
    machines.lacking()
    monkeypatch.setattr(ArrivingSnapshot, where, breaks)
    machines.send(machines.honest)
    done, told = machines.finish()
    assert done.timings.fetched_tokens == 0
    assert told is not None
    assert (told.code, told.blocks) == ("peer_wrong", 0)


def test_a_machine_with_one_snapshot_or_none_within_reach_has_nothing_to_send() -> None:
    assert checked_by([]) == checked_by([(4, 9)]) == checked_by([(1, 9), (4, 9)]) == ()
    assert checked_by([(1, 7), (2, 8), (4, 9)]) == ((2, 8), (4, 9))
    assert checked_by([(1, 7), (2, 8), (9, 9)]) == ((1, 7), (2, 8))
    assert checked_by([(1, 7), (2, 8), (9, 9)], blocks=9) == ()


# ---- Numbers in which another accelerator had a part -----------------------------------------------------


def keep_as_plan(worker: Worker, tokens: list[int]) -> None:
    """As if a helper of another kind had computed some of it."""
    worker.ask("kept", tokens)
    found = worker.scheduler.prefix.fetch([*tokens, 0])
    assert found.cache
    worker.tier.store(tokens[: found.tokens], found.cache, PLAN, local_only=False)
    worker.stop()


@pytest.mark.parametrize("where", ["there", "here"])
def test_an_answer_that_begins_with_other_numbers_is_labelled_wherever_these_lie(
    where: str, machines: TwoMachines
) -> None:
    # Those that another machine keeps, or the own disk's, before blocks of the other one that are exact.
    model, tokenizer, own = machines.model, machines.tokenizer, settings_in(machines.root / "own")
    at, tokens = (machines.settings, PROMPT) if where == "there" else (own, PROMPT[: BLOCK + 10])
    keep_as_plan(Worker(model, tokenizer, at), tokens)
    if where == "here":
        forget_exact(own, machines, tokens)
    machines.here.stop()
    sharable = Sharable.of(Stage.of(model), "cpu", {"mlx-lm": "1"})
    machines.here = Worker(model, tokenizer, own, sharable=sharable)
    machines.ask(shared=True)
    lacking = machines.lacking()
    assert len(lacking.plan_names) == len(lacking.names) == WHOLE - (where == "here")
    assert not set(lacking.plan_names) & set(lacking.names)
    machines.send(machines.honest, len(lacking.names), plan=where == "there")
    while not (accepted := [e for e in machines.here.events if isinstance(e, Accepted)]):
        machines.here.turn()
    assert (accepted[0].cached, accepted[0].exact) == (WHOLE * BLOCK, False)
    machines.here.scheduler.tell(PrefillAlone("second"))
    done, told = machines.finish()
    assert done.timings.fetched_tokens == len(lacking.names) * BLOCK
    assert told is not None
    # An exact answer never begins with it.
    assert machines.here.scheduler.prefix.longest(PROMPT, DENSE) == 0
    assert machines.here.scheduler.prefix.longest(PROMPT, PLAN) == len(PROMPT) - 1


def forget_exact(settings: DiskCacheSettings, machines: TwoMachines, tokens: list[int]) -> None:
    """Leave only the blocks of other numbers on the disk."""
    key = MachineKey.load_or_create(Path(settings.key_file))
    store = BlockStore(settings)
    for name in machines.here.tier._names(tokens, DENSE, local_only=False):
        (Path(settings.folder) / "blocks" / key.file_name(name)).unlink()
        assert store.read(name, lambda header: []) is None
    store.close()


def test_a_prompt_whose_answer_must_be_exact_asks_for_no_other_numbers(machines: TwoMachines) -> None:
    machines.ask()
    assert machines.lacking().plan_names == []
    machines.decide(0)
    machines.finish()


# ---- The last block first: the prompt is computed towards what comes --------------------------------------

QUICK = PrefillCost(token_s=1e-9)


def first_then(blocks: int, after: Callable[[], object], machines: TwoMachines) -> Callable[..., None]:
    """Sends so many blocks, and the others after ``after``."""

    def work(sock: socket.socket, sender: SealedSender, names: list[bytes]) -> None:
        store = BlockStore(machines.settings)
        count = iter(range(len(names)))

        def read(name: bytes, targets: Callable[[BlockHeader], Any]) -> BlockHeader | None:
            if next(count) == blocks and after() is None:
                return None
            return store.read(name, targets)

        block_stream.send(sender, names, read)
        store.close()

    return work


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
