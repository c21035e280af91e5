"""How machines agree on a ring: a request per rank on its session, opened by the machine that answers, which
stays open for as long as the model is loaded.

    → SERVE   RankQuestion            which rank, and where the next one is expected
    ← RankTold                        there is memory for it; where the rank before is expected
    ← RankTold*                       it loads; the last one says where passes are expected
    ← b""*                            it stays

The last rank is asked first. So each one is told of the next when it is asked.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.control.model_facts import Text
from fleetd.errors import ProtocolError
from fleetd.p2p.link_prober import Invitation
from fleetd.requests.remote import message_codec
from fleetd.requests.remote.message_codec import Digest, ModelName, RequestId

SERVE = "rank.serve"

_Count = Annotated[int, Meta(ge=0, le=2**53)]


class NextRank(msgspec.Struct, frozen=True):
    """The machine of the next rank, which expects a stream."""

    node_id: Text
    invitation: Invitation


class RankQuestion(msgspec.Struct, frozen=True):
    """Asks a machine to be ``rank`` of ``size``, with its part of each of ``layers`` layers of a model."""

    model: ModelName
    digest: Digest
    # Of the group, on the machine that answers.
    id: RequestId
    rank: Annotated[int, Meta(ge=1, lt=limits.RANKS)]
    size: Annotated[int, Meta(ge=2, le=limits.RANKS)]
    layers: Annotated[int, Meta(ge=1, le=limits.LAYERS)]
    # Whose keys and values must have room.
    tokens: _Count
    next: NextRank


class RankTold(msgspec.Struct, frozen=True):
    """Progress of the load, as ``engine.protocol.Loading`` has it."""

    stage: Text = ""
    done: _Count = 0
    total: _Count = 0
    # Where the rank before this one is expected.
    before: Invitation | None = None
    # Where the worker that answers is expected.
    passes: Invitation | None = None


_T = TypeVar("_T")
_kinds = message_codec.MessageKinds(limits.SHARE_MESSAGE_BYTES, RankQuestion, RankTold)


def encode(message: RankQuestion | RankTold) -> bytes:
    return message_codec.encode(message)


def decode(body: bytes, kind: type[_T]) -> _T:
    """Raises ProtocolError for anything that is not one honest message of this kind."""
    message = _kinds.decode(body, kind)
    if isinstance(message, RankQuestion):
        message_codec.check_name(message.model)
        if message.rank >= message.size:
            raise ProtocolError(f"A peer asked for rank {message.rank} of {message.size}, which is none.")
    return message
