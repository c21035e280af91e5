"""How machines agree on one shared prefill: one request per helper on its session, opened by home.

    → ASSIST  AssistQuestion          what is to be computed, which part of it, and home's arithmetic
    ← AssistOffer                     an engine is ready; where its streams are expected
    → AssistGo                        where its last output goes
    ← b""*, AssistDone                it computes; it has sent everything

    → WARM    WarmModel               load a model, or some layers of it, for the next prompt
    ← b""

Errors and cancellation are the stream's own. All messages are bounded before they are decoded.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.control.model_facts import KvBits, WireBits
from fleetd.engine.protocol import Arithmetic, StepTime
from fleetd.errors import ProtocolError
from fleetd.p2p.link_prober import Invitation
from fleetd.plan.prefill.split import Split, WarmRows
from fleetd.requests.remote import message_codec
from fleetd.requests.remote.message_codec import Digest, ModelName, RequestId

ASSIST, WARM = "shard.assist", "shard.warm"

_FINGERPRINT_BYTES = 8
_VERSIONS = 16

_Layer = Annotated[int, Meta(ge=0, le=limits.LAYERS)]
_Node = Annotated[str, Meta(max_length=limits.CARD_TEXT_CHARS)]


class AssistQuestion(msgspec.Struct, frozen=True):
    """``id``: of the request, as home has it. ``arithmetic``: home's. ``kv_bits``: in how many bits home
    holds keys and values, and wants them; 0 is as computed. ``warm``: what the helper said it keeps of an
    earlier prompt. ``wire_bits``: in how many bits rows are to be sent; 0 is as they are held. ``exact``: of
    the rows that the helper will have, as in ``WarmRows``."""

    model: ModelName
    digest: Digest
    split: Split
    rank: Annotated[int, Meta(ge=0, lt=limits.SHARE_MACHINES - 1)]
    id: RequestId
    arithmetic: Arithmetic
    kv_bits: KvBits = 0
    warm: WarmRows | None = None
    wire_bits: WireBits = 0
    exact: bool = True


class AssistOffer(msgspec.Struct, frozen=True):
    """``arithmetic``: the helper's. ``home``: for the machine that answers; ``input``: for the helper before,
    where there is one. ``kv_bits``, ``wire_bits``: those of the question, which older helpers leave out.
    ``warm``: the rows that were asked for are there."""

    arithmetic: Arithmetic
    home: Invitation
    input: Invitation | None = None
    kv_bits: KvBits = 0
    warm: bool = False
    wire_bits: WireBits = 0


class AssistGo(msgspec.Struct, frozen=True):
    """``next``: node id of the machine that takes this helper's output, with its invitation; or neither."""

    next: _Node = ""
    invitation: Invitation | None = None


class AssistDone(msgspec.Struct, frozen=True):
    """Everything is computed and sent. ``kept``: rows of its layers and tokens stay for a while."""

    steps: Annotated[list[StepTime], Meta(max_length=limits.SHARE_STEPS)] = []
    kept: bool = False


class WarmModel(msgspec.Struct, frozen=True):
    """Layers [``first``, ``last``), if there is no room for all; (0, 0) is the whole model."""

    model: ModelName
    digest: Digest
    first: _Layer = 0
    last: _Layer = 0


_Message = AssistQuestion | AssistOffer | AssistGo | AssistDone | WarmModel
_T = TypeVar("_T")
_kinds = message_codec.MessageKinds(
    limits.SHARE_MESSAGE_BYTES, AssistQuestion, AssistOffer, AssistGo, AssistDone, WarmModel
)


def encode(message: _Message) -> bytes:
    return message_codec.encode(message)


def decode(body: bytes, kind: type[_T]) -> _T:
    """Raises ProtocolError for anything that is not one honest message of this kind."""
    message: Any = _kinds.decode(body, kind)
    match message:
        case AssistQuestion(model=model, arithmetic=arithmetic):
            message_codec.check_name(model)
            _check_arithmetic(arithmetic)
        case AssistOffer(arithmetic):
            _check_arithmetic(arithmetic)
        case AssistGo(next_node, invitation) if (next_node == "") != (invitation is None):
            raise ProtocolError("A peer's Go has an address without an invitation, or the reverse.")
        case WarmModel(model, _, first, last):
            message_codec.check_name(model)
            if not first < last and (first, last) != (0, 0):
                raise ProtocolError(f"A peer asked for layers {first} to {last}, which are none.")
        case _:
            pass
    found: _T = message
    return found


def _check_arithmetic(arithmetic: Arithmetic) -> None:
    """Its struct is the worker's too, which needs no bounds."""
    texts = [arithmetic.accelerator, arithmetic.dtype]
    texts += [*arithmetic.versions, *arithmetic.versions.values()]
    if (
        len(arithmetic.versions) > _VERSIONS
        or any(len(text) > limits.CARD_TEXT_CHARS for text in texts)
        or any(len(layer) != _FINGERPRINT_BYTES for layer in arithmetic.layers)
        or not 0 <= arithmetic.first_layer <= arithmetic.first_layer + len(arithmetic.layers) <= limits.LAYERS
    ):
        raise ProtocolError("A peer describes its arithmetic as no engine would.")
