"""Sealed streams: what is sent arrives, and whatever else arrives is refused."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetd import limits
from fleetd.errors import PeerLost, SealBroken
from fleetd.sealed import stream
from fleetd.sealed.chunks import HEADER_BYTES, KEY_BYTES, TAG_BYTES, Opener, Sealer
from fleetd.sealed.stream import SealedReceiver, SealedSender

KEY = bytes(range(KEY_BYTES))
CHUNK = limits.SEALED_CHUNK_BYTES
OVERHEAD = HEADER_BYTES + TAG_BYTES


# ---- Chunks ----------------------------------------------------------------------------------------------


def seal(sealer: Sealer, plain: bytes, *, last: bool = False) -> bytes:
    out = memoryview(bytearray(len(plain) + OVERHEAD))
    assert sealer.seal_into(memoryview(plain), out, last=last) == len(out)
    return bytes(out)


def open_one(opener: Opener, wire: bytes) -> bytes:
    header, body = memoryview(wire)[:HEADER_BYTES], memoryview(wire)[HEADER_BYTES:]
    size = opener.body_bytes(header)
    out = memoryview(bytearray(size - TAG_BYTES))
    opener.open_into(header, body[:size], out)
    return bytes(out)


def ends(key: bytes = KEY) -> tuple[Sealer, Opener]:
    return Sealer(key, "connector"), Opener(key, "acceptor")


@given(st.lists(st.binary(min_size=1, max_size=200), max_size=5), st.binary(max_size=200))
def test_chunks_open_in_order(pieces: list[bytes], final: bytes) -> None:
    sealer, opener = ends()
    assert [open_one(opener, seal(sealer, piece)) for piece in pieces] == pieces
    assert not opener.finished
    assert open_one(opener, seal(sealer, final, last=True)) == final
    assert opener.finished


def test_the_wire_is_what_the_format_says() -> None:
    """Another implementation must agree on every byte."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    for role, info in (("connector", "connector->acceptor"), ("acceptor", "acceptor->connector")):
        sealer = Sealer(KEY, role)
        cipher = AESGCM(HKDF(SHA256(), 32, None, f"fleetd sealed 1 {info}".encode()).derive(KEY))
        for number, (plain, last) in enumerate([(b"rows", False), (b"", True)]):
            counter = number | (last << 63)
            header = struct.pack(">IQ", len(plain) + 16, counter)
            expected = header + cipher.encrypt(b"\0\0\0\0" + struct.pack(">Q", counter), plain, header)
            assert seal(sealer, plain, last=last) == expected


def test_attack_flipped_bit_anywhere_in_a_chunk() -> None:
    wire = seal(Sealer(KEY, "connector"), b"thirteen rows")
    assert open_one(ends()[1], wire) == b"thirteen rows"
    for position in range(8 * len(wire)):
        bad = bytearray(wire)
        bad[position // 8] ^= 1 << position % 8
        # With more behind it: a longer length takes in what comes next.
        with pytest.raises(SealBroken):
            open_one(ends()[1], bytes(bad) + bytes(CHUNK))


def test_attack_replayed_chunk() -> None:
    sealer, opener = ends()
    wire = seal(sealer, b"again")
    open_one(opener, wire)
    with pytest.raises(SealBroken, match="1 was due and 0 came"):
        open_one(opener, wire)


def test_attack_left_out_and_swapped_chunks() -> None:
    sealer, opener = ends()
    _, second = seal(sealer, b"first"), seal(sealer, b"second")
    with pytest.raises(SealBroken, match="0 was due and 1 came"):
        open_one(opener, second)


def test_attack_chunk_sent_back_to_its_sender() -> None:
    """The other direction's key differs, or a machine could be fed its own words."""
    sealer = Sealer(KEY, "connector")
    with pytest.raises(SealBroken):
        open_one(Opener(KEY, "connector"), seal(sealer, b"mine"))


def test_attack_chunk_of_another_stream() -> None:
    sealer = Sealer(bytes(KEY_BYTES), "connector")
    with pytest.raises(SealBroken):
        open_one(ends()[1], seal(sealer, b"of another"))


def test_attack_more_after_the_last_chunk() -> None:
    sealer, opener = ends()
    other = Sealer(KEY, "connector")
    open_one(opener, seal(sealer, b"all", last=True))
    seal(other, b"all")
    with pytest.raises(SealBroken, match="after its last"):
        open_one(opener, seal(other, b"and more"))


def test_lengths_are_bounded_before_anything_is_read() -> None:
    sealer, opener = ends()
    assert len(open_one(opener, seal(sealer, bytes(CHUNK)))) == CHUNK
    with pytest.raises(ValueError, match="longer than the bound"):
        sealer.seal_into(memoryview(bytes(CHUNK + 1)), memoryview(bytearray(CHUNK + 1 + OVERHEAD)))
    for size in (CHUNK + TAG_BYTES + 1, 0xFFFFFFFF, TAG_BYTES - 1, 0):
        with pytest.raises(SealBroken, match=f"claims {size} bytes"):
            opener.body_bytes(memoryview(struct.pack(">IQ", size, 1)))
        assert Opener(KEY, "acceptor").body_bytes(memoryview(struct.pack(">IQ", CHUNK + TAG_BYTES, 0)))


def test_attack_empty_chunks_as_a_sign_of_life() -> None:
    sealer, opener = ends()
    with pytest.raises(SealBroken, match="claims 16 bytes"):
        open_one(opener, seal(sealer, b""))


def test_nothing_is_sealed_after_the_last_chunk() -> None:
    sealer = Sealer(KEY, "connector")
    seal(sealer, b"", last=True)
    with pytest.raises(ValueError, match="last chunk"):
        seal(sealer, b"more")


def test_a_key_of_another_length_is_refused() -> None:
    for size in (0, 16, 31, 33):
        with pytest.raises(ValueError, match="32 bytes"):
            Sealer(bytes(size), "connector")


# ---- Sockets ---------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with near, far:
        yield near, far


Aside = Callable[..., "Future[None]"]


@pytest.fixture
def aside(pair: tuple[socket.socket, socket.socket]) -> Iterator[Aside]:
    """Run one end in a thread; closing the sockets ends it whatever happened."""
    with ThreadPoolExecutor(2) as threads:
        try:
            yield threads.submit
        finally:
            for sock in pair:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)


SIZES = (0, 1, 100, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 17)


@pytest.mark.parametrize("reads", [(CHUNK,), (1000, CHUNK + 1, 3), (5 * CHUNK,)])
def test_what_is_sent_arrives_however_it_is_cut(
    pair: tuple[socket.socket, socket.socket], aside: Aside, reads: tuple[int, ...]
) -> None:
    pieces = [os.urandom(size) for size in SIZES]

    def send() -> None:
        sender = SealedSender(pair[0], KEY, "connector")
        for piece in pieces:
            sender.send(piece)
        sender.finish()

    done = aside(send)
    receiver = SealedReceiver(pair[1], KEY, "acceptor")
    found, turn = bytearray(), 0
    while True:
        buffer = bytearray(reads[turn % len(reads)])
        count = receiver.receive_into(buffer)
        found += buffer[:count]
        if count < len(buffer):
            break
        turn += 1
    assert found == b"".join(pieces)
    assert receiver.receive_into(bytearray(10)) == 0
    done.result(60)


def test_chunks_come_as_views_of_one_buffer(pair: tuple[socket.socket, socket.socket], aside: Aside) -> None:
    sent = os.urandom(4 * CHUNK + 5)

    def send() -> None:
        sender = SealedSender(pair[1], KEY, "acceptor")
        sender.send(memoryview(sent))
        sender.finish()

    done = aside(send)
    receiver = SealedReceiver(pair[0], KEY, "connector")
    head = bytearray(10)
    assert receiver.receive_into(head) == 10
    found = bytes(head)
    for view in receiver.chunks():
        found += view
    assert found == sent
    assert list(receiver.chunks()) == []
    done.result(60)


def test_both_directions_at_once(pair: tuple[socket.socket, socket.socket], aside: Aside) -> None:
    there, back = os.urandom(2 * CHUNK), os.urandom(3 * CHUNK)

    def send(sock: socket.socket, data: bytes, role: str) -> None:
        sender = SealedSender(sock, KEY, "connector" if role == "connector" else "acceptor")
        sender.send(data)
        sender.finish()

    sending = [aside(send, pair[0], there, "connector"), aside(send, pair[1], back, "acceptor")]
    found: dict[str, bytes] = {}

    def receive() -> None:
        found["back"] = b"".join(map(bytes, SealedReceiver(pair[0], KEY, "connector").chunks()))

    reader = threading.Thread(target=receive)
    reader.start()
    found["there"] = b"".join(map(bytes, SealedReceiver(pair[1], KEY, "acceptor").chunks()))
    reader.join(60)
    assert found == {"there": there, "back": back}
    for task in sending:
        task.result(60)


def wire_of(data: bytes) -> bytes:
    sealer = Sealer(KEY, "connector")
    parts = [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)]
    return b"".join(seal(sealer, part) for part in parts) + seal(sealer, b"", last=True)


@pytest.mark.parametrize(
    "kept", [0, 5, HEADER_BYTES, 100, CHUNK + OVERHEAD, CHUNK + OVERHEAD + 3, 2 * (CHUNK + OVERHEAD)]
)
def test_attack_stream_cut_short(pair: tuple[socket.socket, socket.socket], aside: Aside, kept: int) -> None:
    """Also between two chunks, where nothing but the missing mark tells."""
    wire = wire_of(bytes(2 * CHUNK))

    def send() -> None:
        pair[0].sendall(wire[:kept])
        pair[0].shutdown(socket.SHUT_WR)

    done = aside(send)
    with pytest.raises(PeerLost, match=f"before its end, after {kept} bytes"):
        for _ in SealedReceiver(pair[1], KEY, "acceptor").chunks():
            pass
    done.result(60)


def test_attack_flipped_byte_on_the_wire(pair: tuple[socket.socket, socket.socket], aside: Aside) -> None:
    wire = bytearray(wire_of(bytes(3 * CHUNK)))
    wire[CHUNK + OVERHEAD + HEADER_BYTES + 1000] ^= 1
    aside(pair[0].sendall, wire)
    receiver = SealedReceiver(pair[1], KEY, "acceptor")
    assert receiver.receive_into(bytearray(CHUNK)) == CHUNK
    with pytest.raises(SealBroken, match="chunk 1 was changed"):
        receiver.receive_into(bytearray(CHUNK))


def test_attack_claimed_length_allocates_nothing(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    receiver = SealedReceiver(pair[1], KEY, "acceptor")
    pair[0].sendall(struct.pack(">IQ", 0xFFFFFFFF, 0))
    tracemalloc.start()
    try:
        with pytest.raises(SealBroken, match="claims"):
            receiver.receive_into(bytearray(10))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_a_silent_sender_is_lost(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SEALED_STALL_S", 0.1)
    receiver = SealedReceiver(pair[1], KEY, "acceptor")
    with pytest.raises(PeerLost, match="sent nothing"):
        receiver.receive_into(bytearray(10))


def test_a_slow_sender_is_not_lost_while_bytes_come(
    pair: tuple[socket.socket, socket.socket], aside: Aside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is on silence: many times the bound in all passes, with a byte now and then."""
    monkeypatch.setattr(limits, "SEALED_STALL_S", 1.0)
    wire = wire_of(b"slowly")
    pause = threading.Event()

    def send() -> None:
        for byte in wire:
            pair[0].sendall(bytes([byte]))
            pause.wait(0.06)

    done = aside(send)
    buffer = bytearray(10)
    assert SealedReceiver(pair[1], KEY, "acceptor").receive_into(buffer) == 6
    done.result(60)
    assert 0.06 * len(wire) > 2 * limits.SEALED_STALL_S


def send_for_ever(sender: SealedSender) -> None:
    while True:
        sender.send(bytes(CHUNK))


def test_a_receiver_that_takes_nothing_is_lost(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SEALED_STALL_S", 0.1)
    sender = SealedSender(pair[0], KEY, "connector")
    with pytest.raises(PeerLost, match="taken nothing"):
        send_for_ever(sender)


class Trickle:
    """A socket whose other end takes a byte just before it would be lost, on a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def settimeout(self, seconds: float) -> None:
        self.pause_s = seconds - 1

    def send(self, data: memoryview) -> int:
        self.now_s += self.pause_s
        return 1


@pytest.mark.parametrize("steady", [True, False])
def test_attack_a_receiver_that_trickles_is_lost_where_it_has_nothing_else_to_do(
    monkeypatch: pytest.MonkeyPatch, steady: bool
) -> None:
    trickle = Trickle()
    monkeypatch.setattr(stream.time, "monotonic", lambda: trickle.now_s)
    sender = SealedSender(trickle, KEY, "connector", steady=steady)  # type: ignore[arg-type]
    if steady:
        with pytest.raises(PeerLost, match="has taken"):
            sender.send(bytes(CHUNK))
        assert trickle.now_s < limits.SEALED_GRACE_S + limits.SEALED_STALL_S
    else:
        sender.send(bytes(100))
        assert trickle.now_s > limits.SEALED_GRACE_S


def test_a_receiver_that_left_is_lost(pair: tuple[socket.socket, socket.socket]) -> None:
    sender = SealedSender(pair[0], KEY, "connector")
    pair[1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    pair[1].close()
    with pytest.raises(PeerLost, match="broke"):
        send_for_ever(sender)


@pytest.mark.long
def test_random_damage_never_passes_and_never_surprises() -> None:
    """Whatever is done to a stream, it opens to a prefix of what was sent or ends in SealBroken."""
    rng = random.Random(5)
    plain = [rng.randbytes(rng.randrange(1, 60)) for _ in range(6)]
    sealer = Sealer(KEY, "connector")
    chunks = [seal(sealer, piece, last=piece is plain[-1]) for piece in plain]
    for _ in range(200_000):
        wire = chunks.copy()
        where = rng.randrange(len(wire))
        match rng.randrange(4):
            case 0:
                bad = bytearray(wire[where])
                bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
                wire[where] = bytes(bad)
            case 1:
                wire.insert(where, rng.choice(chunks))
            case 2:
                del wire[where]
            case _:
                wire[where] = rng.randbytes(rng.randrange(HEADER_BYTES, 80))
        opener = Opener(KEY, "acceptor")
        found: list[bytes] = []
        with contextlib.suppress(SealBroken):
            for chunk in wire:
                header, body = memoryview(chunk)[:HEADER_BYTES], memoryview(chunk)[HEADER_BYTES:]
                size = opener.body_bytes(header)
                if size != len(body):
                    break
                out = memoryview(bytearray(size - TAG_BYTES))
                opener.open_into(header, body, out)
                found.append(bytes(out))
        assert found == plain[: len(found)]
        assert not (opener.finished and len(found) < len(plain))
