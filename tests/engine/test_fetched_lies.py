"""A machine that sends other blocks than it keeps, too late, or none, changes no answer."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from disk_worker import BLOCK
from two_disks import WHOLE, TwoMachines, damaged, every_byte, first_then, gone
from wire_changes import changes

from fleetd import limits
from fleetd.engine.loop import beginnings
from fleetd.sealed.stream import SealedSender

pytestmark = pytest.mark.usefixtures("on_cpu", "patient", "short_prompts")


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


def last_block(number: int, part: int, parts: int, buffer: memoryview) -> None:
    if number == WHOLE - 1:
        numbers = np.frombuffer(buffer, np.float32)
        numbers.flags.writeable = True
        numbers *= -1


class Earliest(random.Random):
    def randint(self, a: int, b: int) -> int:
        return a


@pytest.mark.parametrize("last_first", [False, True])
def test_attack_the_last_block_is_wrong_and_none_of_it_is_drawn(
    machines: TwoMachines, monkeypatch: pytest.MonkeyPatch, last_first: bool
) -> None:
    monkeypatch.setattr(beginnings.random, "Random", Earliest)
    change = last_block if not last_first else partial(first_sent, last_block)
    machines.ask()
    machines.send(damaged(machines, change), last_first=last_first)
    done, told = machines.finish()
    assert (done.timings.fetched_tokens, done.usage.cached_tokens) == (0, 0)
    assert told is not None
    assert (told.code, told.blocks) == ("peer_wrong", 0)


def first_sent(change: Callable[..., None], number: int, part: int, parts: int, buffer: memoryview) -> None:
    change(WHOLE - 1 - number, part, parts, buffer)


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
    machines.ask()
    machines.send(first_then(1, lambda: over.wait(60) and None, machines))
    done, told = machines.finish()
    over.set()
    assert done.timings.fetched_tokens in (0, BLOCK)
    assert told is not None
    assert told.code == "peer_late"


@pytest.mark.parametrize("last_first", [False, True])
def test_attack_a_machine_that_trickles_is_waited_for_no_longer_than_all_may_take(
    machines: TwoMachines, last_first: bool
) -> None:
    over = threading.Event()
    machines.ask()
    # Each single block may take a minute here.
    machines.send(
        first_then(1, lambda: over.wait(60) and None, machines), last_first=last_first, within_s=0.5
    )
    done, told = machines.finish()
    over.set()
    assert done.timings.fetched_tokens in (0, BLOCK)
    assert told is not None
    assert told.code == "peer_late"


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
