"""Tools for a model whose chat template knows none: shown in the prompt, called in a syntax that it is told.

    the tools              end the system message, behind the client's text or the template's own
    the assistant's calls  end its text: <tool_call>, a line {"name": …, "arguments": …}, </tool_call>
    results of tools       are the user's text: <tool_response>, the result, </tool_response>

The syntax is that of ``json_tools`` in ``call_formats``. Calls have the white space that a grammar holds
answers to, so that a call has the same tokens in the history as in the answer. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Message = dict[str, Any]

_TOOLS = """\
You can call these tools:
<tools>
{tools}
</tools>
To call a tool, write its name and its arguments as JSON:
<tool_call>
{{"name": "TOOL", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>
The user sends you the result. If you need no tool, just answer."""


def with_tools(
    messages: Sequence[Message], tools: Sequence[Message], own_system: Callable[[], str]
) -> list[Message]:
    """The messages, the tools at the end of the leading system messages.

    Args:
        own_system: the system text that the template has for a conversation without one; "" if it has none.
    """
    text = instructions(tools)
    first = next((i for i, each in enumerate(messages) if each.get("role") != "system"), len(messages))
    if first == 0:
        return [{"role": "system", "content": _paragraphs(own_system(), text)}, *messages]
    system = messages[first - 1]
    told = system | {"content": _paragraphs(str(system.get("content") or ""), text)}
    return [*messages[: first - 1], told, *messages[first:]]


def instructions(tools: Sequence[Message]) -> str:
    """The text that shows tools to a model and says how it calls them."""
    return _TOOLS.format(tools="\n".join(_json(each["function"]) for each in tools))


def history_as_text(messages: Iterable[Message]) -> list[Message]:
    """Messages in which calls are the end of the assistant's text, and results are what the user says.

    Results that follow each other are one message.
    """
    turns: list[Message] = []
    results = False
    for each in messages:
        if each.get("role") != "tool":
            turns.append(_with_calls_in_text(each))
            results = False
            continue
        shown = f"<tool_response>\n{each.get('content') or ''}\n</tool_response>"
        if results:
            turns[-1] = {"role": "user", "content": f"{turns[-1]['content']}\n{shown}"}
        else:
            turns.append({"role": "user", "content": shown})
        results = True
    return turns


def _with_calls_in_text(message: Message) -> Message:
    calls = message.get("tool_calls") or ()
    shown = [f"<tool_call>\n{_call(each['function'])}\n</tool_call>" for each in calls]
    if not shown:
        return message
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return kept | {"content": "\n".join(filter(None, [message.get("content"), *shown]))}


def _call(function: Message) -> str:
    return _json({"name": function["name"], "arguments": function.get("arguments") or {}})


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _paragraphs(*texts: str) -> str:
    return "\n\n".join(filter(None, texts))
