"""What a model can do besides answer, by the best that is known of it."""

from __future__ import annotations

from pathlib import Path

from fleetd.engine.protocol import Ready
from fleetd.models.abilities import ModelAbilities, of_files
from fleetd.models.catalog import CatalogEntry


def abilities(
    path: Path | None, entry: CatalogEntry | None = None, facts: Ready | None = None
) -> ModelAbilities:
    """``facts``: what the worker says that has it loaded; it knows best. Without them files are read."""
    if facts is not None:
        return ModelAbilities(facts.tool_format if facts.tool_calls else "", facts.reasoning)
    return of_files(path, entry)
