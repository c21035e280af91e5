"""Bodies of requests in OpenAI's dialect, decoded as the server decodes them."""

from __future__ import annotations

from typing import Any

import msgspec

from fleetd.api.generation.fields import decode
from fleetd.api.openai import bodies

HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> bodies.ChatBody:
    return decode(msgspec.json.encode({"messages": HELLO, **fields}), bodies.ChatBody)


def completion(**fields: Any) -> bodies.CompletionBody:
    return decode(msgspec.json.encode({"prompt": "hello", **fields}), bodies.CompletionBody)
