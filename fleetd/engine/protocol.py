"""Messages between the daemon and an engine worker, and how they are framed.

Sans-IO: encode to bytes, feed bytes in, get messages out. One Unix socket per worker, one frame per message:
``u32 length (big endian) | MessagePack``. Both ends are the same installation, so there is no version field;
unknown tags are a bug and raise.

    daemon → worker   Generate, Cancel, Shutdown
    worker → daemon   Loading*, Ready | LoadFailed, then for each Generate:
                      Accepted, Prefill*, (Delta | ToolCall)*, Finished | Failed
                      and Beat at least every ``limits.ENGINE_BEAT_S``
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from fleetd import limits

# ---- What to generate ------------------------------------------------------------------------------------

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

# Ranges that an engine can work with; they hold wherever a request is decoded, also one from another machine.
Natural = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Temperature = Annotated[float, Meta(ge=0, le=5)]
Share = Annotated[float, Meta(ge=0, le=1)]
TopP = Annotated[float, Meta(gt=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Repetition = Annotated[float, Meta(gt=0, le=10)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Seed = Annotated[int, Meta(ge=INT64_MIN, le=INT64_MAX)]
StopString = Annotated[str, Meta(min_length=1, max_length=limits.STOP_STRING_CHARS)]
StopList = Annotated[list[StopString], Meta(max_length=limits.STOP_STRINGS)]
Logprobs = Annotated[int, Meta(ge=0, le=limits.TOP_LOGPROBS)]

# Arguments of a chat template that the engine sets itself; one of them is the template.
RESERVED_TEMPLATE_KWARGS = frozenset(
    {"messages", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt",
     "continue_final_message"}
)  # fmt: skip


class ChatPrompt(msgspec.Struct, frozen=True, tag="chat", omit_defaults=True):
    """Messages to be rendered by the model's own chat template (sandboxed, in the worker)."""

    messages: Annotated[list[dict[str, Any]], Meta(max_length=limits.MESSAGES)]
    tools: Annotated[list[dict[str, Any]], Meta(max_length=limits.TOOLS)] | None = None
    # "auto" lets the model decide; "none" hides the tools; "required" and {"name": ...} start the answer
    # inside a tool call.
    tool_choice: Literal["auto", "none", "required"] | dict[str, str] = "auto"
    template_kwargs: dict[str, Any] = {}


class TextPrompt(msgspec.Struct, frozen=True, tag="text", omit_defaults=True):
    text: str


class TokenPrompt(msgspec.Struct, frozen=True, tag="tokens", omit_defaults=True):
    tokens: list[int]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is chosen. ``temperature`` 0 is greedy. The same seed gives the same answer.

    None means what the model's own generation_config.json says, or else no effect (temperature 1).
    """

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Natural | None = None
    min_p: Share | None = None
    seed: Seed | None = None
    repetition_penalty: Repetition | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: dict[int, Bias] = {}


class Generate(msgspec.Struct, frozen=True, tag="generate", omit_defaults=True):
    """One answer. ``max_tokens`` None means: until the context is full.

    ``top_logprobs`` None reports no logprobs, 0 only the chosen token's, n also the n best.
    ``echo`` returns the prompt's text (and logprobs, if asked) before the answer, as /v1/completions has it.
    """

    id: Annotated[str, Meta(min_length=1, max_length=limits.REQUEST_ID_CHARS)]
    prompt: Prompt
    sampling: Sampling = Sampling()
    max_tokens: Natural | None = None
    stop: StopList = []
    top_logprobs: Logprobs | None = None
    echo: bool = False


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Stop a request; answered by ``Finished(reason="cancelled")`` within a step. Unknown ids are ignored."""

    id: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End the process; running requests are not finished."""


# ---- What comes back -------------------------------------------------------------------------------------


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """Progress before Ready. ``stage`` is a word for people: verifying, reading, warming up, measuring."""

    stage: str
    done: int = 0
    total: int = 0


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded. Sizes in bytes; ``kv_bytes_per_token`` over all layers.

    Speeds are those of one request alone on a short context; 0 where there was no time to measure them.
    """

    architecture: str
    device: Literal["cpu", "metal", "cuda"]
    dtype: str
    layers: int
    vocab_size: int
    context_tokens: int
    weights_bytes: int
    kv_bytes_per_token: int
    kv_budget_bytes: int
    has_chat_template: bool
    tool_calls: bool
    reasoning: bool
    load_s: float
    versions: dict[str, str]
    prefill_tok_s: float = 0.0
    decode_tok_s: float = 0.0


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed"):
    code: str
    message: str
    hint: str = ""


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The prompt is rendered, tokenized and admitted; nothing is computed yet."""

    id: str
    prompt_tokens: int


class Prefill(msgspec.Struct, frozen=True, tag="prefill", omit_defaults=True):
    """Progress in prompt tokens. The first one of a request tells how many came from the prefix cache."""

    id: str
    done: int
    total: int
    cached: int = 0


class TopLogprob(msgspec.Struct, frozen=True, array_like=True):
    token: str
    logprob: float
    raw: bytes


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One token's text, natural-log probability, raw bytes and the best alternatives, best first."""

    token: str
    logprob: float
    raw: bytes
    top: list[TopLogprob] = []
    # Offset of the token's text in the answer, in characters (/v1/completions reports it).
    text_offset: int = 0


class Delta(msgspec.Struct, frozen=True, tag="delta", omit_defaults=True):
    """Text that is certain: whole code points, no stop string, no part of a marker.

    ``tokens`` counts the tokens behind this delta, which may be 0 (flush) or many (held-back text).
    """

    id: str
    text: str
    channel: Literal["content", "reasoning"] = "content"
    tokens: int = 1
    logprobs: list[TokenLogprob] | None = None


class ToolCall(msgspec.Struct, frozen=True, tag="tool_call"):
    """One complete tool call; ``arguments`` is a JSON object as text. ``index`` counts from 0 per answer."""

    id: str
    index: int
    call_id: str
    name: str
    arguments: str


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0


class Timings(msgspec.Struct, frozen=True, omit_defaults=True):
    """Seconds, measured in the worker: waiting for a turn, prefill, and first to last token."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]


class Finished(msgspec.Struct, frozen=True, tag="finished", omit_defaults=True):
    """The last message of a request that went well (or was cancelled). ``stop`` names the stop string hit."""

    id: str
    reason: FinishReason
    usage: Usage = Usage()
    timings: Timings = Timings()
    stop: str | None = None


class Failed(msgspec.Struct, frozen=True, tag="failed", omit_defaults=True):
    """The last message of a request that did not; fields as in ``errors.FleetError``."""

    id: str
    code: str
    message: str
    hint: str = ""
    param: str | None = None


class Beat(msgspec.Struct, frozen=True, tag="beat", omit_defaults=True):
    """Proof of progress: ``steps`` counts forward passes since load and only grows."""

    steps: int
    prefilling: int = 0
    decoding: int = 0
    waiting: int = 0
    kv_bytes: int = 0
    prefix_bytes: int = 0
    prefix_entries: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    memory_bytes: int = 0


Command = Generate | Cancel | Shutdown
Event = Accepted | Prefill | Delta | ToolCall | Finished | Failed
Report = Loading | Ready | LoadFailed | Beat | Event

# ---- Framing ---------------------------------------------------------------------------------------------

_LENGTH = struct.Struct(">I")


class FrameTooLong(ValueError):
    """A frame over ``limits.ENGINE_FRAME_BYTES``: the stream is not what we think it is."""


def encode(message: Command | Report) -> bytes:
    """One frame, ready to send. Raises FrameTooLong."""
    body = msgspec.msgpack.encode(message)
    if len(body) > limits.ENGINE_FRAME_BYTES:
        raise FrameTooLong(f"frame of {len(body)} bytes is over the limit of {limits.ENGINE_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Bytes in any pieces → messages."""

    def __init__(self, kind: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield every message that ``data`` completes.

        Raises:
            FrameTooLong: before anything of the frame's size is allocated.
            msgspec.DecodeError: the frame is not a known message.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > limits.ENGINE_FRAME_BYTES:
                raise FrameTooLong(
                    f"frame of {length} bytes is over the limit of {limits.ENGINE_FRAME_BYTES}"
                )
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(memoryview(self._buffer)[_LENGTH.size : end])
            del self._buffer[:end]
            yield self._decode(body)


def commands() -> Decoder:
    """Decoder for the worker's end."""
    return Decoder(Command)


def reports() -> Decoder:
    """Decoder for the daemon's end."""
    return Decoder(Report)
