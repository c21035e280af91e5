"""Answers and stream objects under /api/, as Ollama's clients read them.

Durations are in nanoseconds, sizes in bytes. What is 0, empty or unknown is left out, as Ollama does.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

DoneReason = Literal["", "stop", "length", "load", "unload"]


class OllamaCalledFunction(Struct, frozen=True):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCalled(Struct, frozen=True):
    id: str
    function: OllamaCalledFunction


class OllamaAnswer(Struct, frozen=True, omit_defaults=True):
    """A message, or the piece of it that is new."""

    role: Literal["assistant", "user"]
    content: str
    thinking: str = ""
    tool_calls: list[OllamaCalled] = []


class OllamaFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Figures of the last object of an answer, times in nanoseconds."""

    done_reason: DoneReason = ""
    total_duration: int = 0
    load_duration: Annotated[
        int, Meta(description="Until a worker took the prompt, which includes waiting for one.")
    ] = 0
    prompt_eval_count: int = 0
    prompt_eval_duration: int = 0
    eval_count: int = 0
    eval_duration: int = 0


class OllamaChatReply(OllamaFigures, frozen=True, kw_only=True):
    model: str
    created_at: str
    message: OllamaAnswer
    done: bool


class OllamaTextReply(OllamaFigures, frozen=True, kw_only=True):
    model: str
    created_at: str
    response: str
    thinking: str = ""
    done: bool


# ---- Models ----------------------------------------------------------------------------------------------


class OllamaVersion(Struct, frozen=True):
    """``version``: the Ollama whose API this is like; clients compare it. ``fleetd``: what answers."""

    version: str
    fleetd: str


class OllamaDetails(Struct, frozen=True):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaTag(Struct, frozen=True, kw_only=True):
    """``digest`` differs where the files do; it is no hash of them."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaTags(Struct, frozen=True):
    models: list[OllamaTag]


class OllamaRunning(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``expires_at`` is left out for a model that another machine has loaded."""

    name: str
    model: str
    size: int
    size_vram: int
    digest: str
    details: OllamaDetails
    context_length: int
    expires_at: str = ""


class OllamaProcesses(Struct, frozen=True):
    models: list[OllamaRunning]


class OllamaShown(Struct, frozen=True, kw_only=True):
    modified_at: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    template: str = ""
    modelfile: str = ""
    parameters: str = ""
    license: str = ""


class OllamaPullLine(Struct, frozen=True, omit_defaults=True):
    status: str
    digest: str = ""
    total: int = 0
    completed: int = 0
