"""How the next token is chosen: ``Sampling``, and one table of what requests may say about it. Pure.

A new parameter is a field of ``Sampling`` and its row of ``PARAMETERS``, its arithmetic in
``sampler.py``, and a test. Fields of request bodies, their ranges, their translation and the refusals
of dialects that do not have the parameter are made from the table (``api/generation/sampling_fields.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from fleetd.text.bounded import Natural
from fleetd.text.decoding import from_plain

# Ranges that an engine can work with; they hold wherever a request is decoded, also one from another machine.
Temperature = Annotated[float, Meta(ge=0, le=5)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
TopP = Annotated[float, Meta(gt=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Repetition = Annotated[float, Meta(gt=0, le=10)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
# Without the look-ahead, Python lets a newline follow; \\Z is unknown to JSON Schema.
_TokenKey = Annotated[str, Meta(pattern=r"^[0-9]{1,9}(?!\n)$")]


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is chosen. ``temperature`` 0 is greedy. The same seed gives the same answer.

    None means what the model's own generation_config.json says, or else no effect (temperature 1).
    """

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Natural | None = None
    min_p: Fraction | None = None
    seed: Seed | None = None
    repetition_penalty: Repetition | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    #: Token id → what is added to its logit.
    logit_bias: dict[Natural, Bias] = {}


class SamplingDefaults(msgspec.Struct, frozen=True):
    """The fields of ``Sampling`` that a model's makers may recommend, with nothing left open."""

    temperature: Temperature = 1.0
    top_p: Fraction = 1.0
    top_k: Natural = 0
    min_p: Fraction = 0.0
    repetition_penalty: Repetition = 1.0

    @classmethod
    def of_model(cls, generation_config: Mapping[str, Any]) -> SamplingDefaults:
        """What a model's makers recommend; values that make no sense are left out."""
        found: dict[str, Any] = {}
        for field in msgspec.structs.fields(cls):
            value = generation_config.get(field.name)
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            try:
                found[field.name] = from_plain(value, field.type)
            except msgspec.ValidationError:
                continue
        return cls(**found)

    def asked(self, sampling: Sampling) -> SamplingDefaults:
        """These values, except where the request says otherwise."""
        asked = {name: getattr(sampling, name) for name in self.__struct_fields__}
        return replace(self, **{name: value for name, value in asked.items() if value is not None})


# ---- The table -------------------------------------------------------------------------------------------

Dialect = Literal["openai", "responses", "anthropic", "ollama"]
EVERY: tuple[Dialect, ...] = ("openai", "responses", "anthropic", "ollama")


class SamplingParameter(msgspec.Struct, frozen=True):
    """One field of ``Sampling``, as requests have it."""

    #: The field's name.
    field: str
    #: The dialects that have it.
    dialects: tuple[Dialect, ...]
    #: The value that changes nothing; None if every value chooses something.
    neutral: Any
    #: True if rows can be drawn in one call only if they have the same value.
    alike: bool = False
    #: Its name in the dialects that call it otherwise.
    names: Mapping[Dialect, str] = {}
    #: The type in a request; None if it is the field's own.
    asked: Any = None
    #: A request's value → the field's.
    read: Callable[[Any], Any] = lambda value: value
    #: By dialect, a value that leaves the parameter open, as null does in every dialect.
    unset: Mapping[Dialect, Any] = {}
    #: A sentence for the OpenAPI document.
    description: str = ""

    def name(self, dialect: Dialect) -> str:
        """What requests of a dialect call it."""
        return self.names.get(dialect, self.field)


PARAMETERS: tuple[SamplingParameter, ...] = (
    SamplingParameter("temperature", EVERY, neutral=1.0),
    SamplingParameter("top_p", EVERY, neutral=1.0, alike=True),
    SamplingParameter(
        "top_k",
        EVERY,
        neutral=0,
        alike=True,
        # -1 means "off" to vLLM's clients.
        asked=Annotated[int, Meta(ge=-1, le=2**31 - 1)],
        read=lambda tokens: max(tokens, 0),
    ),
    SamplingParameter("min_p", ("openai", "ollama"), neutral=0.0, alike=True),
    SamplingParameter(
        "seed",
        EVERY,
        neutral=None,
        unset={"ollama": -1},
        description="The same seed gives the same answer.",
    ),
    SamplingParameter(
        "repetition_penalty", ("openai", "ollama"), neutral=1.0, names={"ollama": "repeat_penalty"}
    ),
    SamplingParameter("presence_penalty", ("openai", "ollama"), neutral=0.0),
    SamplingParameter("frequency_penalty", ("openai", "ollama"), neutral=0.0),
    SamplingParameter(
        "logit_bias",
        ("openai",),
        neutral={},
        asked=dict[_TokenKey, Bias],
        read=lambda biases: {int(token): bias for token, bias in biases.items()},
    ),
)
