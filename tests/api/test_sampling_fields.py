"""Sampling parameters in every dialect: one row of the table is all that a parameter needs."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta

from fleetd.api.anthropic import bodies as anthropic
from fleetd.api.anthropic import translate as anthropic_translate
from fleetd.api.generation import sampling_fields
from fleetd.api.generation.sampling_fields import takes_sampling
from fleetd.api.http.body import parse
from fleetd.api.ollama import bodies as ollama
from fleetd.api.ollama import translate as ollama_translate
from fleetd.api.openai import bodies as openai
from fleetd.api.openai import translate as openai_translate
from fleetd.api.responses import bodies as responses
from fleetd.api.responses import translate as responses_translate
from fleetd.engine.protocol import Generate
from fleetd.engine.sampling.parameters import EVERY, PARAMETERS, Dialect, Sampling, SamplingParameter
from fleetd.errors import InvalidValue

ASK = [{"role": "user", "content": "hi"}]
# By dialect: the body with its parameters, and what else it needs.
BODIES: dict[Dialect, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "openai": (openai.ChatBody, {"messages": ASK}),
    "responses": (responses.ResponsesBody, {"input": "hi"}),
    "anthropic": (anthropic.MessagesBody, {"messages": ASK}),
    "ollama": (ollama.OllamaOptions, {}),
}


class More(Sampling, frozen=True, omit_defaults=True):
    steadiness: Annotated[float, Meta(ge=0, le=1)] | None = None


STEADINESS = SamplingParameter(
    "steadiness",
    EVERY,
    neutral=0.0,
    names={"ollama": "steady"},
    unset={"anthropic": 1},
    description="How steady the answer is.",
)


def translated(dialect: Dialect, body: Any) -> Generate:
    match dialect:
        case "openai":
            return openai_translate.chat(body, "r")[0]
        case "responses":
            return responses_translate.translate(body, "r").generate
        case "anthropic":
            return anthropic_translate.generate(body, "r")
        case "ollama":
            chat = msgspec.convert({"model": "m", "messages": ASK}, ollama.OllamaChatBody)
            return ollama_translate.chat(msgspec.structs.replace(chat, options=body), "r")


@pytest.fixture
def one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_fields, "PARAMETERS", (*PARAMETERS, STEADINESS))
    monkeypatch.setattr(sampling_fields, "Sampling", More)


@pytest.mark.usefixtures("one_more")
@pytest.mark.parametrize("dialect", EVERY)
def test_a_new_row_is_accepted_bounded_documented_and_passed_on(dialect: Dialect) -> None:
    base, fields = BODIES[dialect]
    kind = takes_sampling(dialect, [STEADINESS])(base)
    name = STEADINESS.name(dialect)

    def asked(value: object) -> Any:
        body = parse(msgspec.json.encode({**fields, "seed": 4, name: value}), kind)
        return translated(dialect, body).sampling

    assert asked(0.25) == More(seed=4, steadiness=0.25)
    assert asked(None) == More(seed=4)
    assert asked(1) == (More(seed=4) if dialect == "anthropic" else More(seed=4, steadiness=1))
    with pytest.raises(InvalidValue) as refused:
        asked(1.5)
    assert refused.value.param == name
    _, components = msgspec.json.schema_components([kind])
    shown = components[base.__name__]["properties"][name]
    assert shown["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 1}
    assert shown["description"] == STEADINESS.description


@pytest.mark.parametrize("dialect", EVERY)
def test_a_body_has_the_parameters_of_its_dialect_and_no_others(dialect: Dialect) -> None:
    kind, _ = BODIES[dialect]
    names = {each.name(dialect): dialect in each.dialects for each in PARAMETERS}
    fields = {field.name for field in msgspec.structs.fields(kind)}
    assert {name for name, served in names.items() if served} == fields & set(names)


def test_both_endpoints_of_openai_have_the_same_parameters() -> None:
    names = {each.field for each in PARAMETERS}
    chat, text = (set(kind.__struct_fields__) & names for kind in (openai.ChatBody, openai.CompletionBody))
    assert chat == text


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda each: each.field)
def test_a_value_without_effect_can_be_asked_for_in_every_dialect(parameter: SamplingParameter) -> None:
    if parameter.neutral is None:
        return
    for dialect in parameter.dialects:
        kind, fields = BODIES[dialect]
        body = parse(msgspec.json.encode({**fields, parameter.name(dialect): parameter.neutral}), kind)
        assert getattr(translated(dialect, body).sampling, parameter.field) == parameter.neutral
