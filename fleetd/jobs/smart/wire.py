"""How a prompt is scored on another machine: one request on a session.

    → SCORE   Ask                       the model's digest, the text, the segment
    ← (b"" | Loading | Prefill)*, Scored

An empty message says that the work waits or goes on; errors and cancellation are the stream's own. Messages
are bounded before they are decoded, and scores are checked before anything is read by them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.engine.protocol import Loading, Prefill, Score, Scored
from fleetd.errors import ProtocolError
from fleetd.models import names

SCORE = "smart.score"
ALIVE = b""

ScoreEvent = Loading | Prefill | Scored


class Ask(msgspec.Struct, frozen=True):
    model: Annotated[str, Meta(min_length=1, max_length=limits.MODEL_NAME_CHARS)]
    digest: Annotated[str, Meta(min_length=64, max_length=64, pattern="^[0-9a-f]*$")]
    score: Score


_encode = msgspec.msgpack.Encoder().encode
_ask = msgspec.msgpack.Decoder(Ask).decode
_event = msgspec.msgpack.Decoder(ScoreEvent).decode
_BROKEN = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


def encode(message: Ask | ScoreEvent) -> bytes:
    return _encode(message)


def decode_ask(body: bytes) -> Ask:
    """Raises ProtocolError, also for ranges that are not in the text."""
    try:
        ask = _ask(body)
    except _BROKEN as error:
        raise ProtocolError(f"A peer asked for scores in a way that cannot be read: {error}.") from None
    if names.is_path(ask.model):
        raise ProtocolError("A peer asked for a model by a path on this machine.")
    score = ask.score
    chars = len(score.text)
    ranges = [*score.questions, score.segment]
    if len(score.questions) > limits.MESSAGES or any(not 0 <= a <= b <= chars for a, b in ranges):
        raise ProtocolError("A peer asked for scores of what is not in its text.")
    if not 0 <= score.look_ahead <= limits.SMART_LOOK_AHEAD:
        raise ProtocolError(f"A peer asked to look {score.look_ahead} tokens ahead.")
    return ask


def decode_event(body: bytes) -> ScoreEvent:
    """Raises ProtocolError."""
    if len(body) > limits.SMART_SCORES_BYTES:
        raise ProtocolError(f"Scores of {len(body)} bytes are over the limit of {limits.SMART_SCORES_BYTES}.")
    try:
        found: ScoreEvent = _event(body)
    except _BROKEN as error:
        raise ProtocolError(f"A peer sent scores that cannot be read: {error}.") from None
    return found
