"""Messages without content, for templates that want text: an assistant's that only calls tools has none.

Some templates fail there, print the word "None" or forget the calls; others tell no text from an empty one.
Which a model's template is, two renderings of a small conversation tell.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from fleetd.engine.prompt import chat_template

Message = dict[str, Any]

_PARAMETERS = {"type": "object", "properties": {"at": {"type": "string", "description": "What to look at."}}}
_FUNCTION = {"name": "look", "description": "Look.", "parameters": _PARAMETERS}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {"at": "treetops"}}}


def with_content(messages: Sequence[Message], tokenizer: Any) -> list[Message]:
    """The messages as the tokenizer's chat template can render them: "" for null where it needs that."""
    if all(message.get("content") is not None for message in messages) or not needs_content(tokenizer):
        return list(messages)
    return [
        message if message.get("content") is not None else message | {"content": ""} for message in messages
    ]


@functools.lru_cache(maxsize=2)
def needs_content(tokenizer: Any) -> bool:
    """True if the template renders "" as the content of a tool call and null wrongly. The last two
    tokenizers are remembered."""
    of_text, of_null = _rendered(tokenizer, ""), _rendered(tokenizer, None)
    if of_text is None or of_null is None:
        return of_text is not None
    return of_null.count("None") > of_text.count("None") or (
        "treetops" in of_text and "treetops" not in of_null
    )


def _rendered(tokenizer: Any, content: str | None) -> str | None:
    """A conversation in which the assistant calls a tool; None if the template fails."""
    messages: list[Message] = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": content, "tool_calls": [_CALL]},
        {"role": "tool", "content": "A tree.", "tool_call_id": _CALL["id"], "name": "look"},
    ]
    try:
        return chat_template.rendered(tokenizer, messages, _TOOLS)
    except Exception:  # templates raise whatever their authors did not think of
        return None
