"""What machines say to each other about kept keys and values, each a request of its own on their session.

    → FIND   BlocksQuestion          how many of these blocks, from the first on, are there
    ← BlocksFound

    → LOOK   TextQuestion            how much of this text, before it is tokenized
    ← TextFound

    → FETCH  FetchQuestion           the first so many of them; two snapshots after them, if it needs some
    ← FetchOffer                     where their stream is expected; it carries them (``cache.block_stream``)

A name is a hash over the model's files, the arithmetic and all tokens before the block's end: only a machine
that has the prompt can ask for it. A link is the same of a text, for prices only. Errors and cancellation
are the stream's own.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.p2p.link_prober import Invitation
from fleetd.requests.remote import message_codec
from fleetd.requests.remote.message_codec import Digest, RequestId

FIND, LOOK, FETCH = "blocks.find", "blocks.look", "blocks.fetch"

_Name = Annotated[bytes, Meta(min_length=32, max_length=32)]
_Names = Annotated[list[_Name], Meta(min_length=1, max_length=limits.FETCH_BLOCKS)]
_Link = Annotated[bytes, Meta(min_length=16, max_length=16)]
_LinkCount = Annotated[int, Meta(ge=0, le=limits.FETCH_LINKS)]
_Count = Annotated[int, Meta(ge=0, le=limits.FETCH_BLOCKS)]
_Bytes = Annotated[int, Meta(ge=0, le=1 << 50)]
_Speed = Annotated[float, Meta(ge=0, le=1e13)]
_Share = Annotated[float, Meta(ge=0, le=1)]


class BlocksQuestion(msgspec.Struct, frozen=True):
    """``rows``: whether the model has rows in these blocks; ``states``: whether it needs a snapshot at the
    end of the last one, and one before that to check it by."""

    names: _Names
    rows: bool = True
    states: bool = False


class BlocksFound(msgspec.Struct, frozen=True):
    """``bytes_per_s``: at which the machine reads them; 0 if it has not measured that. ``cached``: how much
    of their files its system has in memory. ``state_bytes``: of both snapshots."""

    blocks: _Count = 0
    bytes_per_s: _Speed = 0.0
    state_bytes: _Bytes = 0
    cached: _Share = 0.0


class TextQuestion(msgspec.Struct, frozen=True):
    """``digest``: of the model's files. ``links``: of the text's beginnings, the shortest first."""

    digest: Digest
    links: Annotated[list[_Link], Meta(min_length=1, max_length=limits.FETCH_LINKS)]


class TextFound(msgspec.Struct, frozen=True):
    """Up to which link the text is in the prefix cache and on the disk; then as in BlocksFound."""

    in_memory: _LinkCount = 0
    on_disk: _LinkCount = 0
    n_bytes: _Bytes = 0
    bytes_per_s: _Speed = 0.0
    cached: _Share = 0.0


class FetchQuestion(msgspec.Struct, frozen=True):
    """``id``: of the request, as the machine that asks has it. The others as in BlocksQuestion.

    ``last_first``: the blocks are sent from the last one to the first; the machine that asks computes the
    prompt from its beginning meanwhile, and leaves when it has met them. Not with ``states``.
    """

    names: _Names
    id: RequestId
    rows: bool = True
    states: bool = False
    last_first: bool = False


class FetchOffer(msgspec.Struct, frozen=True):
    invitation: Invitation


_Message = BlocksQuestion | BlocksFound | TextQuestion | TextFound | FetchQuestion | FetchOffer
_kinds = message_codec.MessageKinds(
    limits.FETCH_MESSAGE_BYTES,
    BlocksQuestion,
    BlocksFound,
    TextQuestion,
    TextFound,
    FetchQuestion,
    FetchOffer,
)
decode = _kinds.decode


def encode(message: _Message) -> bytes:
    return message_codec.encode(message)
