"""Models that cannot be cut at a token: snapshots come after the rows."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import tiny_architectures
from disk_worker import BLOCK, Worker, settings_in
from tiny_architectures import FAMILIES
from two_disks import PROMPT, WHOLE, TwoMachines, damaged, every_byte

from fleetd.cache import block_stream
from fleetd.cache.block_file import BlockHeader
from fleetd.cache.block_store import BlockStore
from fleetd.engine.sequence_state import checkpoints
from fleetd.engine.sequence_state.blocks import ArrivingSnapshot
from fleetd.engine.sequence_state.rings import RingState
from fleetd.requests.kv_fetching.choice import checked_by
from fleetd.sealed.stream import SealedSender

pytestmark = pytest.mark.usefixtures("on_cpu", "patient", "short_prompts")


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
    machines.here.scheduler._beginnings.sharable = SimpleNamespace(any_chunks=True)  # type: ignore[assignment]

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
            buffer[:] = msgspec.msgpack.encode([msgspec.structs.replace(r, index=r.index - 1) for r in rings])

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
    rings = msgspec.msgpack.encode([msgspec.structs.replace(ring, held=2 * ring.held) for ring in known])
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
