"""Whether the events that another machine sends can be one answer to what it was asked. Pure.

A machine that is paired may be broken, or taken over. Without a bound its answer could go on for ever, and
everything of it is kept until the client has read it.
"""

from __future__ import annotations

from collections.abc import Sequence

from fleetd import limits
from fleetd.engine.protocol import (
    Accepted,
    ChatPrompt,
    Delta,
    Finished,
    Generate,
    Loading,
    Prefill,
    TextPrompt,
    Tokenized,
    TokenLogprob,
    TokenPrompt,
    ToolCall,
    ToolCallPiece,
)
from fleetd.errors import ProtocolError
from fleetd.requests.remote import message_codec
from fleetd.requests.remote.messages import JobEvent, RanAt

# Events without progress, before every token has one: a flush at a tool call, at a stop string, at the end.
# And tokens besides those of a prompt or an answer.
_SPARE = 16
# Of reading an image: the largest encoder makes a turn of each 512 patches of a layer, some 600 in all.
_IMAGE_STEPS = 1024


class AnswerCheck:
    """Checks the events of one answer in the order in which they came.

    Args:
        context_tokens: most tokens of a prompt with its answer, by that machine's own card; 0 if unknown.
    """

    def __init__(self, request: Generate, context_tokens: int = 0) -> None:
        self._request = request
        context = min(context_tokens or limits.ANSWER_TOKENS, limits.ANSWER_TOKENS)
        self._most_tokens = context if request.max_tokens is None else min(request.max_tokens, context)
        self._echoed_chars = _echoed_chars(request)
        self._most_prompt_tokens = _most_prompt_tokens(request)
        images = request.prompt.images if isinstance(request.prompt, ChatPrompt) else 0
        self._most_image_steps = images * _IMAGE_STEPS
        self._tokens = self._chars = self._argument_chars = self._piece_chars = 0
        self._calls = self._empty = self._loading = self._prefills = 0
        self._entries = self._entry_texts = self._entry_chars = 0
        # None before it is accepted.
        self._prompt_tokens: int | None = None

    def __call__(self, event: JobEvent) -> None:
        """Raises ProtocolError for an event that no honest machine sends."""
        match event:
            case RanAt():
                self._idle()
            case Loading():
                self._loading += 1
                _require(self._loading <= limits.LOADING_EVENTS, "loads without end")
                _require(self._prompt_tokens is None, "loads after it has accepted")
            case Tokenized() | Accepted():
                first = self._prompt_tokens is None
                _require(first or event.prompt_tokens == self._prompt_tokens, "counts the prompt anew")
                _require(event.prompt_tokens <= self._most_prompt_tokens, "counts more than the prompt has")
                if isinstance(event, Accepted):
                    most = event.prompt_tokens if self._request.keep is not None else 0
                    _require(event.kept <= most, "keeps what was not asked for")
                self._prompt_tokens = event.prompt_tokens
                self._idle()
            case Prefill():
                self._prefills += 1
                _require(event.done <= event.total <= self._known_tokens, "prefills more than the prompt")
                most = max(self._prompt_tokens or 0, event.total) + _SPARE
                _require(self._prefills <= most + self._most_image_steps, "prefills without end")
            case Delta():
                self._delta(event)
            case ToolCallPiece():
                self._piece(event)
            case ToolCall():
                _require(event.index == self._calls < limits.TOOLS, "sends tool calls out of order")
                self._calls += 1
                self._argument_chars += len(event.arguments)
                _require(self._argument_chars <= limits.TOOL_ARGUMENT_CHARS, "sends endless arguments")
            case Finished():
                self._finished(event)

    @property
    def _known_tokens(self) -> int:
        """The most that the prompt can have."""
        return self._most_prompt_tokens if self._prompt_tokens is None else self._prompt_tokens

    def _delta(self, event: Delta) -> None:
        self._tokens += event.tokens
        self._chars += len(event.text)
        if not event.tokens:
            self._idle()
        _require(self._tokens <= self._most_tokens, f"sends more than {self._most_tokens} tokens")
        most = self._echoed_chars + (self._tokens + _SPARE) * limits.TOKEN_CHARS
        _require(self._chars <= most, f"sends more text than {self._tokens} tokens have")
        if event.logprobs is not None:
            self._logprobs(event.logprobs)

    def _piece(self, event: ToolCallPiece) -> None:
        _require(self._calls <= event.index < limits.TOOLS, "sends tool calls out of order")
        self._tokens += event.tokens
        self._piece_chars += len(event.text)
        if not event.tokens:
            self._idle()
        _require(self._tokens <= self._most_tokens, f"sends more than {self._most_tokens} tokens")
        _require(self._piece_chars <= limits.TOOL_ARGUMENT_CHARS, "sends endless arguments")

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> None:
        best = self._request.top_logprobs
        _require(best is not None, "sends logprobs that were not asked for")
        # Those of held-back tokens come later, and those of an echoed prompt at once.
        echoed = self._known_tokens if self._request.echo else 0
        self._entries += len(entries)
        _require(self._entries <= self._tokens + echoed + _SPARE, "sends more logprobs than tokens")
        for entry in entries:
            alternatives = [(other.token, other.raw) for other in entry.top]
            _require(len(alternatives) <= (best or 0), "sends more alternatives than were asked for")
            texts = [(entry.token, entry.raw), *alternatives]
            long = any(max(len(text), len(raw) // 4) > limits.TOKEN_CHARS for text, raw in texts)
            _require(not long, "sends a token that is too long")
            self._entry_texts += len(texts)
            self._entry_chars += sum(len(text) + len(raw) for text, raw in texts)
        most = (self._entry_texts + _SPARE) * limits.LOGPROB_CHARS
        _require(self._entry_chars <= most, "sends longer tokens than an answer has")

    def _finished(self, event: Finished) -> None:
        usage = event.usage
        sent = self._tokens + limits.UNTOLD_TOKENS + _SPARE
        _require(usage.completion_tokens <= self._most_tokens, "counts more tokens than were asked for")
        _require(usage.completion_tokens <= sent, "counts more tokens than it sent")
        _require(usage.prompt_tokens == (self._prompt_tokens or 0), "counts the prompt anew")
        _require(usage.reasoning_tokens <= usage.completion_tokens, "counts more reasoning than answer")
        _require(usage.cached_tokens <= usage.prompt_tokens, "counts more of the prompt than it has")
        brought = event.timings.restored_tokens + event.timings.fetched_tokens
        _require(brought <= usage.cached_tokens, "reads more of the prompt from disks than it had")

    def _idle(self) -> None:
        self._empty += 1
        _require(self._empty <= self._tokens + self._calls + _SPARE, "sends events without progress")


def _most_prompt_tokens(request: Generate) -> int:
    if isinstance(request.prompt, TokenPrompt):
        return len(request.prompt.tokens) + _SPARE
    sent = len(message_codec.encode(request.prompt))
    return min(limits.PROMPT_TOKENS_PER_BYTE * sent + limits.TEMPLATE_TOKENS, limits.ANSWER_TOKENS)


def _echoed_chars(request: Generate) -> int:
    if not request.echo:
        return 0
    match request.prompt:
        case TextPrompt(text):
            return 2 * len(text) + limits.TOKEN_CHARS
        case TokenPrompt(tokens):
            return (len(tokens) + _SPARE) * limits.TOKEN_CHARS
    return 0


def _require(right: bool, what: str) -> None:
    if not right:
        raise ProtocolError(f"A peer's answer was ended: it {what}.")
