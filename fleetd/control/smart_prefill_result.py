"""What smart prefill did to one prompt, as headers, bodies and traces report it."""

from __future__ import annotations

from typing import Literal

import msgspec

# "" if the prompt is read whole.
Form = Literal["", "text", "sparse"]
# By what a text was scored: how much its question attends to each token, or how little each was expected.
ScoredBy = Literal["", "by question", "without question"]


class ParkedLoads(msgspec.Struct, frozen=True):
    """The model that answers was not loaded while another one scored, as both do not fit together.

    ``scorer_s``, ``model_s``: seconds that loads took, of what scored, and then of what answers; 0 for one
    that was loaded already, or was not loaded.
    """

    scorer_s: float = 0.0
    model_s: float = 0.0


class SmartPrefillResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """``form`` "" says that the prompt is read whole: then ``code`` and ``reason`` say why.

    The compressor counts the tokens; of a sparse prompt the engine does, once it has them. ``nodes``: the
    machines that scored; "this" is the one asked. ``score_s``: seconds from the request to the selection.
    ``scored_tokens``: what compressors read, with what is put around segments. ``scored``: "" if nothing was.
    ``parked``: None if no model gave way.
    """

    form: Form = ""
    compressor: str = ""
    nodes: tuple[str, ...] = ()
    original_tokens: int = 0
    compressed_tokens: int = 0
    scored_tokens: int = 0
    score_s: float = 0.0
    code: str = ""
    reason: str = ""
    scored: ScoredBy = ""
    parked: ParkedLoads | None = None

    @property
    def used(self) -> bool:
        return bool(self.form)

    @property
    def dropped_tokens(self) -> int:
        return max(0, self.original_tokens - self.compressed_tokens) if self.used else 0

    @property
    def skipped(self) -> str:
        """Why nothing was dropped, as one line for a header; "" where something was."""
        return "" if self.used else f"{self.code}: {self.reason}"
