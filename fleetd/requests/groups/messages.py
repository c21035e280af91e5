"""How machines agree on one model over them: a request per member on its session, opened by the machine that
answers, which stays open for as long as the model is loaded.

    → FETCH   StageQuestion           to a machine that lacks layers: which, and where they are on the hub if
                                      the machine that answers has the model in part
    ← StageTold*                      how far that is; the end says that they are there

    → SERVE   StageQuestion           which layers, and for how many tokens
    ← StageTold                       there is memory for them (PROMISED)
    ← StageTold*                      they are loaded; the last one says where the stream is expected
    ← b""*                            they stay

Then members open streams to each other, for hidden states. The one that is to expect one is asked first:

    → LINK    LinkQuestion            expect a stream from the member before; open one to the next member
    ← LinkTold                        where it is expected
    ← LinkTold                        it is there

Errors and cancellation are the stream's own. All messages are bounded before they are decoded.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.control.model_facts import Text
from fleetd.errors import ProtocolError
from fleetd.models import names
from fleetd.models.hub_parts import HubCommit
from fleetd.p2p.link_prober import Invitation
from fleetd.requests.remote import message_codec
from fleetd.requests.remote.message_codec import Digest, ModelName, RequestId

FETCH, SERVE, LINK = "group.fetch", "group.serve", "group.link"
# The stage of a machine that has promised the memory, and loads the layers next.
PROMISED = "promised"

_Layer = Annotated[int, Meta(ge=0, le=limits.LAYERS)]
_Count = Annotated[int, Meta(ge=0, le=2**53)]


class StageQuestion(msgspec.Struct, frozen=True):
    """Asks a machine to hold layers [``first``, ``last``) of a model."""

    model: ModelName
    digest: Digest
    # Of the group, on the machine that answers.
    id: RequestId
    first: _Layer
    last: _Layer
    # Whose keys and values must have room.
    tokens: _Count
    # The id of an earlier group of that machine, whose layers are to be gone from memory first; "" for none.
    after: Annotated[str, Meta(max_length=limits.REQUEST_ID_CHARS)] = ""
    # Where the files are on the hub, if the machine that asks has them in part only and does not give them.
    # ``digest`` is then that of what the hub lists (``hub_parts.HubListing``).
    hub: HubCommit | None = None


class StageTold(msgspec.Struct, frozen=True):
    """Progress of the load, as ``engine.protocol.Loading`` has it; at last where the stream is expected."""

    stage: Text = ""
    done: _Count = 0
    total: _Count = 0
    stream: Invitation | None = None
    # Equal on machines that compute the same bytes with these layers.
    arithmetic: Text = ""
    # Equal if the member's layers make the same of the same numbers; "" if that is unknown.
    layers: Text = ""


class NextMember(msgspec.Struct, frozen=True):
    """The machine of the layers behind, which expects a stream."""

    node_id: Text
    invitation: Invitation


class LinkQuestion(msgspec.Struct, frozen=True):
    """Asks a member of the group ``id`` to open a stream to ``next``; to expect one, if that is None."""

    id: RequestId
    next: NextMember | None = None


class LinkTold(msgspec.Struct, frozen=True):
    """``stream``: where it is expected; None once it is there."""

    stream: Invitation | None = None


_T = TypeVar("_T")
_Message = StageQuestion | StageTold | LinkQuestion | LinkTold
_kinds = message_codec.MessageKinds(
    limits.SHARE_MESSAGE_BYTES, StageQuestion, StageTold, LinkQuestion, LinkTold
)


def encode(message: _Message) -> bytes:
    return message_codec.encode(message)


def decode(body: bytes, kind: type[_T]) -> _T:
    """Raises ProtocolError for anything that is not one honest message of this kind."""
    message = _kinds.decode(body, kind)
    if isinstance(message, StageQuestion):
        message_codec.check_name(message.model)
        if message.hub is not None and not names.is_hub_id(message.hub.hub_id):
            raise ProtocolError(f"A peer named {message.hub.hub_id[:80]!r} as a repository.")
        if message.first >= message.last:
            raise ProtocolError(f"A peer asked for layers {message.first} to {message.last}, which are none.")
    return message
