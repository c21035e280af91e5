"""Whether and how much a model reasons before it answers: one meaning for the fields of every client. Pure.

Each dialect takes all of these fields:

    field                             sent by                             on       level
    reasoning_effort                  OpenAI's chats                      by word  word
    reasoning.effort                  OpenAI's Responses, OpenRouter      by word  word
    reasoning.enabled                 OpenRouter                          value
    reasoning, as value or word       LM Studio                           value    word
    think, as value or word           Ollama                              value    word
    thinking, as value                templates and their clients         value
    thinking.type                     Anthropic, DeepSeek                 unless "disabled"
    enable_thinking                   Qwen's clients                      value
    chat_template_kwargs              by vLLM's and llama.cpp's: enable_thinking, thinking, reasoning_effort
    output_config.effort              Anthropic                                    word

    word                              on       level
    none                              no
    minimal, low                      yes      low
    medium                            yes      medium
    high, xhigh, max                  yes      high

Two fields that say different things are refused. ``output_config.effort`` is no switch: Anthropic's clients
send it with reasoning turned off as well. Budgets in tokens are taken and not kept to: a model ends its
reasoning by itself. ``reasoning_format`` says how reasoning is given: here always apart from the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from fleetd.api.generation import conversation
from fleetd.engine.protocol import RESERVED_TEMPLATE_KWARGS, THINKING_SWITCHES
from fleetd.errors import InvalidValue, UnsupportedParameter

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

# Templates know three levels.
_LEVELS: Mapping[str, str] = {
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}


class ThinkingConfig(msgspec.Struct, frozen=True, rename={"kind": "type"}):
    """``budget_tokens`` is taken and not kept to."""

    kind: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None


class ReasoningOptions(msgspec.Struct, frozen=True):
    """Reasoning is given whole: ``summary`` is taken and changes nothing."""

    effort: Effort | None = None
    summary: str | None = None
    enabled: bool | None = None
    exclude: bool | None = None


class ReasoningFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields by which clients say it; all mean the same."""

    reasoning_effort: Effort | None = None
    reasoning: bool | Effort | ReasoningOptions | None = None
    think: bool | Effort | None = None
    thinking: bool | ThinkingConfig | None = None
    enable_thinking: bool | None = None
    reasoning_format: Annotated[
        str | None,
        Meta(
            description="Reasoning is always given apart from the answer.",
            extra_json_schema={"enum": [None, "auto", "deepseek", "parsed"]},
        ),
    ] = None
    chat_template_kwargs: dict[str, Any] | None = None


class _Reading(NamedTuple):
    """What one field says; None where it says nothing."""

    field: str
    on: bool | None
    level: str | None = None


def template_kwargs(body: ReasoningFields, *, default: bool | None = None, effort: str | None = None) -> Any:
    """Arguments of the chat template.

    Args:
        default: whether the model reasons where no field says so; None leaves it to the template.
        effort: Anthropic's ``output_config.effort``.

    Raises:
        InvalidValue: two fields contradict each other, or ``chat_template_kwargs`` may not set a name.
        UnsupportedParameter: reasoning is to be given in another form.
    """
    _refuse_forms(body)
    own = body.chat_template_kwargs or {}
    if reserved := sorted(RESERVED_TEMPLATE_KWARGS & own.keys()):
        raise InvalidValue(f"chat_template_kwargs may not set {reserved[0]!r}.", param="chat_template_kwargs")
    readings = [*_readings(body), *_own_readings(own)]
    on = _settled(readings, "on")
    level = _settled([*readings, _Reading("output_config.effort", None, _LEVELS.get(effort or ""))], "level")
    if on is None:
        on = default
    kwargs: dict[str, Any] = {} if level is None else {"reasoning_effort": level}
    if on is not None:
        kwargs |= dict.fromkeys(THINKING_SWITCHES, on)
    return conversation.checked({**kwargs, **own}, "chat_template_kwargs")


def _refuse_forms(body: ReasoningFields) -> None:
    if body.reasoning_format not in (None, "auto", "deepseek", "parsed"):
        raise UnsupportedParameter(
            f"reasoning_format {body.reasoning_format[:64]!r} is not supported: reasoning is always given "
            "apart from the answer.",
            hint="Leave it out.",
            param="reasoning_format",
        )
    if isinstance(body.reasoning, ReasoningOptions) and body.reasoning.exclude:
        raise UnsupportedParameter(
            "reasoning.exclude is not supported: reasoning is always given, apart from the answer.",
            hint="Set reasoning.enabled to false, or do not show it.",
            param="reasoning.exclude",
        )


def _readings(body: ReasoningFields) -> Iterator[_Reading]:
    yield _read("reasoning_effort", body.reasoning_effort)
    if isinstance(body.reasoning, ReasoningOptions):
        yield _read("reasoning.effort", body.reasoning.effort)
        yield _read("reasoning.enabled", body.reasoning.enabled)
    else:
        yield _read("reasoning", body.reasoning)
    yield _read("think", body.think)
    if isinstance(body.thinking, ThinkingConfig):
        yield _Reading("thinking.type", body.thinking.kind != "disabled")
    else:
        yield _read("thinking", body.thinking)
    yield _read("enable_thinking", body.enable_thinking)


def _own_readings(own: Mapping[str, Any]) -> Iterator[_Reading]:
    """What the template's own arguments say; values of other kinds are the template's affair."""
    for name in (*THINKING_SWITCHES, "reasoning_effort"):
        value = own.get(name)
        if isinstance(value, bool) or (isinstance(value, str) and value in (*_LEVELS, "none")):
            yield _read(f"chat_template_kwargs.{name}", value)


def _read(field: str, value: bool | str | None) -> _Reading:
    if isinstance(value, str):
        return _Reading(field, value != "none", _LEVELS.get(value))
    return _Reading(field, value)


def _settled(readings: list[_Reading], what: Literal["on", "level"]) -> Any:
    """The one value that all fields agree on; None if none says anything. Raises InvalidValue."""
    said = [(each.field, getattr(each, what)) for each in readings if getattr(each, what) is not None]
    for field, value in said[1:]:
        if value != said[0][1]:
            raise InvalidValue(
                f"{said[0][0]} and {field} contradict each other on how the model is to reason.",
                hint=f"Send one of {said[0][0]} and {field}.",
                param=field,
            )
    return said[0][1] if said else None
