"""What machines say to each other about drafts, each a request of its own on their session.

A machine is asked to draft for an answer of another machine:

    → FOLLOW  DraftQuestion           which model is to draft, and what its token ids must mean
    ← b""*, DraftOffer                its engine is ready; where the answer's stream is expected
    ← b""*, DraftDone                 the text has ended

The text itself and the drafts go from worker to worker (``engine/speculation/draft_messages.py``).

Errors and cancellation are the stream's own. All messages are bounded before they are decoded.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.engine.protocol import StepTime
from fleetd.p2p.link_prober import Invitation
from fleetd.requests.remote import message_codec
from fleetd.requests.remote.message_codec import Digest, ModelName, RequestId

FOLLOW = "draft.follow"

_Vocabulary = Annotated[str, Meta(pattern=r"\A[0-9a-f]{1,64}\Z")]
# Loaded, agreed, drafted, and room for what later versions add.
_STEPS = 16
_Count = Annotated[int, Meta(ge=0, le=2**53)]


class DraftQuestion(msgspec.Struct, frozen=True):
    """Asks a machine to draft for an answer."""

    # The model that is to draft.
    model: ModelName
    digest: Digest
    # Of the request, on the machine that answers.
    id: RequestId
    # A hash of what the answering model's token ids mean.
    vocabulary: _Vocabulary


class DraftOffer(msgspec.Struct, frozen=True):
    """The drafter's engine is ready."""

    # Of the drafting model; the machine that answers compares it too.
    vocabulary: _Vocabulary
    # Where the answer's stream is expected.
    invitation: Invitation


class DraftDone(msgspec.Struct, frozen=True):
    """The text has ended."""

    # Tokens, as ``DraftReport`` has them.
    drafted: _Count = 0
    judged: _Count = 0
    right: _Count = 0
    # Since the question came; earlier versions tell none.
    steps: Annotated[list[StepTime], Meta(max_length=_STEPS)] = []


_T = TypeVar("_T")
_kinds = message_codec.MessageKinds(limits.SHARE_MESSAGE_BYTES, DraftQuestion, DraftOffer, DraftDone)


def encode(message: DraftQuestion | DraftOffer | DraftDone) -> bytes:
    return message_codec.encode(message)


def decode(body: bytes, kind: type[_T]) -> _T:
    """Raises ProtocolError for anything that is not one honest message of this kind."""
    message = _kinds.decode(body, kind)
    if isinstance(message, DraftQuestion):
        message_codec.check_name(message.model)
    return message
