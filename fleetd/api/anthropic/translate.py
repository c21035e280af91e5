"""A Messages body → the conversation that the model's template renders. Pure.

What Anthropic's API knows and templates do not becomes text: system messages in the middle, documents, the
mark of a tool result that is an error. What varies between requests and says nothing to a model is dropped,
so that it costs no prefill: the billing block, signatures. A ``cache_control`` stands beside the messages, as
a place in one of them; on a tool, or on the whole request, it names a place that is known without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fleetd.api.anthropic.bodies import (
    ContentBlock,
    Conversation,
    InputMessage,
    MessagesBody,
    ToolDefinition,
)
from fleetd.api.generation import answer_form, conversation, images
from fleetd.api.generation.conversation import CacheMark, Plain
from fleetd.api.generation.reasoning import template_kwargs
from fleetd.api.generation.sampling_fields import sampling
from fleetd.engine.protocol import ChatPrompt, Generate
from fleetd.engine.sampling.constraint import Constraint
from fleetd.errors import InvalidValue, UnsupportedParameter

# Claude Code's first system block, with a number that differs between versions and even requests.
_BILLING = "x-anthropic-billing-header:"
# Of another server's reasoning and tools, where a session began there. Their results leave a note.
_SKIPPED = frozenset({"redacted_thinking", "fallback", "server_tool_use", "mcp_tool_use"})
_RESULT = "_tool_result"


def generate(body: MessagesBody, request_id: str) -> Generate:
    """The one answer of a request. Raises InvalidValue, UnsupportedParameter."""
    return Generate(
        id=request_id,
        prompt=prompt(body),
        sampling=sampling(body, "anthropic"),
        max_tokens=body.max_tokens,
        stop=conversation.stops(body.stop_sequences),
        call_pieces=bool(body.tools and body.stream),
        constraint=_form(body),
    )


def prompt(body: Conversation) -> ChatPrompt:
    """Raises InvalidValue, UnsupportedParameter."""
    if body.messages[-1].role == "assistant":
        raise UnsupportedParameter(
            "This model does not support assistant message prefill. The conversation must end with a user "
            "message.",
            param="messages",
        )
    if body.mcp_servers:
        raise UnsupportedParameter(
            "mcp_servers: this server calls no tools itself.", hint="Leave it out.", param="mcp_servers"
        )
    tools = [_tool(each, f"tools.{i}") for i, each in enumerate(body.tools or ())]
    effort = None if body.output_config is None else body.output_config.effort
    messages, marks = _messages(body)
    return conversation.prompt(
        messages,
        tools,
        _tool_choice(body, tools),
        # Without a word of it Anthropic's models answer at once.
        template_kwargs(body, default=False, effort=effort if isinstance(effort, str) else None),
        marks,
        answer_form.strict_tools(
            (each.name, each.input_schema, f"tools.{i}.input_schema")
            for i, each in enumerate(body.tools or ())
            if each.strict
        ),
        parallel_tools(body),
    )


def parallel_tools(body: Conversation) -> bool:
    return not (body.tool_choice and body.tool_choice.disable_parallel_tool_use)


def user_id(body: MessagesBody) -> object:
    """What a client calls its user or session; None if it does not."""
    return body.metadata.get("user_id") if isinstance(body.metadata, dict) else None


def marks_cache(body: Conversation) -> bool:
    """True if the client marks what of the prompt is to be cached."""
    blocks = [block for each in body.messages if not isinstance(each.content, str) for block in each.content]
    if isinstance(body.system, list):
        blocks += body.system
    marked = [*blocks, *(body.tools or ()), body]
    return any(each.cache_control is not None for each in marked)


def _form(body: Conversation) -> Constraint | None:
    """The form that the answer is held to. Raises InvalidValue, UnsupportedParameter."""
    newer = None if body.output_config is None else body.output_config.format
    if newer is not None and body.output_format is not None and newer != body.output_format:
        raise InvalidValue(
            "output_config.format and output_format differ.",
            hint="Leave output_format out: it is the older name.",
            param="output_format",
        )
    if newer is not None:
        return answer_form.of_format(newer, "output_config.format")
    return answer_form.of_format(body.output_format, "output_format")


# ---- Tools -----------------------------------------------------------------------------------------------


def _tool(tool: ToolDefinition, where: str) -> Plain:
    if tool.kind not in (None, "custom"):
        raise UnsupportedParameter(
            f"{where}: tools of type {tool.kind[:64]!r} are not supported: this server runs none itself.",
            hint="Leave it out, or define it with a name, a description and an input_schema.",
            param=where,
        )
    return conversation.tool(tool.name, tool.description, tool.input_schema or {"type": "object"}, where)


def _tool_choice(body: Conversation, tools: Sequence[Plain]) -> Any:
    choice = body.tool_choice
    if choice is None or choice.kind in ("auto", "none"):
        return "auto" if choice is None else choice.kind
    if choice.kind == "tool" and choice.name is None:
        raise InvalidValue("tool_choice of type 'tool' needs a name.", param="tool_choice")
    return conversation.forced_tool(choice.name if choice.kind == "tool" else None, tools, "tool_choice")


# ---- Messages --------------------------------------------------------------------------------------------


def _messages(body: Conversation) -> tuple[list[Plain], list[CacheMark]]:
    system, system_marks = _system(body.system)
    found: list[Plain] = []
    marks: list[CacheMark] = []
    for i, message in enumerate(body.messages):
        where = f"messages.{i}"
        if message.role != "system":
            read = _assistant if message.role == "assistant" else _user
            said, marked = read(message, where)
            for index, each in enumerate(said):
                before = conversation.append(found, each)
                marks += [(len(found) - 1, before + chars) for at, chars in marked if at == index]
            continue
        text = conversation.joined(list(_texts(message.content, f"{where}.content")))
        if not found:
            system.append(text)
        else:
            conversation.append_instruction(found, text, where)
    whole = conversation.with_system(found, system, "system")
    before = len(whole) - len(found)
    return whole, [*((0, chars) for chars in system_marks), *((index + before, n) for index, n in marks)]


def _system(system: str | list[ContentBlock] | None) -> tuple[list[str], list[int]]:
    """Its texts, and how many characters of them joined come before a mark."""
    blocks: Sequence[str | ContentBlock] = [system or ""] if isinstance(system, str | None) else system
    texts: list[str] = []
    marks: list[int] = []
    for i, block in enumerate(blocks):
        text = _without_billing(block if isinstance(block, str) else _text(block, f"system.{i}"))
        texts += [text] if text else []
        if _marked(block):
            marks.append(len(conversation.joined(texts)))
    return texts, marks


def _marked(block: str | ContentBlock) -> bool:
    return not isinstance(block, str) and block.cache_control is not None


def _without_billing(text: str) -> str:
    first, _, rest = text.partition("\n")
    return rest.lstrip("\n") if first.startswith(_BILLING) else text


def _user(message: InputMessage, where: str) -> tuple[list[Plain], list[CacheMark]]:
    """A user's message, after the results of tools that it brings."""
    if isinstance(message.content, str):
        return [conversation.message("user", message.content, where)], []
    found: list[Plain] = []
    marks: list[CacheMark] = []
    for i, block in enumerate(message.content):
        place = f"{where}.content.{i}"
        if block.kind == "tool_result":
            found.append(_tool_result(block, place))
        else:
            piece = _image(block, place) if block.kind == "image" else _text(block, place)
            conversation.append_user(found, piece, where)
        if _marked(block):
            marks.append((len(found) - 1, len(found[-1]["content"])))
    return found or [conversation.message("user", "", where)], marks


def _tool_result(block: ContentBlock, where: str) -> Plain:
    text = conversation.joined(list(_texts(block.content or "", f"{where}.content", returned=True)))
    if block.is_error and "error" not in text[:64].lower():
        text = f"Error: {text}"
    call_id = conversation.needed(block.tool_use_id, "tool_use_id", where)
    return conversation.message("tool", text, where, tool_call_id=call_id)


def _assistant(message: InputMessage, where: str) -> tuple[list[Plain], list[CacheMark]]:
    if isinstance(message.content, str):
        return [conversation.message("assistant", message.content, where)], []
    texts, reasoning, calls = [], [], []
    for i, block in enumerate(message.content):
        place = f"{where}.content.{i}"
        match block.kind:
            case "thinking":
                reasoning.append(block.thinking or "")
            case "tool_use":
                if block.name is None:
                    raise InvalidValue(f"{place}: a tool_use block needs a name.", param=place)
                call_id = conversation.needed(block.id, "id", place)
                calls.append(conversation.tool_call(call_id, block.name, block.input or {}))
            case kind if kind not in _SKIPPED:
                texts.append(_text(block, place, returned=kind.endswith(_RESULT)))
    said = conversation.assistant(texts, reasoning, calls, where)
    # Where calls of tools are shown is the template's choice: the mark of one stands for the end of the text.
    marked = any(_marked(block) for block in message.content)
    return [said], [(0, len(said["content"] or ""))] if marked else []


# ---- Text ------------------------------------------------------------------------------------------------


def _texts(content: str | list[ContentBlock], where: str, *, returned: bool = False) -> Iterator[str]:
    """The texts of some content. What is no text is refused, or noted if a tool ``returned`` it."""
    if isinstance(content, str):
        if content:
            yield content
        return
    for i, block in enumerate(content):
        yield _text(block, f"{where}.{i}", returned=returned)


def _image(block: ContentBlock, where: str) -> bytes:
    """The file of an image. Raises InvalidValue, UnsupportedParameter, PayloadTooLarge."""
    source = block.source if isinstance(block.source, dict) else {}
    match source.get("type"):
        case "base64":
            return images.from_base64(source.get("data"), f"{where}.source.data")
        case "url":
            return images.from_url(source.get("url"), f"{where}.source.url")
        case kind:
            raise UnsupportedParameter(
                f"{where}.source: images of type {str(kind)[:64]!r} are not supported.",
                hint="Send a source of type base64.",
                param=f"{where}.source",
            )


def _text(block: ContentBlock, where: str, *, returned: bool = False) -> str:
    match block.kind:
        case "text":
            if block.text is None:
                raise InvalidValue(f"{where}: a text block needs its text.", param=where)
            return block.text
        case "document" if isinstance(block.source, dict) and block.source.get("type") == "text":
            return conversation.joined([*filter(None, [block.title]), str(block.source.get("data", ""))])
        case "search_result":
            found = _texts(block.content or "", f"{where}.content", returned=returned)
            return conversation.joined([*filter(None, [block.title, str(block.source or "")]), *found])
        case "tool_reference":
            return f"The tool {block.tool_name or ''} may be called."
        case kind if returned:
            return conversation.left_out(kind)
        case kind:
            raise UnsupportedParameter(
                f"{where}: content of type {kind[:64]!r} is not supported.", hint="Send text.", param=where
            )
