"""What a worker knows about speculation, and one sequence's drafts.

    WorkerSpeculation (one per worker)     the probe's verdict, the cost curve
    SequenceDrafts    (one per sequence)   sources → controller → the next pass's drafts; counts for figures

A source that raises is left out from then on: drafts are never worth an answer.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from fleetd import limits
from fleetd.control.prefill_trace import SourceCounts, Speculated
from fleetd.engine.grammar.matcher import AnswerMatcher
from fleetd.engine.protocol import Generate
from fleetd.engine.speculation.ahead import AheadGain, GroupFlights
from fleetd.engine.speculation.canonical_width import WideSteps
from fleetd.engine.speculation.controller import NO_DRAFT, Beside, Controller, Draft
from fleetd.engine.speculation.drafts_price import DraftPrice
from fleetd.engine.speculation.exactness_probe import ExactnessVerdict
from fleetd.engine.speculation.hidden_source import HiddenSource, WorkerDrafter
from fleetd.engine.speculation.local_sources import local_sources
from fleetd.engine.speculation.pass_costs import Costs
from fleetd.engine.speculation.rounds import Promise
from fleetd.engine.speculation.source_history import DraftHistory
from fleetd.engine.speculation.sources import Context, DraftSource, HiddenRows

T = TypeVar("T")
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
    # True: over several machines several blocks of an answer may be under way (``blocks_ahead``).
    ahead: bool = True
    # None: nothing drafts from the model's hidden states.
    head: WorkerDrafter | None = None
    costs: Costs = field(init=False)
    # What blocks that went ahead of each other have gained.
    flights: GroupFlights = field(init=False, default_factory=GroupFlights)
    # What answers have found about each source.
    history: DraftHistory = field(init=False, default_factory=DraftHistory)

    def __post_init__(self) -> None:
        self.costs = Costs(self.verdict.seconds if 1 in self.verdict.seconds else {1: 1.0})

    def decoded_by(self, model: Any) -> Any:
        """``model`` as all answers are to be decoded, drafted for or not."""
        return WideSteps(model, self.verdict.context) if self.verdict.rows > 1 else model

    def new_drafts(
        self, request: Generate, matcher: AnswerMatcher | None = None, *, hidden: bool = True
    ) -> SequenceDrafts | None:
        """The drafts of a new answer, with the matcher of its grammar if it has one; None if nothing is to be
        drafted for it. ``hidden``: False leaves out what drafts from the model's hidden states or rows."""
        wanted = request.speculate
        if not self._drafts(request):
            return None
        names = None if wanted is None else wanted.sources
        return SequenceDrafts(
            sources=[source for source in local_sources(matcher) if names is None or source.name in names],
            names=names,
            controller=self._controller(request),
            vocab_size=self.vocab_size,
            matcher=matcher,
            priced=self._priced(request) if hidden else [],
        )

    def _controller(self, request: Generate | None = None) -> Controller:
        wanted = None if request is None else request.speculate
        width = min(self.verdict.width, limits.SPEC_WIDTH, (wanted.width if wanted else 0) or 1 << 30)
        return Controller(
            self.costs,
            most=width - 1,
            always=self.mode == "on",
            again=self.verdict.again,
            ahead=AheadGain(self.flights) if self.mode == "auto" else None,
            history=self.history,
        )

    def hidden_layers(self, request: Generate) -> tuple[int, ...]:
        """Layers whose hidden states of the end of a request's prompt its drafts need; none as a rule, nor if
        its answer is not expected to ask for drafts from them."""
        if not self._drafts(request) or not (priced := self._priced(request)):
            return ()
        controller = self._controller(request)
        return _layers_of(source for source in priced if controller.notes(source.name, source.price))

    @property
    def headless(self) -> str:
        """Why what drafts from its hidden states does not at the moment; "" if it does, or there is none."""
        if self.head is None or (source := self.head.source()) is None:
            return "" if self.head is None else self.head.off
        return self._controller().off(source.name, source.price)

    def _drafts(self, request: Generate) -> bool:
        """True if anything is to be drafted for an answer."""
        wanted = request.speculate
        return self.verdict.exact and self.mode != "off" and (wanted is None or wanted.enabled)

    def _priced(self, request: Generate) -> list[HiddenSource]:
        names = None if request.speculate is None else request.speculate.sources
        source = None if self.head is None else self.head.source()
        if source is None or (names is not None and source.name not in names):
            return []
        return [source]


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
    # Sources that take time of this device: they are asked after the others.
    priced: list[HiddenSource] = field(default_factory=list)
    # What the last pass computed of the layers in ``hidden_layers``.
    hidden: HiddenRows | None = field(init=False, default=None)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers whose hidden states the next pass has to note; none as a rule. Of sources that take
        time only if their drafts are expected to pay, or are soon due to be tried."""
        return _layers_of([*self.sources, *filter(self._notes, self.priced)])

    @property
    def free_layers(self) -> tuple[int, ...]:
        """Those of ``hidden_layers`` that take no time; in a batch nothing is drafted that would pay more."""
        free = (source for source in self.priced if not source.taps_s)
        return _layers_of([*self.sources, *filter(self._notes, free)])

    def note(self, hidden: HiddenRows | None) -> None:
        """Hidden states of ``hidden_layers`` that have been computed; None if none were."""
        self.hidden = hidden
        if hidden is not None:
            for source in list(self.priced):
                self._told(source, source.note, hidden)

    def add(self, source: DraftSource) -> None:
        """Add a source, preferred to those that are there."""
        if self.names is None or source.name in self.names:
            self.sources.insert(0, source)

    def proposals(self, tokens: Sequence[int], machines: int = 1) -> dict[str, list[int]]:
        """The drafts of each source that takes no time and has a guess; mostly no source has one.
        ``machines``: that can each verify another block of them."""
        found = {}
        context = Context(tokens, (self.controller.most + 1) * machines - 1, self.hidden)
        for source in list(self.sources):
            if known := self._proposed(source, context):
                found[source.name] = known
        return found

    def choose(
        self,
        proposals: Mapping[str, Sequence[int]],
        room: int,
        machines: int = 1,
        *,
        going: bool = False,
        slowest: float = 0.0,
    ) -> Draft:
        """What the next pass verifies, at most ``room`` drafts (``Controller.choose``)."""
        return self.controller.choose(proposals, room, machines, going=going, slowest=slowest)

    def next_draft(
        self, tokens: Sequence[int], room: Callable[[], int], cache: Sequence[Any] | None = None
    ) -> Draft:
        """What the next pass verifies, of all sources; ``room`` is asked for if there may be any draft.
        ``cache``: as of ``Context``."""
        proposals = self.proposals(tokens)
        if not proposals and not self.priced:
            return NO_DRAFT
        most = room()
        return self.with_priced(self.choose(proposals, most), tokens, most, cache)

    def with_priced(
        self, draft: Draft, tokens: Sequence[int], most: int, cache: Sequence[Any] | None = None
    ) -> Draft:
        """``draft``, or what a source that takes time drafts, if that is expected to bring more. ``most``,
        ``cache``: as of ``next_draft``."""
        for source in list(self.priced):
            count = self._wanted(source, tokens, draft, most)
            if count <= 0:
                continue
            source.bear(self.controller.spare_s(source.name, source.price, count))
            known = self._proposed(source, Context(tokens, count, self.hidden, cache))
            self.controller.drafted(source.name, source.spent_s)
            found = {source.name: known, **({draft.source: draft.tokens} if draft.tokens else {})}
            draft = self.choose(found, most)
        return draft

    def prospect(self, tokens: Sequence[int], room: Callable[[], int]) -> tuple[int, Promise]:
        """How many drafts ``next_draft`` would give, and what that pass is expected to bring; no draft that
        takes time is made."""
        draft, drafting_s, proposals = NO_DRAFT, 0.0, self.proposals(tokens)
        most = room() if proposals or self.priced else 0
        if proposals:
            draft = self.controller.choose(proposals, most)
        for source in self.priced:
            count = self._wanted(source, tokens, draft, most)
            if count > 0:
                draft, drafting_s = Draft(source.name, (0,) * count), source.price.seconds(count)
        return len(draft.tokens), self.controller.promise(draft, drafting_s)

    def verified(
        self,
        draft: Draft,
        emitted: Sequence[int],
        seconds: float,
        saved_s: float | None = None,
        *,
        again: int = 0,
        beside: Beside = Beside.NOTHING,
        left: int = 0,
    ) -> None:
        """Tell the controller what a pass gave (``Controller.verified``), and the sources its tokens."""
        if self.hidden is not None:
            for source in self.priced:
                if source.taps_s and {*source.hidden_layers} <= {*self.hidden.states}:
                    self.controller.drafted(source.name, source.taps_s)
        self.controller.verified(draft, emitted, seconds, saved_s, again=again, beside=beside, left=left)
        self._committed(emitted)

    def on_token(self, token: int) -> None:
        """Tell the controller and the sources of a token of plain decoding."""
        self.controller.on_tokens((token,))
        self._committed((token,))

    def close(self) -> None:
        for source in (*self.sources, *self.priced):
            source.close()

    @property
    def report(self) -> Speculated | None:
        """None if no draft was verified, and none was left out as it would not have paid."""
        c = self.controller
        used = {name: r for name, r in c.records.items() if r.passes}
        prices: dict[str, DraftPrice | None] = {**dict.fromkeys(c.records), **self._prices()}
        off = {name: why for name in prices if name not in used and (why := c.off(name, prices[name]))}
        if not used and not off:
            return None
        begun = {source.name: (source.known_tokens, source.wanted_tokens) for source in self.priced}
        return Speculated(
            width=c.most + 1,
            drafted=sum(r.drafted for r in used.values()),
            accepted=sum(r.accepted for r in used.values()),
            passes=c.passes,
            tokens=c.tokens,
            saved_s=c.saved_s,
            sources={
                name: SourceCounts(r.drafted, r.accepted, r.passes, *begun.get(name, (0, 0)))
                for name, r in used.items()
            },
            off=off,
        )

    def _prices(self) -> dict[str, DraftPrice]:
        return {source.name: source.price for source in self.priced}

    def _notes(self, source: HiddenSource) -> bool:
        return self.controller.notes(source.name, source.price)

    def _wanted(self, source: HiddenSource, tokens: Sequence[int], beside: Draft, most: int) -> int:
        begin_s = source.begin_s(len(tokens))
        return self.controller.wanted(source.name, source.price, beside, most, begin_s)

    def _committed(self, tokens: Sequence[int]) -> None:
        for source in (*self.sources, *self.priced):
            self._told(source, source.committed, tokens)

    def _told(self, source: DraftSource, tell: Callable[[T], None], what: T) -> None:
        try:
            tell(what)
        except Exception:
            self._drop(source)

    def _proposed(self, source: DraftSource, context: Context) -> list[int]:
        """What a source proposes, as far as it can be verified."""
        try:
            return self._possible(source.propose(context))
        except Exception:
            self._drop(source)
            return []

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
        self.sources = [other for other in self.sources if other is not source]
        self.priced = [other for other in self.priced if other is not source]
        source.close()


def _layers_of(sources: Iterable[DraftSource]) -> tuple[int, ...]:
    """All hidden layers that any of ``sources`` asks for."""
    return tuple({layer for source in sources for layer in source.hidden_layers})
