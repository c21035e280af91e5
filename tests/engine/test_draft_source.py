"""Drafts across a stream, without workers: the same text whatever the drafter does, and fewer passes."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pipes import Events, MemoryPipe
from typing import Any

import msgspec
import pytest
from drafts import LIES, VOCAB, Decoded, OracleGuesser, decode, greedy, scrambled
from family_params import in_turn

from fleetd import limits
from fleetd.engine.speculation import draft_messages as wire
from fleetd.engine.speculation.drafter import DraftWriter, Guesser
from fleetd.engine.speculation.lookahead import Lookahead
from fleetd.engine.speculation.remote_source import RemoteSource
from fleetd.engine.speculation.sources import Context
from fleetd.engine.streams.frames import Frame, FrameHeader, Kind, Place
from fleetd.engine.streams.pipe import SocketPipe
from fleetd.errors import FleetError, OutOfMemory, PeerLost, ProtocolError

PROMPT = [7, 99, 3, 250, 12, 12, 12, 5]
TOKENS = 40
WAIT_S = 60.0


class DraftPair:
    """A source and a drafter whose frames travel when they are asked for."""

    def __init__(self, model: Guesser, *, fatal: int = -1, **options: Any) -> None:
        self.events = Events(fatal)
        self.ends: list[MemoryPipe] = []
        self.drafter = DraftWriter(
            model, self._open, Lookahead(), context_tokens=4096, vocab_size=VOCAB, **options
        )
        self.source = RemoteSource(self._open, PROMPT, VOCAB)
        self.failed: FleetError | None = None

    def _open(self, place: Place) -> MemoryPipe:
        self.ends.append(MemoryPipe(place, self.events))
        if len(self.ends) == 2:
            self.ends[0].join(self.ends[1])
        return self.ends[-1]

    @property
    def sending(self) -> MemoryPipe:
        """The drafter's end."""
        return self.ends[0]

    def turn(self, most: int = 100) -> None:
        """Let the drafter do what it can."""
        for _ in range(most):
            if self.failed is not None or not self.drafter.ready:
                return
            try:
                self.drafter.step(16)
            except FleetError as error:
                self.failed = error
                self.drafter.close()

    def decode(self, steps: int = 100) -> Decoded:
        return decode(scrambled, PROMPT, TOKENS, self.source, between=lambda: self.turn(steps))


def test_a_perfect_drafter_fills_every_pass() -> None:
    pair = DraftPair(OracleGuesser(scrambled))
    found = pair.decode()
    assert found.tokens == greedy(scrambled, PROMPT, TOKENS)
    assert found.passes == TOKENS // 5
    assert found.accepted == TOKENS - found.passes
    assert 0 < pair.drafter.right <= pair.drafter.judged
    assert pair.source.error is None


def test_a_mistake_that_was_foreseen_costs_no_wait() -> None:
    """Every third token is wrong, and the truth is the runner-up: its continuation is there already."""
    pair = DraftPair(OracleGuesser(scrambled, wrong=lambda length: length % 3 == 0))
    found = pair.decode()
    assert found.tokens == greedy(scrambled, PROMPT, TOKENS)
    # A pass that meets a mistake takes at most three tokens; each pass after one has drafts again.
    assert found.passes <= TOKENS // 3 + 2
    blind = DraftPair(OracleGuesser(scrambled, wrong=lambda length: length % 3 == 0, second_best=False))
    assert blind.decode().tokens == found.tokens


def test_a_drafter_that_is_always_wrong_changes_nothing() -> None:
    found = DraftPair(OracleGuesser(scrambled, wrong=lambda length: True, second_best=False)).decode()
    assert (found.tokens, found.accepted) == (greedy(scrambled, PROMPT, TOKENS), 0)


def test_a_slow_drafter_is_not_waited_for() -> None:
    """One guess per pass: what it has is used, and what the text has passed is not."""
    found = DraftPair(OracleGuesser(scrambled)).decode(steps=1)
    assert found.tokens == greedy(scrambled, PROMPT, TOKENS)


@pytest.mark.parametrize("fatal", range(120))
def test_the_stream_breaks_at_any_step(fatal: int) -> None:
    pair = DraftPair(OracleGuesser(scrambled, wrong=lambda length: length % 4 == 0), fatal=fatal)
    assert pair.decode().tokens == greedy(scrambled, PROMPT, TOKENS)
    if pair.events.count > fatal:
        assert isinstance(pair.source.error, PeerLost)
        assert isinstance(pair.failed, PeerLost)
    pair.source.close()


# ---- lies ------------------------------------------------------------------------------------------------


HARMLESS = {"other tokens", "silence", "twice"}


@pytest.mark.parametrize(("lie", "step"), in_turn(list(LIES), [0, 1, 5, 31, 32, 40]))
def test_a_lie_costs_only_its_drafts(lie: str, step: int) -> None:
    pair = DraftPair(OracleGuesser(scrambled))
    sent = 0

    def tamper(head: FrameHeader, payload: bytes) -> list[tuple[FrameHeader, bytes]]:
        nonlocal sent
        sent += 1
        return LIES[lie](head, payload) if sent > step else [(head, payload)]

    pair.sending.tamper = tamper
    assert pair.decode().tokens == greedy(scrambled, PROMPT, TOKENS)
    assert sent > step
    if lie in HARMLESS:
        assert pair.source.error is None
    else:
        assert pair.source.error is not None
        assert pair.ends[1].closed


def test_a_flood_ends_the_stream() -> None:
    pair = DraftPair(OracleGuesser(scrambled))
    head, payload = wire.draft(len(PROMPT), wire.TextHash().hash, [[1]])
    for _ in range(2 * limits.DRAFT_WAITING):
        pair.sending.send(head, payload)
    # On a socket the thread that reads is ahead of who takes; here both are one.
    pair.source._placed += limits.DRAFT_WAITING
    assert pair.source.propose(Context(PROMPT, 4)) == []
    assert isinstance(pair.source.error, ProtocolError)


def test_attack_frames_that_come_while_others_are_taken_do_not_hold_up_decoding() -> None:
    pair = DraftPair(OracleGuesser(scrambled))
    text = wire.TextHash()
    text.extend(PROMPT)
    head, payload = wire.draft(len(PROMPT), text.hash, [greedy(scrambled, PROMPT, 4)])
    frame = Frame(head, [memoryview(bytes(payload))])
    taken = itertools.count(1)

    def receive() -> Frame:
        assert next(taken) <= 2 * limits.DRAFT_WAITING
        return frame

    pair.source._pipe.receive = receive  # type: ignore[method-assign]
    assert pair.source.propose(Context(PROMPT, 4)) == greedy(scrambled, PROMPT, 4)


def test_a_drafter_that_reads_nothing_costs_one_list() -> None:
    pair = DraftPair(OracleGuesser(scrambled))
    # Nothing travels: the drafter never looks.
    found = decode(scrambled, PROMPT, TOKENS, pair.source)
    assert found.tokens == greedy(scrambled, PROMPT, TOKENS)
    assert len(pair.ends[1].sent) == 1  # the prompt; all else waits
    # Then it wakes up, and one commit tells it everything.
    pair.turn()
    pair.source.propose(Context([*PROMPT, *found.tokens], 4))
    assert [head.count for head in pair.ends[1].sent] == [len(PROMPT), TOKENS]
    pair.turn()
    text = [*PROMPT, *found.tokens]
    assert pair.source.propose(Context(text, 4)) == greedy(scrambled, text, 4)


# ---- the drafter's side ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tamper",
    [
        lambda h, p: [(msgspec.structs.replace(h, start=h.start + 1), p)],
        lambda h, p: [(msgspec.structs.replace(h, prefix=b"12345678"), p)],
        lambda h, p: [(h, wire.packed([VOCAB] * h.count))],
        lambda h, p: [(msgspec.structs.replace(h, count=h.count + 1), p)],
        lambda h, p: [(msgspec.structs.replace(h, start=5000), p)],
        lambda h, p: [(msgspec.structs.replace(h, kind=Kind.DRAFT), p)],
        lambda h, p: [(h, p), (h, p)],
    ],
)
def test_a_commit_that_fits_nothing_ends_the_drafter(tamper: Any) -> None:
    pair = DraftPair(OracleGuesser(scrambled))
    pair.turn()
    pair.ends[1].tamper = tamper
    assert pair.decode().tokens == greedy(scrambled, PROMPT, TOKENS)
    assert isinstance(pair.failed, ProtocolError)


def test_attack_commits_that_wait_to_be_read_are_one_text_at_most() -> None:
    """They come while the worker computes for others, as fast as the network carries them."""
    pair = DraftPair(OracleGuesser(scrambled))
    place, base = pair.drafter._place, wire.TextHash()
    place(wire.commit(base, PROMPT)[0])
    base.extend(PROMPT)
    following, _ = wire.commit(base, [1, 2, 3])
    assert sum(buffer.nbytes for buffer in place(following)) == 12
    again, _ = wire.commit(base, list(range(200)))
    with pytest.raises(ProtocolError, match=f"a text of {len(PROMPT)} tokens; {len(PROMPT) + 3} came"):
        place(again)


def test_what_is_far_behind_is_prefilled_in_chunks() -> None:
    model = OracleGuesser(scrambled)
    pair = DraftPair(model)
    pair.source.close()
    long = [n % VOCAB for n in range(100)]
    pair.ends.clear()
    pair.drafter = DraftWriter(model, pair._open, Lookahead(), context_tokens=4096, vocab_size=VOCAB)
    source = RemoteSource(pair._open, long, VOCAB)
    pair.turn()
    assert model.prefilled == [16, 16, 16, 16, 16]
    assert source.propose(Context(long, 8)) == greedy(scrambled, long, 8)


def test_it_drafts_no_further_than_its_context() -> None:
    model = OracleGuesser(scrambled)
    ends: list[MemoryPipe] = []

    def opened(place: Place) -> MemoryPipe:
        ends.append(MemoryPipe(place, Events()))
        return ends[-1]

    drafter = DraftWriter(model, opened, Lookahead(), context_tokens=len(PROMPT) + 5, vocab_size=VOCAB)
    source = RemoteSource(opened, PROMPT, VOCAB)
    ends[0].join(ends[1])
    while drafter.ready:
        drafter.step(16)
    assert source.propose(Context(PROMPT, 30)) == greedy(scrambled, PROMPT, 5)


def test_no_memory_ends_it() -> None:
    def grow(tokens: int) -> None:
        raise OutOfMemory("full")

    pair = DraftPair(OracleGuesser(scrambled), grow=grow)
    assert pair.decode().tokens == greedy(scrambled, PROMPT, TOKENS)
    assert isinstance(pair.failed, OutOfMemory)


def test_silence_ends_it() -> None:
    now = 0.0
    pair = DraftPair(OracleGuesser(scrambled), clock=lambda: now)
    pair.turn()
    assert not pair.drafter.ready
    now = limits.DRAFT_IDLE_S + 1
    assert pair.drafter.due_s is not None
    assert pair.drafter.due_s <= now
    with pytest.raises(PeerLost):
        pair.drafter.step(16)


# ---- on sockets ------------------------------------------------------------------------------------------


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    yield near, far
    near.close()
    far.close()


def test_over_sealed_sockets(sockets: tuple[socket.socket, socket.socket]) -> None:
    near, far = sockets
    key = bytes(range(32))
    moved = threading.Event()

    def connect(sock: socket.socket, role: Any) -> Callable[[Place], SocketPipe]:
        return lambda place: SocketPipe(sock, key, role, place=place, wake=moved.set)

    drafter = DraftWriter(
        OracleGuesser(scrambled), connect(far, "acceptor"), Lookahead(), context_tokens=4096, vocab_size=VOCAB
    )
    source = RemoteSource(connect(near, "connector"), PROMPT, VOCAB)
    try:
        deadline = time.monotonic() + WAIT_S
        while source.propose(Context(PROMPT, 8)) != greedy(scrambled, PROMPT, 8):
            assert time.monotonic() < deadline
            if drafter.ready:
                drafter.step(16)
            else:
                moved.wait(0.05)
                moved.clear()
    finally:
        source.close()
        drafter.close()
