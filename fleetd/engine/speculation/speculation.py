"""What a worker knows about speculation, and one sequence's drafts.

    WorkerSpeculation (one per worker)     the probe's verdict, the cost curve
    SequenceDrafts    (one per sequence)   sources → controller → the next pass's drafts; counts for figures

A source that raises is left out from then on: drafts are never worth an answer.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fleetd import limits
from fleetd.control.prefill_trace import SourceCounts, Speculated
from fleetd.engine.grammar.matcher import AnswerMatcher
from fleetd.engine.protocol import Generate
from fleetd.engine.speculation.canonical_width import WideSteps
from fleetd.engine.speculation.controller import Controller, Draft
from fleetd.engine.speculation.exactness_probe import ExactnessVerdict
from fleetd.engine.speculation.local_sources import local_sources
from fleetd.engine.speculation.pass_costs import Costs
from fleetd.engine.speculation.rounds import Promise
from fleetd.engine.speculation.sources import Context, DraftSource, HiddenRows

Mode = Literal["auto", "on", "off"]


@dataclass
class WorkerSpeculation:
    """What all answers of a worker share."""

    verdict: ExactnessVerdict
    # Token ids of the model are below this.
    vocab_size: int
    # Drafts are verified if that pays, always, or never.
    mode: Mode = "auto"
    # True if the device computes while the host goes on (any GPU): then an answer without a draft has its
    # next step computed while the host looks at this step's token.
    computes_ahead: bool = False
    # False: over several machines one block of an answer is under way at a time. For measuring.
    ahead: bool = True
    costs: Costs = field(init=False)

    def __post_init__(self) -> None:
        self.costs = Costs(self.verdict.seconds if 1 in self.verdict.seconds else {1: 1.0})

    def decoded_by(self, model: Any) -> Any:
        """``model`` as all answers are to be decoded, drafted for or not."""
        return WideSteps(model, self.verdict.context) if self.verdict.rows > 1 else model

    def new_drafts(self, request: Generate, matcher: AnswerMatcher | None = None) -> SequenceDrafts | None:
        """The drafts of a new answer, with the matcher of its grammar if it has one; None if nothing is to be
        drafted for it."""
        wanted = request.speculate
        if not self.verdict.exact or self.mode == "off" or (wanted is not None and not wanted.enabled):
            return None
        names = None if wanted is None else wanted.sources
        width = min(self.verdict.width, limits.SPEC_WIDTH, (wanted.width if wanted else 0) or 1 << 30)
        return SequenceDrafts(
            sources=[source for source in local_sources(matcher) if names is None or source.name in names],
            names=names,
            controller=Controller(
                self.costs, most=width - 1, always=self.mode == "on", again=self.verdict.again
            ),
            vocab_size=self.vocab_size,
            matcher=matcher,
        )


@dataclass(slots=True)
class SequenceDrafts:
    """The drafts of one answer."""

    # Preferred ones first.
    sources: list[DraftSource]
    # Sources that the request allows; None for all.
    names: list[str] | None
    controller: Controller
    # Token ids of the model are below this.
    vocab_size: int
    # What the answer is held to: drafts that it forbids are not verified. None: nothing.
    matcher: AnswerMatcher | None = None
    # What the last pass computed of the layers in ``hidden_layers``.
    hidden: HiddenRows | None = field(init=False, default=None)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers whose hidden states a pass has to note; none as a rule."""
        return tuple({layer for source in self.sources for layer in source.hidden_layers})

    def add(self, source: DraftSource) -> None:
        """Add a source, preferred to those that are there."""
        if self.names is None or source.name in self.names:
            self.sources.insert(0, source)

    def proposals(self, tokens: Sequence[int], machines: int = 1) -> dict[str, list[int]]:
        """The drafts of each source that has a guess; mostly no source has one. ``machines``: that can each
        verify another block of them."""
        found = {}
        context = Context(tokens, (self.controller.most + 1) * machines - 1, self.hidden)
        for source in list(self.sources):
            try:
                if known := self._possible(source.propose(context)):
                    found[source.name] = known
            except Exception:
                self._drop(source)
        return found

    def choose(self, proposals: Mapping[str, Sequence[int]], room: int, machines: int = 1) -> Draft:
        """What the next pass verifies, at most ``room`` drafts."""
        return self.controller.choose(proposals, room, machines)

    def promise(self, draft: Draft) -> Promise:
        """What the pass over ``draft`` is expected to bring."""
        return self.controller.promise(draft)

    def verified(
        self,
        draft: Draft,
        emitted: Sequence[int],
        seconds: float,
        saved_s: float | None = None,
        *,
        again: int = 0,
        timed: bool = True,
    ) -> None:
        """Tell the controller what a pass gave (``Controller.verified``), and the sources its tokens."""
        self.controller.verified(draft, emitted, seconds, saved_s, again=again, timed=timed)
        self._committed(emitted)

    def on_token(self, token: int) -> None:
        """Tell the controller and the sources of a token of plain decoding."""
        self.controller.on_tokens((token,))
        self._committed((token,))

    def close(self) -> None:
        for source in list(self.sources):
            source.close()

    @property
    def report(self) -> Speculated | None:
        """None if no draft was verified."""
        c = self.controller
        used = {name: r for name, r in c.records.items() if r.passes}
        if not used:
            return None
        return Speculated(
            width=c.most + 1,
            drafted=sum(r.drafted for r in used.values()),
            accepted=sum(r.accepted for r in used.values()),
            passes=c.passes,
            tokens=c.tokens,
            saved_s=c.saved_s,
            sources={n: SourceCounts(r.drafted, r.accepted, r.passes) for n, r in used.items()},
        )

    def _committed(self, tokens: Sequence[int]) -> None:
        for source in list(self.sources):
            try:
                source.committed(tokens)
            except Exception:
                self._drop(source)

    def _possible(self, drafts: Sequence[int]) -> list[int]:
        """``drafts`` up to the first id that is no token of this model, or that the grammar forbids."""
        known = []
        for token in drafts:
            if not 0 <= token < self.vocab_size:
                break
            known.append(token)
        return known if self.matcher is None else known[: self.matcher.allowed(known)]

    def _drop(self, source: DraftSource) -> None:
        traceback.print_exc()
        self.sources.remove(source)
        source.close()
