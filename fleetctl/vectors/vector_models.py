"""Which model makes vectors or scores documents if the command names none."""

from __future__ import annotations

from typing import Any

from fleetctl.connection.client import Client
from fleetctl.exits import ClientError

_WORDS = {"embedding": "makes vectors of texts", "rerank": "scores documents"}


def chosen_model(client: Client, named: str | None, purpose: str) -> str:
    """The model that is named, else the first of the fleet for this purpose, a loaded one before others.

    Raises ClientError if there is none.
    """
    if named:
        return named
    found = [model for model in client.get("/v1/models")["data"] if _fleet(model).get("purpose") == purpose]
    there = [model for model in found if _fleet(model).get("nodes")]
    best = min(there, key=lambda model: not _loaded(model), default=None)
    if best is None:
        raise ClientError(
            f"No model of the fleet {_WORDS[purpose]}.",
            hint="`fleetctl models --all` shows some, and `fleetctl models pull NAME` gets one.",
        )
    return str(best["id"])


def _fleet(model: dict[str, Any]) -> dict[str, Any]:
    found = model.get("fleet")
    return found if isinstance(found, dict) else {}


def _loaded(model: dict[str, Any]) -> bool:
    return any(place.get("state") == "loaded" for place in _fleet(model).get("nodes") or ())
