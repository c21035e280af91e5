"""Request bodies → work for the engine: one ``Generate`` per choice. Pure.

Choices of one body differ only in id and seed. With a seed, choice i gets ``seed + i``, so the same body
gives the same reply; without one, the engine draws the seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleetd import limits
from fleetd.api.generation import answer_form, conversation, images
from fleetd.api.generation.conversation import Plain
from fleetd.api.generation.fields import speculate
from fleetd.api.generation.images import Piece
from fleetd.api.generation.reasoning import template_kwargs
from fleetd.api.generation.sampling_fields import sampling
from fleetd.api.openai.bodies import (
    AllowedChoice,
    AssistantMessage,
    ChatBody,
    Common,
    CompletionBody,
    ContentPart,
    ImageUrl,
    Message,
    SystemMessage,
    ToolMessage,
    UserMessage,
)
from fleetd.api.openai.forms import of_fields
from fleetd.engine.protocol import Generate, Prompt, TextPrompt, TokenPrompt
from fleetd.engine.sampling.constraint import Constraint
from fleetd.errors import InvalidValue, UnsupportedParameter

# Parts that are texts.
_TEXTS = ("text", "refusal")


def chat(body: ChatBody, request_id: str) -> list[Generate]:
    """One Generate per choice.

    Raises:
        InvalidValue, UnsupportedParameter: what the types of ``ChatBody`` cannot say.
    """
    if body.top_logprobs and not body.logprobs:
        raise InvalidValue("top_logprobs needs logprobs.", hint="Set logprobs to true.", param="top_logprobs")
    tools = [
        conversation.tool(
            each.function.name, each.function.description, each.function.parameters, f"tools[{i}]"
        )
        for i, each in enumerate(body.tools or ())
    ]
    tools, choice = _tool_choice(body, tools)
    prompt = conversation.prompt(
        [message(item, i) for i, item in enumerate(body.messages)],
        tools,
        choice,
        template_kwargs(body),
        strict_tools=answer_form.strict_tools(
            (each.function.name, each.function.parameters, f"tools[{i}].function.parameters")
            for i, each in enumerate(body.tools or ())
            if each.function.strict
        ),
        parallel_calls=body.parallel_tool_calls is not False,
    )
    form = _form(body)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return [
        Generate(
            id=f"{request_id}-{i}",
            prompt=prompt,
            sampling=sampling(body, "openai", i),
            max_tokens=limit,
            stop=conversation.stops(body.stop),
            top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            speculate=speculate(body.speculate),
            call_pieces=bool(tools and body.stream),
            ignore_eos=bool(body.ignore_eos),
            min_tokens=_min_tokens(body, limit),
            constraint=form,
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
    if body.add_special_tokens is False:
        raise UnsupportedParameter(
            "add_special_tokens false is not supported: a text begins as the model's tokenizer has it.",
            hint="Leave it out, or send token ids.",
            param="add_special_tokens",
        )
    prompts = _prompts(body.prompt)
    form = _form(body)
    # The endpoint's default in OpenAI's API.
    limit = max(16, body.min_tokens or 0) if body.max_tokens is None else body.max_tokens
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
            sampling=sampling(body, "openai", i),
            max_tokens=limit,
            stop=conversation.stops(body.stop),
            top_logprobs=body.logprobs,
            echo=bool(body.echo),
            speculate=speculate(body.speculate),
            ignore_eos=bool(body.ignore_eos),
            min_tokens=_min_tokens(body, limit),
            constraint=form,
        )
        for p, prompt in enumerate(prompts)
        for i in range(n)
    ]


# ---- Pieces ----------------------------------------------------------------------------------------------


def _form(body: Common) -> Constraint | None:
    """The form that the answer is held to. Raises InvalidValue, UnsupportedParameter."""
    form = of_fields(body)
    for name in ("ignore_eos", "min_tokens"):
        if form is not None and getattr(body, name):
            raise InvalidValue(
                f"{name} has no place beside {form.where}: such an answer ends where its form does.",
                hint="Leave one of them out.",
                param=name,
            )
    return form


def _min_tokens(body: Common, limit: int | None) -> int:
    least = body.min_tokens or 0
    if limit is not None and least > limit:
        raise InvalidValue(
            f"min_tokens {least} is more than the answer may have, which is {limit}.",
            hint="Raise max_tokens or lower min_tokens.",
            param="min_tokens",
        )
    return least


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
    """A message as chat templates read it. Raises InvalidValue, UnsupportedParameter."""
    where = f"messages[{index}]"
    if isinstance(message, UserMessage):
        return conversation.user(_pieces(message.content, f"{where}.content"), where, name=message.name)
    text = _text(message.content, f"{where}.content", returned=isinstance(message, ToolMessage))
    match message:
        case AssistantMessage():
            if text is None and not (message.tool_calls and message.refusal is None):
                text = message.refusal or ""
            calls = [
                conversation.tool_call(call.id or "", call.function.name, call.function.arguments or "")
                for call in message.tool_calls or ()
            ]
            return conversation.message(
                "assistant",
                text,
                where,
                reasoning_content=_reasoning(message),
                tool_calls=calls or None,
                name=message.name,
            )
        case ToolMessage():
            return conversation.message(
                "tool", text or "", where, tool_call_id=message.tool_call_id, name=message.name
            )
        case SystemMessage():  # and developer, which is its newer name
            return conversation.message("system", text, where, name=message.name)


def _reasoning(message: AssistantMessage) -> str | None:
    """Under either of its names; vLLM and OpenRouter have the shorter one."""
    if message.reasoning_content is not None:
        return message.reasoning_content
    return message.reasoning if isinstance(message.reasoning, str) else None


def _text(content: str | list[ContentPart] | None, where: str, *, returned: bool) -> str | None:
    """What is no text is refused, or left out with a note if a tool ``returned`` it."""
    if content is None or isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        told = returned and part.kind not in _TEXTS
        texts.append(conversation.left_out(part.kind) if told else _part_text(part, f"{where}[{i}]", where))
    return conversation.joined(texts)


def _pieces(content: str | list[ContentPart], where: str) -> list[Piece]:
    """The texts and images of a user's message. Raises InvalidValue, UnsupportedParameter."""
    if isinstance(content, str):
        return [content]
    return [
        _image(part, f"{where}[{i}]")
        if part.kind == "image_url"
        else _part_text(part, f"{where}[{i}]", where)
        for i, part in enumerate(content)
    ]


def _image(part: ContentPart, where: str) -> bytes:
    given = part.image_url
    return images.from_url(given.url if isinstance(given, ImageUrl) else given, f"{where}.image_url")


def _part_text(part: ContentPart, where: str, param: str) -> str:
    if part.kind not in _TEXTS:
        raise UnsupportedParameter(
            f"{where}: content of type {part.kind[:64]!r} is not supported.",
            hint="Send text parts, and images in a user's messages.",
            param=param,
        )
    text = {"text": part.text, "refusal": part.refusal}[part.kind]
    if text is None:
        raise InvalidValue(f"{where}: a {part.kind} part needs {part.kind!r}.", param=param)
    return text


def _tool_choice(body: ChatBody, tools: list[Plain]) -> tuple[list[Plain], Any]:
    """The tools that the answer may call, and whether it has to."""
    choice = body.tool_choice
    if choice is None or choice in ("auto", "none"):
        return tools, choice or "auto"
    if isinstance(choice, str):
        return tools, conversation.forced_tool(None, tools, "tool_choice")
    if isinstance(choice, AllowedChoice):
        names = [each.function.name for each in choice.allowed_tools.tools]
        return conversation.allowed_tools(names, choice.allowed_tools.mode, tools, "tool_choice")
    return tools, conversation.forced_tool(choice.function.name, tools, "tool_choice")
