"""The list of models as Anthropic's clients read it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from fleetd.api.anthropic.objects import ModelInfo, ModelPage
from fleetd.api.model_list import ModelObject
from fleetd.models.model_names import CLAUDE_PREFIX


def info(model: ModelObject, name: str = "") -> ModelInfo:
    """One model, under ``name`` if that is given."""
    return ModelInfo(
        id=name or model.id,
        display_name=model.id,
        created_at=datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z"),
        max_input_tokens=model.fleet.context_tokens or None,
    )


def page(models: Iterable[ModelObject]) -> ModelPage:
    """All of them, and each again under the name by which Claude Code lets it be chosen."""
    data = list(_each(models))
    ids = [model.id for model in data]
    return ModelPage(data=data, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None)


def _each(models: Iterable[ModelObject]) -> Iterator[ModelInfo]:
    listed = list(models)
    yield from (info(model) for model in listed)
    yield from (info(model, CLAUDE_PREFIX + model.id) for model in listed)
