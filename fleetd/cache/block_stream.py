"""Blocks on a sealed stream from one machine to another: header and payload of each, in the order asked for.

    u32 length | BlockHeader | payload | u32 length | BlockHeader | payload | …

The sender stops at the first block that it does not have whole; the receiver takes what has come by then.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import closing

import msgspec

from fleetd import limits
from fleetd.cache.block_file import BlockDamaged, BlockHeader
from fleetd.cache.read_ahead import ReadBlock, blocks_in_order
from fleetd.errors import PeerLost, PeerWrong
from fleetd.sealed.stream import SealedReceiver, SealedSender
from fleetd.text.bounded import UNREADABLE
from fleetd.text.decoding import from_msgpack

_LENGTH = struct.Struct("<I")
Targets = Callable[[int, BlockHeader], Sequence[memoryview]]


def send(sender: SealedSender, names: Sequence[bytes], read: ReadBlock) -> int:
    """Send the blocks of these names; returns the bytes of their payloads. ``read``: ``BlockStore.read``,
    called on another thread, a block ahead of what is sent."""
    sent = 0
    try:
        with closing(blocks_in_order(names, read)) as blocks:
            for block in blocks:
                text = msgspec.msgpack.encode(block.header)
                sender.send(_LENGTH.pack(len(text)) + text)
                sender.send(block.payload)
                sent += block.header.nbytes
        sender.finish()
    except PeerLost:
        pass  # the receiver has enough, or knows itself why it left
    return sent


def receive(
    receiver: SealedReceiver, numbers: Sequence[int], targets: Targets, came: Callable[[int], bool]
) -> None:
    """Put the blocks of these numbers where ``targets`` says; tell each to ``came``, which is False for
    enough. Returns at the stream's end.

    Raises:
        PeerLost, SealBroken: as ``SealedReceiver``.
        PeerWrong: not the blocks that were asked for. What the targets of the last one hold must not be used.
    """
    for number in numbers:
        length = bytearray(_LENGTH.size)
        if (n := receiver.receive_into(length)) == 0:
            return
        (size,) = _LENGTH.unpack(length) if n == len(length) else (limits.CACHE_HEADER_BYTES + 1,)
        if size > limits.CACHE_HEADER_BYTES:
            raise PeerWrong("It sent a block whose header has no end.")
        text = bytearray(size)
        if receiver.receive_into(text) != size:
            raise PeerWrong("It sent half a block.")
        try:
            header = from_msgpack(text, BlockHeader)
            buffers = targets(number, header)
        except (*UNREADABLE, BlockDamaged) as error:
            raise PeerWrong("It sent a block of another model or of another place in the prompt.") from error
        for buffer in buffers:
            if receiver.receive_into(buffer) != len(buffer):
                raise PeerWrong("It sent half a block.")
        if not came(number):
            return
    if receiver.receive_into(bytearray(1)):
        raise PeerWrong("It sent more than it was asked for.")
