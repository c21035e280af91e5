"""DeepSeek V3.2's chat: calls of tools between DSML tags, and the template that mlx-lm has as a function.

    <|DSML|function_calls>
    <|DSML|invoke name="NAME">
    <|DSML|parameter name="KEY" string="true">TEXT</|DSML|parameter>
    <|DSML|parameter name="KEY" string="false">JSON</|DSML|parameter>
    </|DSML|invoke>
    </|DSML|function_calls>

The bars are full-width ones. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

# It begins the name of every tag.
DSML = "\uff5cDSML\uff5c"
DSML_START, DSML_END = f"<{DSML}function_calls>", f"</{DSML}function_calls>"

_MODULE = "mlx_lm.chat_templates.deepseek_v32"

Message = dict[str, Any]
Template = Callable[..., str]


def is_dsml_template(template: Any) -> bool:
    return getattr(template, "__module__", "") == _MODULE


def forgiving(template: Template) -> Template:
    """mlx-lm's template for the messages and options that every other template takes.

    By itself it fails for options it does not know and for arguments that are objects, and forgets tools
    where there is no system message.
    """

    def rendered(
        messages: Sequence[Message],
        tools: Any = None,
        *,
        enable_thinking: bool = True,
        add_generation_prompt: bool = False,
        **_unknown: Any,
    ) -> str:
        given = [_with_text_arguments(message) for message in messages]
        if tools and (not given or given[0]["role"] != "system"):
            given.insert(0, {"role": "system", "content": ""})
        try:
            return template(
                given,
                tools=tools,
                enable_thinking=enable_thinking,
                add_generation_prompt=add_generation_prompt,
            )
        except (AssertionError, NotImplementedError):
            # Their texts quote the message.
            raise ValueError("a message does not belong where it is") from None

    return rendered


def _with_text_arguments(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = [
        call | {"function": call["function"] | {"arguments": _text_of(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}


def _text_of(arguments: Any) -> str:
    """Arguments as the JSON text of an object; a text that is none, as an object that has it."""
    if isinstance(arguments, str):
        arguments = {"input": arguments}
    return json.dumps(arguments, ensure_ascii=False)
