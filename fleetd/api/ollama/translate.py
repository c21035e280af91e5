"""Bodies of /api/chat and /api/generate → the conversation that the model's template renders. Pure.

Ollama's messages have no ids of tool calls: a call without one is numbered, and a result without one belongs
to the oldest call that waits for a result, if it names none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from fleetd.api.generation import answer_form, conversation, images
from fleetd.api.generation.conversation import Plain
from fleetd.api.generation.reasoning import template_kwargs
from fleetd.api.generation.sampling_fields import sampling
from fleetd.api.ollama.bodies import (
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaMessage,
    OllamaOptions,
    OllamaTool,
)
from fleetd.engine.protocol import Generate, Prompt, TextPrompt
from fleetd.engine.sampling.constraint import Constraint
from fleetd.errors import InvalidValue, UnsupportedParameter

# What each has to be where it changes nothing.
_NEUTRAL = {"mirostat": 0, "tfs_z": 1, "typical_p": 1}

_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def chat(body: OllamaChatBody, request_id: str) -> Generate:
    """Raises InvalidValue, UnsupportedParameter."""
    if body.messages[-1].role == "assistant":
        raise UnsupportedParameter(
            "The last message is the assistant's: answers are not continued.",
            hint="End with a user's message.",
            param="messages",
        )
    tools = [_tool(each, f"tools[{i}]") for i, each in enumerate(body.tools or ())]
    strict = answer_form.strict_tools(
        (each.function.name, each.function.parameters, f"tools[{i}].function.parameters")
        for i, each in enumerate(body.tools or ())
        if each.function.strict
    )
    prompt = conversation.prompt(
        _messages(body.messages), tools, "auto", template_kwargs(body), strict_tools=strict
    )
    return _generate(body, request_id, prompt)


def generate(body: OllamaGenerateBody, request_id: str) -> Generate:
    """Raises InvalidValue, UnsupportedParameter."""
    for name, hint in {
        "suffix": "Put both sides into the prompt as the model expects it, with raw.",
        "template": "The model's own is used; raw sends a prompt that you rendered yourself.",
        "context": "Send the conversation to /api/chat: what was read before is found in the prefix cache.",
    }.items():
        if getattr(body, name):
            raise UnsupportedParameter(f"{name} is not supported.", hint=hint, param=name)
    text = body.prompt or ""
    if body.raw:
        if body.system:
            raise InvalidValue("system has no place in a raw prompt.", param="system")
        if body.images:
            raise UnsupportedParameter(
                "images have no place in a raw prompt.", hint="Leave out raw.", param="images"
            )
        return _generate(body, request_id, TextPrompt(text))
    messages = [conversation.user([*_images(body.images, "images"), text], "prompt")]
    system = [body.system] if body.system else []
    prompt = conversation.prompt(
        conversation.with_system(messages, system, "system"), None, "auto", template_kwargs(body)
    )
    return _generate(body, request_id, prompt)


def loading(body: OllamaBody, request_id: str) -> Generate:
    """What loads the model: a prompt whose tokens are only counted."""
    return Generate(id=request_id, prompt=TextPrompt("a"), max_tokens=0, count_only=True)


def keep_alive_s(value: float | str | None) -> float | None:
    """Seconds that a model stays loaded without requests; infinite for ever, None as the settings have it.

    Raises InvalidValue.
    """
    if value is None or value == "":
        return None
    seconds = _seconds(value) if isinstance(value, str) else float(value)
    if math.isnan(seconds):
        raise InvalidValue(
            "keep_alive has to be seconds, or a text as '5m' or '1h30m'; below 0 is for ever.",
            param="keep_alive",
        )
    return math.inf if seconds < 0 else seconds


def _seconds(text: str) -> float:
    """Seconds of a duration as Go writes it, or of a bare number; NaN if it is neither."""
    sign, bare = (-1.0, text[1:]) if text.startswith("-") else (1.0, text)
    if bare.isascii() and bare.isdecimal() and len(bare) < 16:
        return sign * int(bare)
    parts = _DURATION.findall(bare[:64])
    if not parts or "".join(map("".join, parts)) != bare:
        return math.nan
    return sign * sum(float(number) * _UNITS_S[unit] for number, unit in parts)


# ---- What both have --------------------------------------------------------------------------------------


def _generate(body: OllamaBody, request_id: str, prompt: Prompt) -> Generate:
    if body.logprobs:
        raise UnsupportedParameter(
            "logprobs are not supported here.", hint="/v1/chat/completions has them.", param="logprobs"
        )
    options = body.options or OllamaOptions()
    for name, neutral in _NEUTRAL.items():
        if getattr(options, name) not in (None, neutral):
            raise UnsupportedParameter(
                f"options.{name} is not supported.", hint="Leave it out.", param=f"options.{name}"
            )
    chosen = sampling(options, "ollama")
    repeated = chosen.repetition_penalty not in (None, 1)
    penalised = repeated or chosen.presence_penalty or chosen.frequency_penalty
    if options.repeat_last_n not in (None, -1) and penalised:
        raise UnsupportedParameter(
            "options.repeat_last_n is not supported beside a penalty: penalties look at all tokens here.",
            hint="Leave it out.",
            param="options.repeat_last_n",
        )
    limit = options.num_predict
    return Generate(
        id=request_id,
        prompt=prompt,
        sampling=chosen,
        # 0 and less is "no bound".
        max_tokens=limit if limit is not None and limit > 0 else None,
        stop=conversation.stops(options.stop),
        constraint=_form(body.format),
    )


def _form(asked: str | Plain | None) -> Constraint | None:
    """The form that the answer is held to. Raises InvalidValue, UnsupportedParameter."""
    if asked is None or asked == "":
        return None
    return answer_form.constraint("json_object" if isinstance(asked, str) else "json_schema", asked, "format")


def _tool(tool: OllamaTool, where: str) -> Plain:
    function = tool.function
    return conversation.tool(function.name, function.description, function.parameters, where)


def _images(files: Sequence[str] | None, where: str) -> list[bytes]:
    """The files of images, which come before the text of their message, as in Ollama."""
    return [images.from_base64(file, f"{where}[{i}]") for i, file in enumerate(files or ())]


# ---- Messages --------------------------------------------------------------------------------------------


def _messages(messages: Sequence[OllamaMessage]) -> list[Plain]:
    found: list[Plain] = []
    waiting: list[tuple[str, str]] = []  # id and name of each call without a result
    calls = 0
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        text = message.content or ""
        if message.images and message.role != "user":
            raise UnsupportedParameter(
                f"{where}.images: only a user's messages may have images.",
                hint="Send them in a message of the role user.",
                param=f"{where}.images",
            )
        match message.role:
            case "assistant":
                made = []
                for call in message.tool_calls or ():
                    call_id, name = call.id or f"call_{calls}", call.function.name
                    made.append(conversation.tool_call(call_id, name, call.function.arguments or ""))
                    waiting.append((call_id, name))
                    calls += 1
                reasoning = [message.thinking] if message.thinking else []
                found.append(conversation.assistant([text] if text else [], reasoning, made, where))
            case "tool":
                answered = message.tool_call_id or _answered(waiting, message.tool_name)
                waiting = [each for each in waiting if each[0] != answered]
                found.append(
                    conversation.message(
                        "tool", text, where, tool_call_id=answered, name=message.tool_name or None
                    )
                )
            case "user":
                found.append(conversation.user([*_images(message.images, f"{where}.images"), text], where))
            case role:
                found.append(conversation.message(role, text, where))
    return found


def _answered(waiting: Sequence[tuple[str, str]], name: str | None) -> str | None:
    """The id of the call that a result without one belongs to."""
    return next((call_id for call_id, called in waiting if name in (None, "", called)), None)
