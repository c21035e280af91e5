"""What models are for, and the refusal of a request that is for another kind of model."""

from __future__ import annotations

from collections.abc import Mapping

from fleetd.control.model_facts import ModelPurpose
from fleetd.errors import ModelUnsupported
from fleetd.models import catalog

_WHAT: Mapping[ModelPurpose, str] = {
    "chat": "answers chats",
    "embedding": "makes vectors of texts",
    "rerank": "scores how well documents answer a query",
}
_WHERE: Mapping[ModelPurpose, str] = {
    "chat": "Ask it at /v1/chat/completions.",
    "embedding": "Ask it at /v1/embeddings.",
    "rerank": "Ask it at /v1/rerank.",
}


def check_purpose(model: str, purpose: ModelPurpose, wanted: ModelPurpose) -> None:
    """Raises ModelUnsupported if a model is for something else than what is ``wanted`` of it."""
    if purpose == wanted:
        return
    raise ModelUnsupported(
        f"{model} {_WHAT[purpose]}; this request is for a model that {_WHAT[wanted]}.",
        hint=f"{_WHERE[purpose]} `fleetctl models` shows what each model is for.",
        param="model",
    )


def check_catalog(model: str, wanted: ModelPurpose) -> None:
    """The same of a model that is on no machine yet, as far as the catalog knows it."""
    if (entry := catalog.find(model)) is not None:
        check_purpose(entry.name, entry.purpose, wanted)
