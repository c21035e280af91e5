"""How a prompt is scored on another machine: one request on a session.

    → SCORE   ScoreQuestion             the model's digest, the text, the segment
    ← (b"" | Loading | Prefill)*, Scored

An empty message says that the work waits or goes on; errors and cancellation are the stream's own. Messages
are bounded before they are decoded, and scores are checked before anything is read by them.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from fleetd import limits
from fleetd.engine.protocol import Loading, Prefill, Score, Scored
from fleetd.errors import ProtocolError
from fleetd.p2p.message_reader import reader
from fleetd.requests.remote import message_codec
from fleetd.requests.remote.message_codec import Digest, ModelName

SCORE = "smart.score"

ScoreEvent = Loading | Prefill | Scored


class ScoreQuestion(msgspec.Struct, frozen=True):
    model: ModelName
    digest: Digest
    score: Score


_read_ask: Callable[[bytes], ScoreQuestion] = reader(ScoreQuestion, "A peer's wish for scores")
# Raises ProtocolError.
decode_event: Callable[[bytes], ScoreEvent] = reader(
    ScoreEvent, "A peer's word about scores", limits.SMART_SCORES_BYTES
)


def encode(message: ScoreQuestion | ScoreEvent) -> bytes:
    return message_codec.encode(message)


def decode_ask(body: bytes) -> ScoreQuestion:
    """Raises ProtocolError, also for ranges that are not in the text."""
    ask = _read_ask(body)
    message_codec.check_name(ask.model)
    score = ask.score
    chars = len(score.text)
    ranges = [*score.questions, score.segment]
    if len(score.questions) > limits.MESSAGES or any(not 0 <= a <= b <= chars for a, b in ranges):
        raise ProtocolError("A peer asked for scores of what is not in its text.")
    return ask
