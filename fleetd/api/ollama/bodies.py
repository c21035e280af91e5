"""Request bodies under /api/.

Unknown fields and options are ignored, as Ollama does. Those that would change the answer are here, also
where ``translate.py`` only refuses them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.api.generation.conversation import StopText, StopTexts
from fleetd.api.generation.fields import ExactnessField, LocalOnly, PlacementField
from fleetd.api.generation.reasoning import ReasoningFields
from fleetd.api.generation.sampling_fields import takes_sampling

OllamaName = Annotated[str, Meta(min_length=1, max_length=256)]
ModelName = Annotated[str, Meta(max_length=4096)]
KeepAlive = Annotated[
    float | str,
    Meta(description="Seconds, or a text as '5m': how long the model stays loaded; below 0 for ever."),
]


class OllamaFunctionCall(msgspec.Struct, frozen=True):
    name: OllamaName
    arguments: dict[str, Any] | str | None = None


class OllamaToolCall(msgspec.Struct, frozen=True):
    function: OllamaFunctionCall
    id: str | None = None


class OllamaMessage(msgspec.Struct, frozen=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: list[str] | None = None


class OllamaFunction(msgspec.Struct, frozen=True):
    name: OllamaName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class OllamaTool(msgspec.Struct, frozen=True):
    function: OllamaFunction


@takes_sampling("ollama")
class OllamaOptions(msgspec.Struct, frozen=True):
    """What concerns only Ollama's own way to compute, as ``num_gpu``, is ignored: it changes no answer.

    ``num_ctx`` too: every model has its whole context here.
    """

    num_predict: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    stop: StopText | StopTexts | None = None
    # Refused unless they change nothing.
    mirostat: int | None = None
    tfs_z: float | None = None
    typical_p: float | None = None
    # Refused beside a penalty: penalties look at all tokens.
    repeat_last_n: int | None = None


class OllamaBody(ReasoningFields, frozen=True, kw_only=True):
    """What chat and generate share. Answers are streamed unless ``stream`` is false."""

    model: Annotated[ModelName, Meta(min_length=1)]
    stream: bool | None = None
    keep_alive: KeepAlive | None = None
    options: OllamaOptions | None = None
    local_only: LocalOnly = None
    placement: PlacementField = None
    exactness: ExactnessField = None
    format: Annotated[
        Literal["json", ""] | dict[str, Any] | None,
        Meta(description="The answer's form: any JSON object, or a schema."),
    ] = None
    # Refused if it is true.
    logprobs: bool | None = None

    @property
    def streamed(self) -> bool:
        return self.stream is not False


class OllamaChatBody(OllamaBody, frozen=True, kw_only=True):
    """Without messages the model is loaded."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=limits.MESSAGES)] = msgspec.field(
        default_factory=list
    )
    tools: Annotated[list[OllamaTool], Meta(max_length=limits.TOOLS)] | None = None


class OllamaGenerateBody(OllamaBody, frozen=True, kw_only=True):
    """Without a prompt the model is loaded. ``raw``: the prompt goes to the model as it is."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    # Refused unless they are empty.
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None
    images: list[str] | None = None


class OllamaModelBody(msgspec.Struct, frozen=True):
    """A model, by either of the two names that Ollama has had for the field."""

    model: ModelName = ""
    name: ModelName = ""
    stream: bool | None = None

    @property
    def ref(self) -> str:
        return self.model or self.name
