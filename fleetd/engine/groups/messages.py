"""What the worker that answers and a member say to each other, on one stream.

    answering ─► STAGE   a message, hidden states (B, T, D)      run the member's layers on them
    answering ◄─ STAGED  a message, hidden states or nothing     once that is done, in the same order
                         (those that come out, then those that were asked for of single layers)
    answering ◄─ KEPT    a message                               what its disk has, whenever that is known
    member    ─► HOP     hidden states, or nothing if skipped    to the member behind, on a stream of its own
    answering ◄─ HOP_LOST  a message                             that stream broke, told by either of its ends

Each member is told all of its blocks by the machine that answers. Their hidden states come with that, or, if
members have streams to each other, from the member before. Both ends of such a stream count the blocks.

Blocks of one sequence may follow each other before the first has come back. Positions number them: a Trim
undoes all that was sent from a position on, computed or not.

What a member keeps of sequences has numbers, which the answering worker gives. What happens to it (copies,
tokens taken back, batches) is told in the order in which it happens, with the next STAGE. So a member is
never asked, and none of this waits for an answer.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.errors import ProtocolError
from fleetd.text.bounded import UNREADABLE, Rate, Seconds
from fleetd.text.decoding import msgpack_decoder

_Number = Annotated[int, Meta(ge=0, lt=1 << 53)]
_Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Names = Annotated[
    list[Annotated[bytes, Meta(min_length=32, max_length=32)]],
    Meta(min_length=1, max_length=limits.GROUP_KEPT_BLOCKS),
]
_Rows = Annotated[list[_Number], Meta(min_length=1, max_length=limits.GROUP_STREAMS)]


ALL = (1 << 31) - 1


class Copy(msgspec.Struct, frozen=True, tag="copy", array_like=True):
    """``new`` holds what ``old`` holds of its first ``tokens``; all of it if that is ALL."""

    old: _Number
    new: _Number
    tokens: _Count = ALL


class Trim(msgspec.Struct, frozen=True, tag="trim", array_like=True):
    """All but the first ``tokens`` of it are undone; nothing is if it holds no more. A block of it that was
    sent before, begins there or later and was not run yet need not be run."""

    held: _Number
    tokens: _Count


class Merge(msgspec.Struct, frozen=True, tag="merge", array_like=True):
    """``new`` is a batch of these sequences, which stay as they are."""

    sequences: _Rows
    new: _Number


class Extend(msgspec.Struct, frozen=True, tag="extend", array_like=True):
    """The batch gets the rows of ``other`` behind its own."""

    batch: _Number
    other: _Number


class Filter(msgspec.Struct, frozen=True, tag="filter", array_like=True):
    """The batch keeps these of its rows, in this order."""

    batch: _Number
    rows: _Rows


class Extract(msgspec.Struct, frozen=True, tag="extract", array_like=True):
    """``new`` is the sequence in a row of the batch, which stays as it is."""

    batch: _Number
    row: Annotated[int, Meta(ge=0, lt=limits.GROUP_STREAMS)]
    new: _Number


class Mark(msgspec.Struct, frozen=True, tag="mark", array_like=True):
    """``mark`` is where it stands now, for a Return."""

    held: _Number
    mark: _Number


class Return(msgspec.Struct, frozen=True, tag="return", array_like=True):
    """All ``tokens`` since the mark are undone."""

    held: _Number
    mark: _Number
    tokens: _Count


class KeepState(msgspec.Struct, frozen=True, tag="save", array_like=True):
    """``state`` is what cannot be had from a later state of it, for a PutBack."""

    held: _Number
    state: _Number


class PutBack(msgspec.Struct, frozen=True, tag="put back", array_like=True):
    """``new`` is what ``held``, of ``stored`` tokens, was after ``tokens``, when the state was saved."""

    held: _Number
    state: _Number
    new: _Number
    stored: _Count
    tokens: _Count


class MakeUp(msgspec.Struct, frozen=True, tag="make up", array_like=True):
    """What is ``held`` is made up to ``tokens``, its rows again and again, for measuring (``made_up``)."""

    held: _Number
    tokens: _Count


class Forget(msgspec.Struct, frozen=True, tag="forget", array_like=True):
    """It is needed no more."""

    held: _Number


class FindKept(msgspec.Struct, frozen=True, tag="find", array_like=True):
    """Look how much of a beginning, of blocks with these names, is on the member's disk; answered by a
    KeptTold. ``kept``: the number of this question."""

    kept: _Number
    names: _Names


class ReadKept(msgspec.Struct, frozen=True, tag="read", array_like=True):
    """``new`` is the first ``blocks`` of what was found for this question, with room for ``room`` tokens in
    all; answered by a KeptTold."""

    kept: _Number
    new: _Number
    blocks: _Count
    room: _Count


class LeaveKept(msgspec.Struct, frozen=True, tag="leave", array_like=True):
    """Nothing more is wanted of this question."""

    kept: _Number


class StoreKept(msgspec.Struct, frozen=True, tag="store", array_like=True):
    """Write what is ``held`` of a prompt's first ``tokens`` to the member's disk, whose whole blocks have
    these names. ``states``: saved ones, with the tokens after which each was saved."""

    held: _Number
    tokens: _Count
    names: _Names
    states: Annotated[list[tuple[_Count, _Number]], Meta(max_length=limits.GROUP_STREAMS)] = []


class LeaveOut(msgspec.Struct, frozen=True, tag="leave out", array_like=True):
    """``held`` is of a prompt of which tokens are left out: from now on each block says where its tokens are.
    Idempotent."""

    held: _Number


class GoOn(msgspec.Struct, frozen=True, tag="go on", array_like=True):
    """All of such a prompt is there; its answer begins at this position."""

    held: _Number
    position: _Count


Kept = FindKept | ReadKept | LeaveKept | StoreKept
Batched = Merge | Extend | Filter | Extract
GoingBack = Trim | Mark | Return | KeepState | PutBack
Change = Copy | Forget | MakeUp | Batched | GoingBack | LeaveOut | GoOn | Kept


class RunStage(msgspec.Struct, frozen=True, array_like=True):
    """Make these changes, then run the layers on hidden states (``batch``, ``tokens``, D); on none, and with
    no answer, if these are 0."""

    changes: Annotated[list[Change], Meta(max_length=limits.GROUP_CHANGES)]
    # What the layers keep of the sequences, which is new if the number is.
    held: _Number = 0
    batch: Annotated[int, Meta(ge=0, le=limits.GROUP_STREAMS)] = 0
    tokens: Annotated[int, Meta(ge=0, le=limits.GROUP_TOKENS)] = 0
    # What comes out is sent back.
    wanted: bool = False
    # For so many tokens more there shall be room in what is kept, made at once.
    room: _Count = 0
    # The position of the first token of a sequence; in a batch each row has its own, which is kept with it.
    start: _Count = 0
    # The tokens themselves, row by row, if the layers take them; else none.
    ids: Annotated[list[_Number], Meta(max_length=limits.GROUP_TOKENS)] = []
    # Of the tokens of a prompt of which some are left out; else none.
    positions: Annotated[list[_Count], Meta(max_length=limits.GROUP_TOKENS)] = []
    # Layers, of the whole model's, whose hidden states are sent back, for what drafts from them.
    taps: Annotated[list[_Count], Meta(max_length=limits.GROUP_TAPS)] = []
    # Those of the last so many tokens; 0 for all.
    tap_rows: Annotated[int, Meta(ge=0, le=limits.GROUP_TOKENS)] = 0
    # Hidden states come from the member before this one.
    from_before: bool = False
    # What comes out goes to the member behind it, and is not sent back.
    to_next: bool = False
    # A hash is sent back of what is kept of tokens from this one on, the block's included; none if ALL.
    hash_from: _Count = ALL

    @property
    def tapped(self) -> int:
        """Rows of each layer in ``taps`` that are sent back, for each sequence."""
        return min(self.tap_rows or self.tokens, self.tokens)


class StageRan(msgspec.Struct, frozen=True, array_like=True):
    """``skipped``: the layers were not run, as a Trim had come since. ``seconds``: that the layers took.
    ``kept``: the hash of what is kept, if it was asked for."""

    skipped: bool = False
    seconds: Seconds = 0.0
    kept: Annotated[bytes, Meta(max_length=32)] = b""


class KeptTold(msgspec.Struct, frozen=True, array_like=True):
    """Answers the question ``kept``: blocks, from the first one on, that were found, or that were read.

    ``stops``: numbers of blocks after which the beginning may end; none if it may after each. ``nbytes`` and
    ``bytes_per_s``: of what was found, and how fast it is read.
    """

    kept: _Number
    blocks: _Count = 0
    stops: Annotated[list[_Count], Meta(max_length=limits.GROUP_KEPT_BLOCKS)] = []
    nbytes: _Number = 0
    bytes_per_s: Rate = 0.0


class HopLost(msgspec.Struct, frozen=True, array_like=True):
    """The stream to the member behind broke, if ``to_next``, else the one from the member before.
    ``silent``: it may not have broken; nothing was heard on it for too long."""

    to_next: bool
    silent: bool = False


_T = TypeVar("_T", RunStage, StageRan, KeptTold, HopLost)
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {
    kind: msgpack_decoder(kind) for kind in (RunStage, StageRan, KeptTold, HopLost)
}


def encode(message: RunStage | StageRan | KeptTold | HopLost) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes | memoryview, kind: type[_T]) -> _T:
    """Raises ProtocolError for what is no such message."""
    try:
        found: _T = _decoders[kind].decode(data)
    except UNREADABLE as error:
        raise ProtocolError(f"A machine of a group sent no {kind.__name__}: {error}.") from None
    return found
