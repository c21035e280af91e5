"""JSON schemas that answers can be held to. Pure.

A schema of a client is read as the set of values that it allows (``schema_reading``, ``value_sets``) and
written anew (``schema_writing``) in the keywords that the library enforces rightly. Every value that the new
schema allows is valid by the client's; some that the client's allows are left out:

- an object that lists properties, and does not say whether there may be others, has no others;
- a schema without a type, whose keywords speak of one type, is held to that type;
- keys come in the order of the schema.
"""

from __future__ import annotations

import json
from typing import Any

from fleetd import limits
from fleetd.engine.grammar.schema_reading import SchemaReader
from fleetd.engine.grammar.schema_writing import SchemaWriter
from fleetd.errors import FleetError, InvalidValue


def enforceable(schema: Any, where: str) -> str:
    """A schema, all of whose keywords a grammar can enforce, as JSON text.

    Args:
        schema: as a client sent it.
        where: the field that it stands in, for errors.

    Raises:
        UnsupportedParameter: a keyword that cannot be enforced; names it and its path.
        InvalidValue: no schema at all, one that no answer fits, or one that is too large or nested too deep.
    """
    return _written(schema, where, lenient=False)


def lenient(schema: Any) -> str:
    """What a grammar can enforce of a schema, as JSON text: keywords that it cannot enforce are left out;
    what is no schema, or beyond the bounds, becomes any object. Never raises."""
    try:
        return _written(schema, "schema", lenient=True)
    except FleetError:
        return '{"type": "object"}'


def _written(schema: Any, where: str, *, lenient: bool) -> str:
    reader = SchemaReader(schema, where, lenient=lenient)
    values = reader.read()
    written = SchemaWriter(reader.algebra, where, lenient=lenient).written(values)
    text = json.dumps(written, ensure_ascii=False, separators=(",", ":"))
    if len(text) > limits.CONSTRAINT_CHARS:
        raise InvalidValue(
            f"{where}: written out, the schema has more than {limits.CONSTRAINT_CHARS:,} characters.",
            param=where,
        )
    return text
