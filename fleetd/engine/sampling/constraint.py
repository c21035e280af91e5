"""The form that an answer's text is held to. Pure.

A constraint is about the text of an answer: what the model thinks before it is outside of it, and so are
calls of tools, whose arguments ``ChatPrompt.strict_tools`` is about.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fleetd import limits

ConstraintKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]
ConstraintText = Annotated[str, Meta(max_length=limits.CONSTRAINT_CHARS)]


class Constraint(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the text of an answer has to be."""

    kind: ConstraintKind
    #: The schema as JSON, as the client has it, the regular expression, the choices as a JSON list of texts,
    #: or the grammar in Lark's or in GBNF's notation; "" for a JSON object of any shape.
    text: ConstraintText = ""
    #: The field of the request that asks for it, for errors.
    where: Annotated[str, Meta(max_length=256)] = ""
    #: Keywords of a schema that cannot be enforced are left out; else they are refused.
    lenient: bool = False
