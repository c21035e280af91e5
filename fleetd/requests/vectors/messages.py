"""How texts are sent to another machine for their vectors or scores: one request on a session.

    → VECTORS   VectorPart                        the model's digest, the texts
    ← (b"" | Loading)*, TextsEmbedded | TextsReranked, Finished

An empty message says that the work waits or goes on; errors and cancellation are the stream's own. Messages
are bounded before they are decoded, and answers are checked by ``part_answer``.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from fleetd import limits
from fleetd.engine.protocol import EmbedTexts, Finished, Loading, RerankTexts, TextsEmbedded, TextsReranked
from fleetd.errors import ProtocolError
from fleetd.p2p.message_reader import reader
from fleetd.requests.remote import message_codec
from fleetd.requests.remote.message_codec import Digest, ModelName

VECTORS = "vectors.part"

TextsRequest = EmbedTexts | RerankTexts
PartEvent = Loading | TextsEmbedded | TextsReranked | Finished


class VectorPart(msgspec.Struct, frozen=True):
    """A part of a request: the whole request but for the texts."""

    model: ModelName
    digest: Digest
    request: TextsRequest


_read_part: Callable[[bytes], VectorPart] = reader(VectorPart, "A peer's texts")
# Raises ProtocolError.
decode_event: Callable[[bytes], PartEvent] = reader(PartEvent, "A peer's vectors", limits.VECTOR_ANSWER_BYTES)


def encode(message: VectorPart | PartEvent) -> bytes:
    return message_codec.encode(message)


def decode_part(body: bytes) -> VectorPart:
    """Raises ProtocolError, also for more texts than a part has."""
    part = _read_part(body)
    message_codec.check_name(part.model)
    if not 0 < len(texts_of(part.request)) <= limits.VECTOR_PART_TEXTS:
        raise ProtocolError(f"A peer sent a part of {len(texts_of(part.request))} texts.")
    return part


def texts_of(request: TextsRequest) -> list[str | list[int]] | list[str]:
    """The texts that get a vector or a score each."""
    return request.texts if isinstance(request, EmbedTexts) else request.documents
