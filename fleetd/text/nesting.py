"""How deep free-form JSON is nested: templates, encoders and libraries recurse with what they are given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def is_deeper(value: Any, most: int) -> bool:
    """True if lists and objects are in each other more than so many deep. Not recursive itself."""
    level: list[Any] = [value]
    for _ in range(most):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return False
    return True


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
