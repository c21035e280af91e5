"""A chat template run over messages: a publisher's code, so its memory is bounded, whatever it does there."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fleetd import limits
from fleetd.engine.cpu import address_space
from fleetd.errors import BadRequest
from fleetd.hardware.memory import resident_bytes
from fleetd.models.memory_need import WORKING_BYTES


def rendered(tokenizer: Any, messages: Sequence[dict[str, Any]], tools: Any, **options: Any) -> str:
    """The text of a conversation, up to where the answer begins.

    Raises:
        Exception: what the template raises.
        MemoryError: the template takes too much, and the process is bounded (``address_space``).
        BadRequest: the text is too long.
    """
    with _collected(), address_space.narrowed(limits.RENDER_BYTES + WORKING_BYTES):
        try:
            text = str(
                tokenizer.apply_chat_template(
                    list(messages), tools=tools, tokenize=False, add_generation_prompt=True, **options
                )
            )
        except Exception as error:
            # Its traceback holds all that the template has built.
            error.__context__ = None
            raise error.with_traceback(None) from None
    if (size := len(text)) > limits.RENDERED_CHARS:
        raise BadRequest(
            f"The rendered prompt has {size} characters; at most {limits.RENDERED_CHARS} are allowed."
        )
    return text


@contextmanager
def _collected() -> Iterator[None]:
    """Collect garbage at the end if there is much: the next bound counts from the memory in use then."""
    before = resident_bytes(os.getpid())
    try:
        yield
    finally:
        if resident_bytes(os.getpid()) - before > limits.RENDER_LEFT_BYTES:
            gc.collect()
