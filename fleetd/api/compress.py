"""POST /v1/compress: what smart prefill would keep of a prompt, as text, for any use.

    prompt | messages ──► Document ──► scored, selected ──► the same with less in it, and which of it was kept

A chat request without a compressor runs with its whole prompt; here that is an error. If nothing should be
left out, the text comes back whole and ``declined`` says why.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import aclosing
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta

from fleetd import limits
from fleetd.api.generation.fields import decode
from fleetd.api.generation.smart_prefill_reports import line
from fleetd.api.http import body as http_body
from fleetd.api.http.context import SERVICES
from fleetd.api.openai import bodies, translate
from fleetd.compression import elide
from fleetd.compression.document import Document
from fleetd.compression.policy import Ratio, SmartPrefillBody, SmartPrefillPolicy, Tokens, resolve
from fleetd.control.compression_reply import Compression, CompressTimings, CompressUsage, KeptSpan
from fleetd.engine.protocol import IMAGES
from fleetd.errors import Draining, FleetError, InvalidValue, NoMachine, ScorerNotReady, UnsupportedParameter
from fleetd.models.catalog import DEFAULT_MODEL, find, nearest
from fleetd.models.names import is_hub_id
from fleetd.requests.smart_prefill.compression_job import CompressionJob
from fleetd.requests.smart_prefill.skip import SkipCompression


class CompressBody(msgspec.Struct, frozen=True, kw_only=True):
    """Either ``prompt`` or ``messages``. Fields that are left out have this machine's defaults."""

    prompt: Annotated[str, Meta(min_length=1)] | None = None
    messages: Annotated[list[bodies.Message], Meta(min_length=1, max_length=limits.MESSAGES)] | None = None
    question: Annotated[
        str | None,
        Meta(description="What a `prompt` is read for, if it does not say so. Not a part of the answer."),
    ] = None
    without_question: Annotated[
        bool | None,
        Meta(
            description="True: choose by the text alone, whatever seems to ask in it. By default that is "
            "done where nothing asks; false leaves such a text whole."
        ),
    ] = None
    compressor_model: Annotated[str, Meta(max_length=limits.MODEL_NAME_CHARS)] | None = None
    target_ratio: Ratio | None = None
    min_keep_tokens: Tokens | None = None
    max_keep_tokens: Tokens | None = None
    preserve_boundaries: bool | None = None
    local_only: bool | None = None
    user: str | None = None


async def compress(request: web.Request) -> web.StreamResponse:
    """Raises FleetError."""
    services = request.app[SERVICES]
    body = decode(await http_body.read(request), CompressBody)
    defaults = services.smart_defaults
    found, messages = await asyncio.to_thread(_document, body, system_context=defaults.system_context)
    policy = _policy(body, defaults, asks=bool(found.questions))
    if services.compressing is None or services.status().draining:
        raise Draining("The daemon is stopping and takes no new work.", hint="Retry in a moment.")
    answer_id = f"compress-{uuid.uuid4().hex}"
    bill = services.compressing.bill(answer_id)
    compression = CompressionJob(
        answer_id, found, found.estimated_tokens, policy, bill, bool(body.local_only)
    )
    refunded = "cancelled"
    try:
        async with aclosing(services.compressing.run(compression)) as steps:
            async for _ in steps:
                pass
        refunded = ""
    except SkipCompression as skip:
        refunded = skip.code
        raise _why(skip, body) from None
    except FleetError as error:
        refunded = error.code
        raise
    finally:
        bill.close(refunded)
    reply = await asyncio.to_thread(
        _reply, answer_id, compression, messages, question=body.question is not None
    )
    headers = {
        "X-Fleet-Request": answer_id,
        "X-SmartPrefill-Compressor": line(compression.compressor),
        "X-SmartPrefill-Original-Tokens": str(reply.usage.original_tokens),
        "X-SmartPrefill-Compressed-Tokens": str(reply.usage.compressed_tokens),
    }
    return http_body.json_answer(reply, headers=headers)


def _document(body: CompressBody, *, system_context: bool) -> tuple[Document, list[dict[str, Any]] | None]:
    """The document to shorten, and its messages if the body has any. ``system_context``: as in
    ``Document.of_messages``."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidValue("Give either prompt or messages.", param="prompt")
    if body.messages is not None:
        if body.question is not None:
            raise InvalidValue(
                "question belongs to prompt.", hint="The last user message asks.", param="question"
            )
        messages = [translate.message(message, i) for i, message in enumerate(body.messages)]
        if any(IMAGES in message for message in messages):
            raise UnsupportedParameter(
                "Conversations with images are not compressed: nothing here scores an image.",
                hint="Leave the images out, and put them back into what is returned.",
                param="messages",
            )
        return Document.of_messages(messages, system_context=system_context), messages
    if body.question is None:
        text = body.prompt or ""
        found = Document.of_text(text)
        # A short text is taken for a question as a whole: here it is what is to be compressed.
        alone = body.without_question or (body.without_question is None and not found.material.strip())
        return Document.of_text(text, asks=False) if alone else found, None
    texts = (body.prompt, body.question)
    asked: list[dict[str, Any]] = [{"role": "user", "content": text} for text in texts]
    return Document.of_messages(asked), None


def _policy(body: CompressBody, defaults: SmartPrefillPolicy, *, asks: bool) -> SmartPrefillPolicy:
    """``asks``: something in the prompt does. What nobody asks about is compressed for later questions."""
    if body.without_question and body.question is not None:
        raise InvalidValue(
            "A text with a question is not scored without one.",
            hint="Leave out `question` or `without_question`.",
            param="without_question",
        )
    wanted = SmartPrefillBody(
        compressor_model=body.compressor_model,
        target_ratio=body.target_ratio,
        min_keep_tokens=body.min_keep_tokens,
        max_keep_tokens=body.max_keep_tokens,
        preserve_boundaries=body.preserve_boundaries,
        min_prompt_tokens=0,
        without_question=not asks if body.without_question is None else body.without_question,
        mode="text",
    )
    policy = resolve(wanted, defaults)
    if policy is None:
        raise InvalidValue("Nothing is to be compressed.")
    return policy


def _why(skip: SkipCompression, body: CompressBody) -> FleetError:
    if skip.code == "no_compressor":
        wanted = body.compressor_model
        return NoMachine(
            skip.reason,
            hint=f"{_how_to_get(wanted or DEFAULT_MODEL)} `fleetctl models` lists what there is.",
            param="compressor_model" if wanted else None,
        )
    if skip.code == "measuring":
        return ScorerNotReady(skip.reason)
    return NoMachine(skip.reason)


def _how_to_get(name: str) -> str:
    """How to get the model, if there may be one of that name; else the names that look like it."""
    if find(name) is not None or is_hub_id(name):
        return f"`fleetctl models pull {name}` gets it."
    near = nearest(name)
    return f"Did you mean {' or '.join(near)}?" if near else ""


def _reply(
    answer_id: str, compression: CompressionJob, messages: list[dict[str, Any]] | None, *, question: bool
) -> Compression:
    selection, found = compression.selection, compression.document
    if selection is None:
        raise NoMachine("No selection was made.")
    kept = [KeptSpan(index, list(spans)) for index, spans in enumerate(selection.kept)]
    texts = elide.texts(found, selection)
    return Compression(
        id=answer_id,
        created=int(time.time()),
        model=compression.compressor,
        prompt=texts[0] if messages is None else UNSET,
        messages=elide.messages(found, selection, messages) if messages is not None else UNSET,
        kept=kept[:1] if question else kept,
        declined=selection.declined,
        scored=compression.scored,
        nodes=list(compression.names),
        usage=CompressUsage(selection.original_tokens, selection.text_tokens, compression.scored_tokens),
        timings=CompressTimings(round(compression.score_s * 1000, 3), round(compression.select_s * 1000, 3)),
    )
