"""One request for vectors or scores: what was asked, and what is known of it so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from fleetd import limits
from fleetd.control.model_facts import ModelPurpose
from fleetd.engine.protocol import EmbedTexts, Loading
from fleetd.errors import FleetError
from fleetd.requests.job import CHARS_PER_TOKEN, THIS_NAME, Exactness
from fleetd.requests.vectors.messages import TextsRequest, texts_of
from fleetd.requests.vectors.part_answer import Found
from fleetd.requests.vectors.parts import VectorMachine

VectorRoute = Literal["embeddings", "rerank"]
VectorPlan = Literal["local", "remote", "spread"]


class LongJob(msgspec.Struct, frozen=True):
    """What a request is a part of: a client's job of so many texts that it sends them in several requests."""

    # As the client has it.
    id: str
    # Texts in all its requests; 0 if unknown.
    total: int = 0


class TextsDone(msgspec.Struct, frozen=True):
    """Some texts by their numbers, with what was found for each."""

    texts: Sequence[int]
    found: Sequence[Found]


@dataclass(slots=True)
class MachineRun:
    """What one machine has computed of a request. Times are monotonic seconds."""

    machine: VectorMachine
    # When its first part began, and when the last one ended.
    began_s: float
    ended_s: float = 0.0
    parts: int = 0
    texts: int = 0
    tokens: int = 0
    # From a part's begin to its answer, all parts together, without a load; and the load.
    computed_s: float = 0.0
    loaded_s: float = 0.0
    # Why it is asked no more; None if it is.
    lost: FleetError | None = None


@dataclass(slots=True, eq=False)
class VectorJob:
    """``request`` has all texts; machines are asked for parts of it. ``model``: as the client named it.

    ``exact``: all parts are computed by machines of one kind. ``client``: the program that asks, as it calls
    itself; "" if unknown.
    """

    id: str
    model: str
    request: TextsRequest
    local_only: bool = False
    exact: bool = False
    client: str = ""
    # None for a request by itself.
    part_of: LongJob | None = None
    # The model's canonical name, and the width of its vectors; "" and 0 until they are known.
    name: str = ""
    width: int = 0
    # What kind of machine this one is for the model, as ``VectorMachine.kind``; "" if it has not the model.
    own_kind: str = ""
    # By node id: those that have computed something in the order in which they did, and those that began.
    ran: dict[str, MachineRun] = field(default_factory=dict)
    # Seconds until the first machine had the model loaded, if that was not before.
    load_s: float = 0.0
    # The load that it waits for; None while it waits for none.
    loading: Loading | None = None

    @property
    def purpose(self) -> ModelPurpose:
        """What its model has to be for."""
        return "embedding" if isinstance(self.request, EmbedTexts) else "rerank"

    @property
    def route(self) -> VectorRoute:
        return "embeddings" if isinstance(self.request, EmbedTexts) else "rerank"

    @property
    def finished(self) -> list[MachineRun]:
        """The work of the machines that have computed some of it."""
        return [run for run in self.ran.values() if run.texts]

    @property
    def lost(self) -> list[MachineRun]:
        """The work of the machines that failed it."""
        return [run for run in self.ran.values() if run.lost is not None]

    @property
    def nodes(self) -> list[str]:
        """Names of the machines that have computed some of it; this one if none has."""
        return [run.machine.name for run in self.finished] or [THIS_NAME]

    @property
    def kind(self) -> VectorPlan:
        return "spread" if len(self.nodes) > 1 else "local" if self.nodes == [THIS_NAME] else "remote"

    @property
    def plan(self) -> str:
        """Where it ran, as the header X-Fleet-Plan says it."""
        return f"{self.kind}; nodes={','.join(self.nodes)}"

    @property
    def exactness(self) -> Exactness:
        """``exact`` if one machine could have computed all of it with the same bytes: this one, if it has
        the model."""
        kinds = {run.machine.kind for run in self.finished}
        if self.own_kind:
            kinds.add(self.own_kind)
        return "exact" if len(kinds) <= 1 else "equivalent"

    @property
    def done(self) -> int:
        """How many texts have their vector or score."""
        return sum(run.texts for run in self.ran.values())

    @property
    def tokens(self) -> int:
        """Computed so far."""
        return sum(run.tokens for run in self.ran.values())

    @property
    def held(self) -> int:
        """Characters and token ids of its texts."""
        return sum(map(len, texts_of(self.request)))

    def estimated_tokens(self) -> list[int]:
        """An estimate for each text, before any tokenizer has seen it."""
        query = 0 if isinstance(self.request, EmbedTexts) else len(self.request.query) // CHARS_PER_TOKEN
        return [
            1 + query + (len(text) // CHARS_PER_TOKEN if isinstance(text, str) else len(text))
            for text in texts_of(self.request)
        ]

    def part(self, texts: Sequence[int], part_id: str) -> TextsRequest:
        """The request for some of its texts."""
        # A question of one text goes before the parts of a whole corpus.
        background = len(texts_of(self.request)) > limits.VECTOR_URGENT_TEXTS
        common: dict[str, Any] = {"id": part_id, "background": background}
        if isinstance(self.request, EmbedTexts):
            chosen = [self.request.texts[text] for text in texts]
            return msgspec.structs.replace(self.request, texts=chosen, **common)
        documents = [self.request.documents[text] for text in texts]
        return msgspec.structs.replace(self.request, documents=documents, **common)
