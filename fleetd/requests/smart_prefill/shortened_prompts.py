"""A request's prompt as smart prefill sees it, and the same prompt with less in it. Pure.

Generate ──document──► blocks ──(scored, selected)──► Generate: text rewritten, or Keep
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fleetd.compression import elide
from fleetd.compression.document import Document, unmark, unmarked
from fleetd.compression.selection import Selection
from fleetd.compression.words import Range, estimate_tokens
from fleetd.engine.protocol import (
    IMAGES,
    ChatPrompt,
    Generate,
    Keep,
    Prompt,
    TextPrompt,
    TokenPrompt,
)


def document(request: Generate, *, system_context: bool = False) -> Document | None:
    """The prompt as a document; None for token ids, which have no text that could be cut.

    ``system_context``: as in ``Document.of_messages``.
    """
    match request.prompt:
        case ChatPrompt(messages=messages):
            return Document.of_messages(messages, system_context=system_context)
        case TextPrompt(text):
            return Document.of_text(text)
        case TokenPrompt():
            return None


def beside_tokens(request: Generate) -> int:
    """About how many tokens a prompt has besides its document: tools, calls, what a template writes."""
    if not isinstance(request.prompt, ChatPrompt):
        return 0
    left_out = ("content", IMAGES)
    beside = [{key: value for key, value in each.items() if key not in left_out} for each in said(request)]
    return estimate_tokens(msgspec.json.encode([request.prompt.tools, beside]).decode())


def plain(request: Generate) -> Generate:
    """The request with its whole prompt, without the marks that only selection understands: the same one if
    it has none."""
    prompt: Prompt = request.prompt
    match prompt:
        case ChatPrompt(messages=messages):
            moved = list(map(_moved, messages, unmarked(messages)))
            prompt = _with(prompt, moved)
        case TextPrompt(text):
            prompt = TextPrompt(unmark(text)[0])
        case TokenPrompt():
            pass
    return request if prompt == request.prompt else msgspec.structs.replace(request, prompt=prompt)


def _with(prompt: ChatPrompt, messages: list[dict[str, Any]]) -> ChatPrompt:
    """The prompt with other contents. A cache mark at the end of a content stays at its end; one inside of a
    content that has changed is lost."""
    marks = []
    for index, chars in prompt.cache_marks:
        before, after = (each[index].get("content") or "" for each in (prompt.messages, messages))
        if before == after:
            marks.append((index, chars))
        elif chars == len(before):
            marks.append((index, len(after)))
    return msgspec.structs.replace(prompt, messages=messages, cache_marks=marks)


def _moved(message: Mapping[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """``plain``, the message without marks, with its images where they stand in the text then."""
    content = message.get("content") or ""
    if IMAGES not in message or plain["content"] == content:
        return plain
    return plain | {IMAGES: [(len(unmark(content[:at])[0]), file) for at, file in message[IMAGES]]}


def shortened(request: Generate, found: Document, selection: Selection) -> Generate:
    """The request with the kept text in its order, and a line for what is left out. What is no text stays."""
    match request.prompt:
        case ChatPrompt(messages=messages):
            kept = _with(request.prompt, elide.messages(found, selection, messages))
            return msgspec.structs.replace(request, prompt=kept)
        case TextPrompt():
            return msgspec.structs.replace(request, prompt=TextPrompt(elide.texts(found, selection)[0]))
        case TokenPrompt():
            return request


def sparse(request: Generate, found: Document, selection: Selection) -> Generate:
    """The whole prompt, and which of it is to be computed."""
    parts = {
        index: list(ranges)
        for index, ranges in enumerate(selection.kept)
        if not selection.whole(found, index)
    }
    return msgspec.structs.replace(plain(request), keep=Keep(parts))


def said(request: Generate) -> list[dict[str, Any]]:
    """A conversation's messages as the client sent them; none of a text prompt."""
    return request.prompt.messages if isinstance(request.prompt, ChatPrompt) else []


def fresh_tokens(found: Document, aged: Mapping[int, Sequence[Range]]) -> int:
    """About how many tokens have not been decided about yet."""
    return sum(estimate_tokens(block.text) for i, block in enumerate(found.blocks) if i not in aged)


def turns(found: Document) -> int:
    """How many answers of a model the prompt holds."""
    return sum(block.role == "assistant" for block in found.blocks)


def is_empty(found: Document, selection: Selection) -> bool:
    """True if nothing would be left to read: not one character of any text."""
    return not any(
        found.blocks[index].text[start:end].strip()
        for index, ranges in enumerate(selection.kept)
        for start, end in ranges
    )


def key(found: Document, model: str, *, without_question: bool = False) -> bytes:
    """Equal for prompts of which a model makes the same, as the scores of a compressor."""
    parts = (found.text, () if without_question else found.questions, model, without_question)
    return hashlib.blake2b(msgspec.msgpack.encode(parts), digest_size=16).digest()
