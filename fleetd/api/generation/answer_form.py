"""The form that a client asks an answer to have: objects of bodies that say it, and the ``Constraint`` that
they come to. Pure.

A schema becomes JSON text before it goes to an engine: its keys keep their order, and its whole numbers may
have more than the 64 bits that MessagePack carries.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import msgspec

from fleetd import limits
from fleetd.api.generation.conversation import Plain
from fleetd.engine.grammar.schemas import enforceable
from fleetd.engine.sampling.constraint import Constraint, ConstraintKind
from fleetd.errors import InvalidValue, UnsupportedParameter

# ---- Fields ----------------------------------------------------------------------------------------------


class NamedSchema(msgspec.Struct, frozen=True, omit_defaults=True):
    """A schema that the answer's text is held to. ``strict`` false: as far as a grammar can. Its name and its
    description change nothing."""

    schema: Plain
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextForm(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Any text."""


class ObjectForm(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag="json_object"):
    """A JSON object, of any shape unless a schema stands beside it, as llama.cpp's clients send it."""

    schema: Plain | None = None


class SchemaForm(NamedSchema, frozen=True, tag_field="type", tag="json_schema"):
    """A schema beside its type, as in OpenAI's Responses and Anthropic's Messages."""


class ChatSchemaForm(msgspec.Struct, frozen=True, tag_field="type", tag="json_schema"):
    """A schema in an object of its own, as in OpenAI's chats."""

    json_schema: NamedSchema


TextFormat = TextForm | ObjectForm | SchemaForm
ResponseFormat = TextForm | ObjectForm | ChatSchemaForm


# ---- What they ask for -----------------------------------------------------------------------------------


def constraint(kind: ConstraintKind, value: Any, where: str) -> Constraint:
    """Args:
        value: a schema as an object or as text, a list of texts, a text, or anything for an object of any
            shape.
        where: the field that it stands in, as the client calls it.

    Raises:
        InvalidValue: no schema, or too large.
        UnsupportedParameter: a schema with a keyword that cannot be enforced.
    """
    match kind:
        case "json_object":
            return Constraint(kind, where=where)
        case "json_schema":
            schema = _decoded(value, where) if isinstance(value, str) else value
            # The engine writes it anew; here it is only checked, so that a refusal does not wait for a model.
            enforceable(schema, where)
            text = _as_text(schema)
        case "choice":
            text = msgspec.json.encode(value).decode()
        case "regex" | "grammar":
            text = value
    return _bounded(kind, text, where)


def of_format(form: ResponseFormat | TextFormat | None, where: str) -> Constraint | None:
    """What ``response_format`` and its like ask for. Raises as ``constraint`` does."""
    match form:
        case None | TextForm():
            return None
        case ObjectForm(schema=schema) if not schema:
            return constraint("json_object", None, where)
        case ObjectForm(schema=schema):
            return constraint("json_schema", schema, where)
        case ChatSchemaForm(json_schema=asked) | (SchemaForm() as asked):
            if asked.strict is False:
                return _bounded("json_schema", _as_text(asked.schema), where, lenient=True)
            try:
                return constraint("json_schema", asked.schema, where)
            except UnsupportedParameter as error:
                hint = f'{error.hint} With "strict": false it is enforced as far as it can be.'
                raise UnsupportedParameter(error.message, hint=hint, param=error.param) from None


def strict_tools(tools: Iterable[tuple[str, Plain | None, str]]) -> dict[str, str]:
    """``ChatPrompt.strict_tools`` for tools that are held to their schemas.

    Args:
        tools: the name of each, its schema, and the field in which that stands.

    Raises as ``constraint`` does.
    """
    found = {}
    for name, schema, where in tools:
        if schema is not None:
            enforceable(schema, where)
        found[name] = ""
    return found


# ---- Pieces ----------------------------------------------------------------------------------------------


def _decoded(text: str, where: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidValue(f"{where} is no JSON: {error}.", param=where) from None


def _as_text(schema: Any) -> str:
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


def _bounded(kind: ConstraintKind, text: str, where: str, *, lenient: bool = False) -> Constraint:
    if len(text) > limits.CONSTRAINT_CHARS:
        raise InvalidValue(
            f"{where} has {len(text)} characters, and {limits.CONSTRAINT_CHARS} at most are taken.",
            param=where,
        )
    return Constraint(kind, text, where, lenient)
