"""The messages between an answer and its drafter, as frames of a stream. Sans-IO.

    answer ── COMMIT(base, tokens) ──► drafter      after ``base`` tokens the text went on with these
    answer ◄── DRAFT(base, branches) ── drafter     after ``base`` tokens it may go on with one of these

Every message carries the length and a hash of the text that it goes on from, so each can be judged without
the ones before it: a draft for a text that has changed since fits nowhere. Neither side waits for a
reply, and no message has to arrive; either side may close the stream.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Sequence

from fleetd import limits
from fleetd.engine.streams.frames import Frame, FrameHeader, Kind
from fleetd.errors import ProtocolError

# The stream's name.
DRAFTS = "drafts"
_TOKEN = struct.Struct("<i")
_LENGTHS = "i"


class TextHash:
    """How long a text is, and 8 bytes that stand for it (``plan.split.prefix_hashes``)."""

    def __init__(self) -> None:
        self.length = 0
        self._state = hashlib.sha256()

    @property
    def hash(self) -> bytes:
        return self._state.copy().digest()[:8]

    def extend(self, tokens: Sequence[int]) -> None:
        self._state.update(packed(tokens))
        self.length += len(tokens)


def packed(tokens: Iterable[int]) -> bytes:
    """Tokens as int32, little endian."""
    return array(_LENGTHS, tokens).tobytes()


def commit(base: TextHash, tokens: Sequence[int]) -> tuple[FrameHeader, memoryview]:
    """A frame that says: after the text ``base`` these tokens came."""
    payload = memoryview(packed(tokens))
    return FrameHeader(
        Kind.COMMIT, start=base.length, count=len(tokens), sizes=(payload.nbytes, 0), prefix=base.hash
    ), payload


def draft(length: int, prefix: bytes, branches: Sequence[Sequence[int]]) -> tuple[FrameHeader, memoryview]:
    """``branches``: paths, each of which may follow a text of ``length`` tokens with this hash."""
    lengths = packed(map(len, branches))
    tokens = b"".join(map(packed, branches))
    sizes = len(lengths), len(tokens)
    head = FrameHeader(Kind.DRAFT, start=length, count=len(branches), sizes=sizes, prefix=prefix)
    return head, memoryview(lengths + tokens)


# ---- where frames are written to, before anything of their size is allocated -----------------------------


def place_commit(head: FrameHeader) -> list[memoryview]:
    """Place a commit, at the drafter. Raises ProtocolError for one that cannot be due."""
    length = head.end
    if head.kind is not Kind.COMMIT or head.sizes != (head.count * _TOKEN.size, 0) or not head.count:
        raise ProtocolError(f"A drafter was sent a frame of kind {head.kind} that is no commit.")
    if length > limits.DRAFT_TEXT_TOKENS or head.layer or head.index:
        raise ProtocolError(f"A commit came, and the text of {length} tokens with it is too long.")
    return [memoryview(bytearray(head.nbytes))]


def place_draft(head: FrameHeader) -> list[memoryview]:
    """Place a draft, at the machine that answers. Raises as ``place_commit`` does."""
    lengths, tokens = head.sizes
    if head.kind is not Kind.DRAFT or head.layer or head.index:
        raise ProtocolError(f"A drafter sent a frame of kind {head.kind} that is no draft.")
    if not 0 < head.count <= limits.DRAFT_BRANCHES or lengths != head.count * _TOKEN.size:
        raise ProtocolError(f"A drafter sent {head.count} paths in {lengths} bytes.")
    if not 0 < tokens <= head.count * limits.DRAFT_BRANCH_TOKENS * _TOKEN.size:
        raise ProtocolError(f"A drafter sent {head.count} paths of {tokens} bytes.")
    return [memoryview(bytearray(head.nbytes))]


# ---- what they say ---------------------------------------------------------------------------------------


def tokens_of(frame: Frame, vocab_size: int) -> list[int]:
    """The tokens of a commit. Raises ProtocolError for ids that are no tokens."""
    return _checked(_ints(frame), vocab_size)


def branches_of(frame: Frame, vocab_size: int) -> list[list[int]]:
    """The paths of a draft. Raises ProtocolError for ids that are no tokens and for odd lengths."""
    numbers, count = _ints(frame), frame.head.count
    lengths, tokens = numbers[:count], _checked(numbers[count:], vocab_size)
    if any(not 0 < n <= limits.DRAFT_BRANCH_TOKENS for n in lengths) or sum(lengths) != len(tokens):
        raise ProtocolError(f"A drafter sent {len(tokens)} tokens as {count} paths of other lengths.")
    branches, at = [], 0
    for n in lengths:
        branches.append(tokens[at : at + n])
        at += n
    return branches


def _ints(frame: Frame) -> list[int]:
    found = array(_LENGTHS)
    for buffer in frame.buffers:
        if buffer.nbytes % _TOKEN.size:
            raise ProtocolError(f"A frame of {buffer.nbytes} bytes holds no tokens.")
        found.frombytes(buffer)
    return found.tolist()


def _checked(tokens: list[int], vocab_size: int) -> list[int]:
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise ProtocolError(f"A token outside of the vocabulary's {vocab_size} came.")
    return tokens
