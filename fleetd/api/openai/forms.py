"""The form of an answer as clients of OpenAI, vLLM and llama.cpp ask for it. Pure."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.api.generation import answer_form
from fleetd.api.generation.answer_form import ResponseFormat
from fleetd.api.generation.conversation import Plain
from fleetd.api.generation.fields import FleetFields
from fleetd.engine.sampling.constraint import Constraint, ConstraintKind, ConstraintText
from fleetd.errors import InvalidValue, UnsupportedParameter

#: A schema as an object, or as the text of one.
SchemaOrText = Plain | ConstraintText
ChoiceTexts = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=limits.CONSTRAINT_CHARS)]],
    Meta(min_length=1, max_length=limits.CONSTRAINT_CHOICES),
]


class StructuredOutputs(msgspec.Struct, frozen=True):
    """vLLM's: one of the first five. Others of its fields are about white space, which has one style here."""

    json: SchemaOrText | None = None
    regex: ConstraintText | None = None
    choice: ChoiceTexts | None = None
    grammar: ConstraintText | None = None
    json_object: bool | None = None
    structural_tag: Annotated[Any, Meta(description="Refused.")] = None
    disable_additional_properties: Annotated[bool | None, Meta(description="True is refused.")] = None


class FormFields(FleetFields, frozen=True, kw_only=True):
    """OpenAI's field for the answer's form, vLLM's and llama.cpp's. At most one may ask for one."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: ConstraintText | None = None
    guided_choice: ChoiceTexts | None = None
    guided_grammar: Annotated[ConstraintText | None, Meta(description="In Lark's notation, or in GBNF.")] = (
        None
    )
    json_schema: SchemaOrText | None = None
    grammar: Annotated[ConstraintText | None, Meta(description="In Lark's notation, or in GBNF.")] = None


def of_fields(body: FormFields) -> Constraint | None:
    """What a body of OpenAI's dialect asks for. An empty text asks for nothing.

    Raises:
        InvalidValue: two forms at once, or one that is none.
        UnsupportedParameter: a form that cannot be enforced.
    """
    vllm = body.structured_outputs
    asked: list[tuple[str, ConstraintKind, Any]] = [
        ("guided_json", "json_schema", body.guided_json),
        ("guided_regex", "regex", body.guided_regex),
        ("guided_choice", "choice", body.guided_choice),
        ("guided_grammar", "grammar", body.guided_grammar),
        ("json_schema", "json_schema", body.json_schema),
        ("grammar", "grammar", body.grammar),
        *(() if vllm is None else _of_vllm(vllm)),
    ]
    found = [answer_form.constraint(kind, value, where) for where, kind, value in asked if _says(value)]
    found = [*filter(None, [answer_form.of_format(body.response_format, "response_format")]), *found]
    if len(found) > 1:
        first, second, *_ = [each.where for each in found]
        raise InvalidValue(
            f"{first} and {second} both say what form the answer has.",
            hint="Send one of them.",
            param=second,
        )
    return found[0] if found else None


def _of_vllm(asked: StructuredOutputs) -> list[tuple[str, ConstraintKind, Any]]:
    for name in ("structural_tag", "disable_additional_properties"):
        if _says(getattr(asked, name)):
            raise UnsupportedParameter(
                f"structured_outputs.{name} is not supported.",
                hint="Send json, regex, choice, grammar or json_object.",
                param=f"structured_outputs.{name}",
            )
    kinds: dict[str, ConstraintKind] = {
        "json": "json_schema",
        "regex": "regex",
        "choice": "choice",
        "grammar": "grammar",
        "json_object": "json_object",
    }
    found = [(f"structured_outputs.{name}", kind, getattr(asked, name)) for name, kind in kinds.items()]
    if not any(_says(value) for _, _, value in found):
        raise InvalidValue(
            "structured_outputs does not say what form the answer has.",
            hint=f"Send one of {', '.join(kinds)} in it.",
            param="structured_outputs",
        )
    return found


def _says(value: Any) -> bool:
    return value is not None and value is not False and value != ""
