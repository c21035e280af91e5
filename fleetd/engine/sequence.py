"""One request in the scheduler, from admission to its end."""

from __future__ import annotations

import time
from dataclasses import dataclass

from fleetd.control.prefill_trace import Speculated
from fleetd.engine.logprobs import Logprobs, PromptLogprobs
from fleetd.engine.output_text import AnswerText
from fleetd.engine.prefill import Prefiller
from fleetd.engine.prefix_cache import DENSE, Hit
from fleetd.engine.prompt_encoding import PreparedPrompt
from fleetd.engine.protocol import Finished, FinishReason, PrefillShared, Timings, Usage
from fleetd.engine.shared_prefill.home_prefill import SharedPrefill
from fleetd.engine.shared_prefill.sharable import Sharable
from fleetd.engine.sparse_prefill.sparse import SparsePrefiller
from fleetd.engine.steppable import can_step


@dataclass(slots=True)
class Undecided:
    """A prompt that waits for word whether others help with it, then for the streams to them."""

    sharable: Sharable
    until_s: float
    share: PrefillShared | None = None


@dataclass(slots=True)
class ScheduledSequence:
    prepared: PreparedPrompt
    text: AnswerText
    max_tokens: int
    promised: int  # tokens of KV, prompt included
    arrived_s: float
    logprobs: Logprobs | None
    scored: PromptLogprobs | None = None
    # What the prefix cache had when the prompt was accepted, where that was told.
    hit: Hit | None = None
    undecided: Undecided | None = None
    prefiller: Prefiller | SharedPrefill | SparsePrefiller | None = None
    # Indices of the prompt tokens that are prefilled, ascending; None: all of them. Or why not only those.
    kept: list[int] | None = None
    dense_reason: str = ""
    # How the KV came about: where it may be kept.
    namespace: str = DENSE
    # What drafts did for it; set when it leaves decoding.
    speculated: Speculated | None = None
    cached: int = 0
    shown: int = -1  # prefilled tokens as last reported; none before the first report
    generated: int = 0
    turns: int = 0
    prefill_s: float = 0.0
    started_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0

    @property
    def id(self) -> str:
        return self.prepared.request.id

    @property
    def slots(self) -> int:
        """Tokens of KV that the prompt takes."""
        return len(self.prepared.tokens) if self.kept is None else len(self.kept)

    @property
    def held(self) -> int:
        """Tokens of KV in use."""
        return self.slots + self.generated

    @property
    def left(self) -> int:
        """Tokens to prefill."""
        return self.prefiller.remaining if self.prefiller else self.slots

    @property
    def ready(self) -> bool:
        """Whether a step of its prefill can be taken now."""
        if self.undecided is not None:
            return False
        return can_step(self.prefiller) if isinstance(self.prefiller, SharedPrefill) else True

    def finished(self, reason: FinishReason) -> Finished:
        first, started = self.first_s, self.started_s or time.monotonic()
        return Finished(
            self.id,
            reason,
            Usage(
                prompt_tokens=len(self.prepared.tokens),
                cached_tokens=self.cached,
                completion_tokens=self.generated,
                reasoning_tokens=self.text.reasoning_tokens,
            ),
            Timings(
                queue_s=started - self.arrived_s,
                # The last prompt token is computed by the first decode step.
                prefill_s=first - started if first else self.prefill_s,
                decode_s=self.last_s - first if first else 0.0,
            ),
            self.text.stopped_by,
            self.speculated,
        )
