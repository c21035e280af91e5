"""An engine whose vectors are hashes of texts, and machines that have it."""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from fakes import FakeFolder

from fleetd.control.model_facts import MeasuredSpeed, ModelPurpose, ModelShape
from fleetd.engine.protocol import (
    Accepted,
    EmbedTexts,
    Event,
    Finished,
    Loading,
    RerankTexts,
    TextsEmbedded,
    TextsReranked,
)
from fleetd.errors import ModelNotFound
from fleetd.p2p.membership.cards import Card, MachineFacts, ModelCard
from fleetd.requests.request import LocatedModel
from fleetd.requests.vectors.job import TextsDone, VectorJob
from fleetd.requests.vectors.messages import TextsRequest, texts_of

MODEL, WIDTH = "minilm", 4
DIGEST = "e" * 64


def vector(text: str | list[int], width: int = WIDTH) -> bytes:
    """What the engine finds for a text, whichever machine it is on."""
    seed = hashlib.sha256(repr(text).encode()).digest()
    return struct.pack(f"<{width}f", *(byte / 255 for byte in (seed * (width // 32 + 1))[:width]))


def score(query: str, document: str) -> float:
    """The share of the query's words that the document has."""
    words = query.lower().split()
    return sum(word in document.lower() for word in words) / len(words)


def tokens(text: str | list[int]) -> int:
    return max(1, len(text) // 4) if isinstance(text, str) else len(text)


def answers(request: TextsRequest) -> list[Event]:
    """All events of a healthy answer."""
    texts = texts_of(request)
    found: list[Event] = [Accepted(request.id, sum(map(tokens, texts)))]
    counts = [tokens(text) for text in texts]
    if isinstance(request, EmbedTexts):
        width = request.dimensions or WIDTH
        vectors = b"".join(vector(text, width) for text in texts)
        found.append(TextsEmbedded(request.id, width, vectors, counts))
    else:
        scores = [score(request.query, str(text)) for text in texts]
        found.append(TextsReranked(request.id, scores, counts))
    return [*found, Finished(request.id, "stop")]


@dataclass(frozen=True)
class EncoderFolder(FakeFolder):
    name: str = MODEL
    purpose: ModelPurpose = "embedding"

    @property
    def shape(self) -> ModelShape:
        return ModelShape(
            "bert", self.weights_bytes, self.context_tokens, purpose=self.purpose, vector_width=WIDTH
        )


@dataclass
class VectorPool:
    """An engine pool. ``trouble`` is raised in place of the answers; ``gate`` is waited for before each."""

    loaded: bool = True
    trouble: Exception | None = None
    gate: asyncio.Event | None = None
    asked: list[TextsRequest] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: int = 0
    left: asyncio.Event = field(default_factory=asyncio.Event)
    on_ask: Callable[[TextsRequest], None] = lambda request: None

    def engine(self, folder: Any) -> object | None:
        return object() if self.loaded else None

    def load_s(self, folder: Any) -> float:
        return 3.0

    async def vectors(
        self, folder: Any, request: TextsRequest, *, evict: bool = True
    ) -> AsyncGenerator[Loading | Event, None]:
        self.asked.append(request)
        self.begun.set()
        self.on_ask(request)
        ended = False
        try:
            if not self.loaded:
                yield Loading("reading", 1, 2)
                self.loaded = True
            if self.gate is not None:
                await self.gate.wait()
            await asyncio.sleep(0)
            if self.trouble is not None:
                raise self.trouble
            for event in answers(request):
                yield event
            ended = True
        except Exception:
            ended = True
            raise
        finally:
            if not ended:
                self.cancelled += 1
                self.left.set()

    @property
    def texts(self) -> list[Any]:
        return [text for request in self.asked for text in texts_of(request)]


class Locator:
    """Finds one folder, or none."""

    def __init__(self, folder: EncoderFolder | None) -> None:
        self.folder = folder

    def locate(self, named: str, digest: str = "") -> LocatedModel:
        if self.folder is None:
            return LocatedModel(
                named, named, None, missing=ModelNotFound(f"No model {named}.", param="model")
            )
        return LocatedModel(named, self.folder.name, self.folder)  # type: ignore[arg-type]


def card(node_id: str, *, chip: str = "M4", purpose: ModelPurpose = "embedding", **fields: Any) -> Card:
    """A machine that has the model, loaded, at 1,000 tokens a second."""
    shape = ModelShape("bert", 1000, 512, purpose=purpose, vector_width=WIDTH)
    model = ModelCard(MODEL, digest=DIGEST, state="loaded", shape=shape, speed=MeasuredSpeed(1000.0))
    machine = MachineFacts(chip=chip, accelerator="metal")
    return Card(node_id, 1, 1, models=[model], machine=machine, **fields)


def embed_job(texts: list[str], **fields: Any) -> VectorJob:
    return VectorJob("v1", MODEL, EmbedTexts("v1", list(texts)), **fields)


def rerank_job(query: str, documents: list[str]) -> VectorJob:
    return VectorJob("r1", MODEL, RerankTexts("r1", query, documents))


def in_order(parts: list[TextsDone]) -> list[Any]:
    """What was found, in the order of the texts."""
    found = {text: each for part in parts for text, each in zip(part.texts, part.found, strict=True)}
    return [found[text] for text in sorted(found)]
