"""A loaded model for vectors or for reranking: from requests to rows, from rows of a pass to numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fleetd.control.model_facts import ModelPurpose
from fleetd.engine.protocol import EmbedTexts, RerankTexts, TextsEmbedded, TextsReranked
from fleetd.engine.vectors.pooling import little_endian, one_long, pooled, shortened, sigmoid
from fleetd.engine.vectors.reading import QuestionFrame, TextReader
from fleetd.engine.vectors.token_rows import Pass, TokenRow
from fleetd.errors import InvalidValue, ModelUnsupported, UnsupportedParameter
from fleetd.models.vector_files import VectorRecipe

# What Qwen3's embedders are told to do stands so in their prompt for queries.
_INSTRUCTION = re.compile(r"(?<=Instruct: ).*?(?=\nQuery:)", re.DOTALL)
_TASK = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True)
class VectorRequest:
    """A request whose texts are read."""

    request: EmbedTexts | RerankTexts
    rows: Sequence[TokenRow]

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


@dataclass(frozen=True, kw_only=True)
class VectorModel:
    """A model for one purpose. ``module``: states (T, width) of a pass's tokens."""

    purpose: ClassVar[ModelPurpose]

    module: Any
    reader: TextReader

    def read(self, request: EmbedTexts | RerankTexts) -> VectorRequest:
        """Tokenize a request's texts. Raises BadRequest; ModelUnsupported if the model is for other work."""
        raise NotImplementedError

    def results(self, group: Pass) -> list[bytes]:
        """What is told of each text of a pass: it depends on that text alone."""
        raise NotImplementedError

    def report(self, asked: VectorRequest, results: Sequence[bytes]) -> TextsEmbedded | TextsReranked:
        """The message that answers a request."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Embedder(VectorModel):
    purpose: ClassVar[ModelPurpose] = "embedding"

    recipe: VectorRecipe
    width: int

    def read(self, request: EmbedTexts | RerankTexts) -> VectorRequest:
        if not isinstance(request, EmbedTexts):
            raise ModelUnsupported(
                "This model makes vectors, and does not rerank.", hint="Choose a model for rerank."
            )
        if request.dimensions is not None and not 1 <= request.dimensions <= self.width:
            raise InvalidValue(
                f"dimensions is {request.dimensions}; this model's vectors have {self.width}.",
                param="dimensions",
            )
        return VectorRequest(request, self.reader.rows(request, self._prompt(request)))

    def _prompt(self, request: EmbedTexts) -> str:
        prompt = self.recipe.prompts.get(request.kind, "")
        if not request.instruction:
            return prompt
        told = self.recipe.prompts.get("query", "")
        if not _INSTRUCTION.search(told):
            raise UnsupportedParameter("This model takes no instruction.", param="instruction")
        return _INSTRUCTION.sub(lambda _: request.instruction, told, count=1)

    def results(self, group: Pass) -> list[bytes]:
        vectors = pooled(self.module(group), group, self.recipe.pooling)
        vectors = self.module.densed(vectors)
        if self.recipe.normalized:
            vectors = one_long(vectors)
        return [little_endian(vector) for vector in vectors]

    def report(self, asked: VectorRequest, results: Sequence[bytes]) -> TextsEmbedded:
        wanted = asked.request.dimensions if isinstance(asked.request, EmbedTexts) else None
        if wanted is not None and wanted < self.width:
            results = [shortened(each, wanted, normalized=self.recipe.normalized) for each in results]
        tokens = [len(row.tokens) for row in asked.rows]
        return TextsEmbedded(asked.id, wanted or self.width, b"".join(results), tokens)


@dataclass(frozen=True, kw_only=True)
class Reranker(VectorModel):
    """``head``: a logit (n,) for each text of a pass. ``frame``: what stands around a question in words; None
    for a sequence classifier, which is asked nothing."""

    purpose: ClassVar[ModelPurpose] = "rerank"

    head: Any
    frame: QuestionFrame | None

    def read(self, request: EmbedTexts | RerankTexts) -> VectorRequest:
        if not isinstance(request, RerankTexts):
            raise ModelUnsupported(
                "This model reranks, and makes no vectors.", hint="Choose a model for embeddings."
            )
        if self.frame is None:
            return VectorRequest(request, self.reader.pairs(request))
        asked = asking(request.instruction or _TASK, request.query)
        return VectorRequest(request, self.reader.framed(request, asked, self.frame))

    def results(self, group: Pass) -> list[bytes]:
        logits = self.head(self.module(group), group)
        return [np.float64(score).tobytes() for score in sigmoid(logits)]

    def report(self, asked: VectorRequest, results: Sequence[bytes]) -> TextsReranked:
        scores = [float(np.frombuffer(each, np.float64)[0]) for each in results]
        tokens = [len(row.tokens) for row in asked.rows]
        return TextsReranked(asked.id, scores, tokens)


# The question that Qwen3-Reranker was trained with: in other words its answers are close to chance.
FRAME = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)


def asking(instruction: str, query: str) -> str:
    """What stands before a document within the frame."""
    return f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: "
