"""What a machine answers for a part: checked. Sans-IO."""

from __future__ import annotations

import array
import itertools
import math
import sys

from fleetd.engine.protocol import EmbedTexts, TextsEmbedded, TextsReranked
from fleetd.errors import ProtocolError
from fleetd.requests.vectors.messages import TextsRequest, texts_of

FLOAT_BYTES = 4

#: A text's vector, as float32 little endian, or a document's score.
Found = bytes | float


class PartAnswer:
    """The vectors or scores of one part's texts, in their order, and how many tokens each text had."""

    def __init__(self, request: TextsRequest, width: int = 0) -> None:
        """``width``: of vectors; 0 if it is not known yet."""
        self._embeds = isinstance(request, EmbedTexts)
        self._count = len(texts_of(request))
        self._wanted_width = request.dimensions if isinstance(request, EmbedTexts) else None
        self.width = width or self._wanted_width or 0
        self.found: list[Found] = []
        self.tokens: list[int] = []

    @property
    def whole(self) -> bool:
        """True once the answer has come."""
        return len(self.found) == self._count

    def feed(self, event: TextsEmbedded | TextsReranked) -> None:
        """Raises ProtocolError for what cannot be the answer to this part."""
        if isinstance(event, TextsEmbedded) is not self._embeds:
            raise ProtocolError("Vectors came for scores, or scores for vectors.")
        if self.found:
            raise ProtocolError("Vectors came twice.")
        if len(event.tokens) != self._count:
            raise ProtocolError(f"Vectors of {len(event.tokens)} texts came, not of {self._count}.")
        if isinstance(event, TextsEmbedded):
            self._take_vectors(event)
        else:
            self._take_scores(event)
        self.tokens += event.tokens

    def _take_vectors(self, event: TextsEmbedded) -> None:
        self.width = self.width or event.width
        if event.width != self.width or not event.width:
            raise ProtocolError(f"A vector of {event.width} numbers came, not of {self.width}.")
        row_bytes = FLOAT_BYTES * event.width
        if len(event.vectors) != row_bytes * len(event.tokens):
            raise ProtocolError(f"{len(event.vectors)} bytes came for {len(event.tokens)} vectors.")
        # A sum is finite only if all of its parts are.
        if not math.isfinite(sum(map(abs, floats(event.vectors)))):
            raise ProtocolError("A vector holds what is no number.")
        edges = range(0, len(event.vectors) + 1, row_bytes)
        self.found += [event.vectors[first:last] for first, last in itertools.pairwise(edges)]

    def _take_scores(self, event: TextsReranked) -> None:
        if len(event.scores) != len(event.tokens) or not all(map(math.isfinite, event.scores)):
            raise ProtocolError("The scores are not those of the documents.")
        self.found += event.scores


def floats(vectors: bytes) -> array.array[float]:
    """The numbers of one vector or several."""
    numbers = array.array("f", vectors)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
