"""Request bodies → work for the engine: one ``Generate`` per choice. Pure.

Choices of one body differ only in id and seed. With a seed, choice i gets ``seed + i``, so the same body
gives the same reply; without one, the engine draws the seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from fleetd import limits
from fleetd.api.body import parse
from fleetd.api.openai.bodies import (
    AssistantMessage,
    ChatBody,
    Common,
    CompletionBody,
    ContentPart,
    Message,
    SystemMessage,
    ToolChoice,
    ToolMessage,
    UserMessage,
)
from fleetd.engine.protocol import (
    RESERVED_TEMPLATE_KWARGS,
    ChatPrompt,
    Generate,
    Prompt,
    Sampling,
    Speculate,
    TextPrompt,
    TokenPrompt,
)
from fleetd.errors import BadRequest, InvalidValue, UnsupportedParameter

_SEED_MASK = 2**63 - 1


def chat(body: ChatBody, request_id: str) -> list[Generate]:
    """One Generate per choice.

    Raises:
        InvalidValue, UnsupportedParameter: what the types of ``ChatBody`` cannot say.
    """
    if body.response_format is not None and body.response_format.kind != "text":
        raise UnsupportedParameter(
            f"response_format {body.response_format.kind!r} is not supported.",
            hint="Ask for JSON in the prompt, or use a tool whose parameters have the wanted shape.",
            param="response_format",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidValue("top_logprobs needs logprobs.", hint="Set logprobs to true.", param="top_logprobs")
    prompt = ChatPrompt(
        messages=[message(item, i) for i, item in enumerate(body.messages)],
        tools=_tools(body),
        tool_choice=_tool_choice(body),
        template_kwargs=_template_kwargs(body),
    )
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return [
        Generate(
            id=f"{request_id}-{i}",
            prompt=prompt,
            sampling=_sampling(body, i),
            max_tokens=limit,
            stop=_stop(body),
            top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            speculate=_speculate(body),
        )
        for i in range(body.n or 1)
    ]


def completion(body: CompletionBody, request_id: str) -> list[Generate]:
    """One Generate per prompt and choice, the choices of one prompt next to each other.

    Raises:
        InvalidValue, UnsupportedParameter: what the types of ``CompletionBody`` cannot say.
    """
    n = body.n or 1
    if body.best_of is not None and body.best_of != n:
        raise UnsupportedParameter(
            f"best_of {body.best_of} is not supported with n {n}.", hint="Leave it out.", param="best_of"
        )
    prompts = _prompts(body.prompt)
    if len(prompts) * n > limits.COMPLETIONS_PER_REQUEST:
        raise InvalidValue(
            f"{len(prompts)} prompts times n {n} is over {limits.COMPLETIONS_PER_REQUEST} answers.",
            hint="Send fewer prompts at a time.",
            param="prompt",
        )
    return [
        Generate(
            id=f"{request_id}-{p * n + i}",
            prompt=prompt,
            sampling=_sampling(body, i),
            # The endpoint's default in OpenAI's API.
            max_tokens=16 if body.max_tokens is None else body.max_tokens,
            stop=_stop(body),
            top_logprobs=body.logprobs,
            echo=bool(body.echo),
            speculate=_speculate(body),
        )
        for p, prompt in enumerate(prompts)
        for i in range(n)
    ]


# ---- Pieces ----------------------------------------------------------------------------------------------


def _sampling(body: Common, choice: int) -> Sampling:
    given: dict[str, Any] = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": None if body.top_k is None else max(body.top_k, 0),  # -1 means "off" to vLLM's clients
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
    }
    return Sampling(
        **{name: value for name, value in given.items() if value is not None},
        seed=None if body.seed is None else (body.seed + choice) & _SEED_MASK,
        logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
    )


def _speculate(body: Common) -> Speculate | None:
    """None leaves speculation to the settings."""
    match body.speculate:
        case None:
            return None
        case bool(enabled):
            return Speculate(enabled)
        case asked:
            sources = None if asked.sources is None else list[str](asked.sources)
            return Speculate(asked.enabled, sources, asked.width, asked.key, asked.draft_model or "")


def _stop(body: Common) -> list[str]:
    if body.stop is None:
        return []
    return [body.stop] if isinstance(body.stop, str) else list(body.stop)


def _prompts(prompt: str | Sequence[str | int | list[int]]) -> list[Prompt]:
    """The four shapes of /v1/completions' prompt."""
    if isinstance(prompt, str):
        return [TextPrompt(prompt)]
    if all(isinstance(item, int) for item in prompt):
        return [TokenPrompt([item for item in prompt if isinstance(item, int)])]
    if all(isinstance(item, str) for item in prompt):
        return [TextPrompt(item) for item in prompt if isinstance(item, str)]
    lists = [item for item in prompt if isinstance(item, list)]
    if len(lists) != len(prompt) or not all(lists):
        raise InvalidValue(
            "prompt has to be a text, texts, token ids, or non-empty lists of token ids.",
            param="prompt",
        )
    return [TokenPrompt(item) for item in lists]


def message(message: Message, index: int) -> dict[str, Any]:
    """A message as chat templates read it: text content, arguments as an object, no absent keys."""
    where = f"messages[{index}]"
    plain: dict[str, Any] = {"content": _text(message.content, f"{where}.content")}
    match message:
        case AssistantMessage():
            plain["role"] = "assistant"
            if plain["content"] is None and not (message.tool_calls and message.refusal is None):
                plain["content"] = message.refusal or ""
            plain["reasoning_content"] = message.reasoning_content
            plain["tool_calls"] = _tool_calls(message) or None
        case ToolMessage():
            plain |= {"role": "tool", "tool_call_id": message.tool_call_id}
        case UserMessage():
            plain["role"] = "user"
        case SystemMessage():  # and developer, which is its newer name
            plain["role"] = "system"
    plain["name"] = message.name
    return _checked({k: v for k, v in plain.items() if v is not None or k == "content"}, where)


def _tool_calls(message: AssistantMessage) -> list[dict[str, Any]]:
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
        }
        for call in message.tool_calls or ()
    ]


def _text(content: str | list[ContentPart] | None, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        text = {"text": part.text, "refusal": part.refusal}.get(part.kind)
        if part.kind not in ("text", "refusal"):
            raise UnsupportedParameter(
                f"{where}[{i}]: content of type {part.kind[:64]!r} is not supported.",
                hint="Send text parts only.",
                param=where,
            )
        if text is None:
            raise InvalidValue(f"{where}[{i}]: a {part.kind} part needs {part.kind!r}.", param=where)
        texts.append(text)
    return "\n".join(texts)


def _arguments(arguments: str | dict[str, Any]) -> Any:
    """Templates iterate over arguments, clients send JSON text; text that is not JSON stays as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return parse(arguments.encode(), dict[str, Any]) if arguments.strip() else {}
    except BadRequest:
        return arguments


def _tools(body: ChatBody) -> list[dict[str, Any]] | None:
    if not body.tools:
        return None
    return [_checked(msgspec.to_builtins(tool), f"tools[{i}]") for i, tool in enumerate(body.tools)]


def _tool_choice(body: ChatBody) -> Any:
    choice = body.tool_choice
    if choice is None or choice in ("auto", "none"):
        return choice or "auto"
    names = [tool.function.name for tool in body.tools or ()]
    if not names:
        raise InvalidValue("tool_choice asks for a tool, but there are no tools.", param="tool_choice")
    if isinstance(choice, ToolChoice):
        if choice.function.name not in names:
            raise InvalidValue(
                f"tool_choice names {choice.function.name[:64]!r}, which is not among the tools.",
                hint=f"The tools are: {', '.join(names[:10])}.",
                param="tool_choice",
            )
        return {"name": choice.function.name}
    return choice


def _template_kwargs(body: ChatBody) -> dict[str, Any]:
    kwargs: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        kwargs["reasoning_effort"] = body.reasoning_effort
        if body.reasoning_effort == "none":
            kwargs["enable_thinking"] = False
    own: Mapping[str, Any] = body.chat_template_kwargs or {}
    if reserved := sorted(RESERVED_TEMPLATE_KWARGS & own.keys()):
        raise InvalidValue(f"chat_template_kwargs may not set {reserved[0]!r}.", param="chat_template_kwargs")
    return _checked({**kwargs, **own}, "chat_template_kwargs")


def _checked(value: dict[str, Any], where: str) -> dict[str, Any]:
    """Free-form JSON as it came, or a refusal where templates or the engine's MessagePack cannot carry it."""
    level: list[Any] = [value]
    for _ in range(limits.JSON_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            break
    else:
        raise InvalidValue(f"{where} is nested more than {limits.JSON_DEPTH} deep.", param=where)
    try:
        msgspec.msgpack.encode(value)
    except OverflowError:
        raise InvalidValue(f"{where}: a number is over 64 bits.", param=where) from None
    return value


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
