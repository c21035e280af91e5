"""Scores one prompt: its segments in parallel on several machines, one on each.

    plan ─► cut ─► machine 1: segment ─┐
                   machine 2: segment ─┴─► checked, all in the order of the text

A machine that fails, or sends impossible scores, is not asked again for this prompt; its segment goes to the
others, cheapest first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from fleetd import limits
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.protocol import Loading, Prefill, Profile, Score, Scored
from fleetd.errors import EngineDied, FleetError, ModelUnsupported, PeerLost, ProtocolError
from fleetd.models.folder import ModelFolder
from fleetd.p2p.session.transport import PeerStream
from fleetd.plan.prefill import step_names
from fleetd.plan.scoring import Scorer, Segments
from fleetd.process.observe import get_logger
from fleetd.requests.concurrency import gather_or_cancel
from fleetd.requests.remote.peer_stream import next_message, said_by
from fleetd.requests.smart_prefill import messages
from fleetd.requests.timeline import Span

if TYPE_CHECKING:  # needs numpy, which a daemon does not load before there are scores
    from fleetd.compression.token_scores import SegmentScores

log = get_logger("fleetd.compression")

# Every tokenizer makes at least one token of so many characters that are not blank.
_TOKEN_CHARS = 64
# Passes repeat the text's head and the question: one pass by at most so many tokens, and several, which a
# short context takes, together by fewer than are scored, times this.
_AROUND_TOKENS, _AROUND = 1024, 3

Progress = Callable[[Loading | Prefill], None]


class CompressorModel(msgspec.Struct, frozen=True):
    """A model that scores. ``folder``: on this machine; None if only others have it."""

    name: str
    digest: str = ""
    folder: ModelFolder | None = None

    @property
    def key(self) -> str:
        """Key for facts about the model: its digest, or its name until the digest is known."""
        return self.digest or self.name


class ScoringQuestion(msgspec.Struct, frozen=True):
    """A text to score, and the ranges of characters in it that ask the question.

    ``without_question``: nothing asks, and the scores are of the text alone.
    """

    id: str
    text: str
    questions: Sequence[tuple[int, int]]
    without_question: bool = False

    def own(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """The parts of this range that are to be scored: all but the questions."""
        for start, end in self.questions:
            if first < min(start, last):
                yield first, min(start, last)
            first = max(first, end)
        if first < last:
            yield first, last


@dataclass(slots=True)
class ScorerRun:
    """What one machine did for a prompt."""

    scorer: Scorer
    # Segments that it was asked to score and has not scored.
    unanswered: int = 0
    tokens: int = 0
    # In how many passes, by the plan.
    passes: int = 0
    # By its engine.
    computed_s: float = 0.0
    # Until its model was loaded.
    load_s: float = 0.0
    error: FleetError | None = None
    # When it was asked for each segment, and when the scores had come; monotonic seconds.
    asked: list[tuple[float, float]] = field(default_factory=list)
    # What it did in that time: its loads and what its engine computed.
    parts: list[Span] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Seconds from a request to its scores, summed over the segments."""
        return sum(came_s - asked_s for asked_s, came_s in self.asked)

    @property
    def span(self) -> Span:
        """All of it, with its parts."""
        first_s, last_s = min(self.asked)[0], max(came_s for _, came_s in self.asked)
        return Span(
            step_names.SCORED, self.scorer.name, first_s, last_s, self.seconds, parts=tuple(self.parts)
        )


@dataclass(slots=True)
class ScoringJob:
    """The state of a prompt that is being scored. ``profile``: for all segments; None until it is known."""

    question: ScoringQuestion
    compressor: CompressorModel
    profile: Profile | None = None
    ran: dict[str, ScorerRun] = field(default_factory=dict)
    loading: Loading | None = None
    _done: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def on_event(self, segment: tuple[int, int], event: Loading | Prefill) -> None:
        if isinstance(event, Prefill):
            self.loading = None
            self._done[segment] = (event.done, event.total)
        else:
            self.loading = event

    @property
    def progress(self) -> Loading:
        if self.loading is not None:
            return self.loading
        done = sum(done for done, _ in self._done.values())
        total = sum(total for _, total in self._done.values())
        return Loading(f"scoring the prompt with {self.compressor.name}", done, total)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(ran.scorer.name for ran in self.ran.values() if ran.tokens)


class SegmentScoring:
    """Args:
    request: begins a request at another machine: its id, a method and a body; None without a fleet.
    clock_offset_s: a machine's monotonic clock less this one's, by its id; None if not known.
    """

    def __init__(
        self,
        pool: EnginePool,
        request: Callable[[str, str, bytes], PeerStream] | None,
        *,
        monotonic: Callable[[], float],
        clock_offset_s: Callable[[str], float | None] = lambda node_id: None,
    ) -> None:
        self._clock_offset_s = clock_offset_s
        self._pool = pool
        self._request = request
        self._monotonic = monotonic

    async def run(
        self, work: ScoringJob, parts: Sequence[Segments], able: Sequence[Scorer]
    ) -> list[SegmentScores]:
        """All segments' scores, in the order of the text.

        Args:
            able: all machines that could score, cheapest first, those of ``parts`` among them.

        Raises FleetError: that of the last machine that was tried. Cancelling this cancels all its requests.
        """
        planned = [(part, segment) for part in parts if (segment := cut(work.question, part))]
        # If the text is all question, an engine refuses it with the right error.
        planned = planned or [(parts[0], (0, 0))]
        found: list[SegmentScores] = []
        if work.profile is None and len(planned) > 1:
            # Scores can be merged only if the same heads gave them; the first segment finds these heads.
            found.append(await self._part(work, *planned[0], able))
        rest = [self._part(work, part, segment, able) for part, segment in planned[len(found) :]]
        return found + await gather_or_cancel(*rest)

    async def _part(
        self, work: ScoringJob, part: Segments, segment: tuple[int, int], able: Sequence[Scorer]
    ) -> SegmentScores:
        last: FleetError | None = None
        others = (other for other in able if other.node_id != part.scorer.node_id)
        for scorer in (part.scorer, *others):
            ran = work.ran.setdefault(scorer.node_id, ScorerRun(scorer))
            if ran.error is not None:
                last = last or ran.error
                continue
            try:
                return await self._segment(work, ran, segment, part.passes)
            except FleetError as error:
                ran.error = last = error if scorer.here else said_by(scorer.name, error)
                log.warning(
                    "smart.scorer_failed", request=work.question.id, node=scorer.name, code=error.code
                )
                if isinstance(error, ModelUnsupported) and scorer.here:
                    # The others have the same files.
                    break
        raise last or EngineDied("No machine is left that could score the prompt.")

    async def _segment(
        self, work: ScoringJob, ran: ScorerRun, segment: tuple[int, int], passes: int
    ) -> SegmentScores:
        question = work.question
        score = Score(
            f"{question.id}.score{segment[0]}",
            question.text,
            list(question.questions),
            segment=segment,
            passes=passes,
            profile=work.profile,
            without_question=question.without_question,
        )
        began_s = self._monotonic()
        ran.unanswered += 1
        loading_s: float | None = None

        def note(step: Loading | Prefill) -> None:
            nonlocal loading_s
            now_s = self._monotonic()
            if isinstance(step, Loading):
                loading_s = now_s if loading_s is None else loading_s
            elif loading_s is not None:
                ran.load_s += now_s - loading_s
                ran.parts.append(Span(step_names.LOADED, ran.scorer.name, loading_s, now_s))
                loading_s = None
            work.on_event(segment, step)

        scored = await self._ask(work.compressor, ran.scorer, score, note)
        came_s = self._monotonic()
        found = await asyncio.to_thread(_unpacked, scored, question, score)
        ran.unanswered -= 1
        ran.tokens += scored.tokens
        ran.passes += passes
        ran.asked.append((began_s, came_s))
        # It began after this one had asked, whatever it tells.
        computed_s = min(scored.seconds, came_s - began_s)
        ran.computed_s += computed_s
        if not ran.scorer.here:
            offset_s = self._clock_offset_s(ran.scorer.node_id)
            known = scored.ended_s and offset_s is not None
            ended_s = min(came_s, scored.ended_s - (offset_s or 0.0)) if known else came_s
            ran.parts.append(Span(step_names.COMPUTED, ran.scorer.name, ended_s - computed_s, ended_s))
        work.profile = work.profile or scored.profile
        return found

    async def _ask(
        self, compressor: CompressorModel, scorer: Scorer, score: Score, progress: Progress
    ) -> Scored:
        if scorer.here and compressor.folder is not None:
            # The model that answers is loaded and idle: it must not be unloaded for the compressor.
            return await self._pool.ask(compressor.folder, score, evict=False, progress=progress)
        if self._request is None:
            raise PeerLost("It is not there any more.")
        ask = messages.ScoreQuestion(compressor.name, compressor.digest, score)
        stream = self._request(scorer.node_id, messages.SCORE, messages.encode(ask))
        return msgspec.structs.replace(await _ask_there(stream, progress), id=score.id)


async def _ask_there(stream: PeerStream, progress: Progress) -> Scored:
    """The scores of a segment from another machine. Raises FleetError."""
    ended = False
    try:
        stream.end()
        while True:
            body = await next_message(stream, "the scores")
            if body is None:
                ended = True
                raise ProtocolError("It ended the scoring without scores.")
            event = messages.decode_event(body)
            if isinstance(event, Scored):
                ended = True
                return event
            progress(event)
    finally:
        if not ended:
            stream.cancel()


def _unpacked(scored: Scored, question: ScoringQuestion, asked: Score) -> SegmentScores:
    """The scores. Raises ProtocolError if they cannot be those of the segment that was asked for.

    Call it in a thread: it takes a while, and loads numpy.
    """
    from fleetd.compression.token_scores import SegmentScores

    try:
        found = SegmentScores.unpack(scored.scores)
    except ValueError as error:
        raise ProtocolError(f"The scores do not fit the prompt: {error}.") from None
    heads = 1 if question.without_question else len(scored.profile.heads)
    if asked.profile not in (None, scored.profile) or len(found.log_sums) != heads:
        raise ProtocolError("The scores are those of other heads than were asked.")
    first, last = asked.segment[0], asked.segment[1] or len(question.text)
    chars = sum(len(word) for a, b in question.own(first, last) for word in question.text[a:b].split())
    # Without a marked question the last tokens are the question.
    asking = 0 if question.questions or question.without_question else limits.SCORE_QUERIES
    count = len(found.starts)
    if not count <= scored.tokens <= (1 + _AROUND) * count + _AROUND_TOKENS:
        raise ProtocolError(f"Scores of {count} tokens came, for which {scored.tokens} were computed.")
    if not found.within(first, last) or (count + asking) * _TOKEN_CHARS < chars:
        raise ProtocolError("The scores are not those of the segment that was asked for.")
    return found


def cut(question: ScoringQuestion, part: Segments) -> tuple[int, int] | None:
    """A part as a range of the text, cut at a line's end if one is near, else between words.

    Shares are of the text without its questions. (0, 0) stands for the whole text, as in ``Score``. None: the
    part has nothing but questions and blanks.
    """
    if part.first <= 0 and part.last >= 1:
        return (0, 0)
    text = question.text
    own = list(question.own(0, len(text)))
    first, last = (_edge(text, _at(text, own, share)) for share in (part.first, part.last))
    return (first, last) if any(text[a:b].strip() for a, b in question.own(first, last)) else None


def _at(text: str, own: Sequence[tuple[int, int]], share: float) -> int:
    """The character before which this share of the text without its questions lies."""
    if share >= 1:
        return len(text)
    left = round(share * sum(end - start for start, end in own))
    for start, end in own:
        if left < end - start:
            return start + left
        left -= end - start
    return len(text)


def _edge(text: str, at: int) -> int:
    """The end of the line or word before ``at``. Equal for both neighbours of a cut, so segments touch."""
    if at <= 0 or at >= len(text):
        return max(0, min(at, len(text)))
    reach = 400
    for gap in ("\n", " "):
        found = text.rfind(gap, max(0, at - reach), at)
        if found >= 0:
            return found + 1
    return at
