"""Texts that this worker scores.

    Score ─► layout (prompt thread) ─► begin: profile, memory ─► passes ─► Scored

A step is a chunk of a text, as in prefill, so that running sequences wait no longer than they do for prefill.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from fleetd import limits
from fleetd.compression.token_scores import TOKEN_BYTES, SegmentScores, join
from fleetd.engine.guests import Guests, GuestTask
from fleetd.engine.protocol import Accepted, Prefill, Profile, Scored
from fleetd.engine.scoring.attention_pass import AttentionPass, AttentionTap, logits_of
from fleetd.engine.scoring.profile_search import ProfileSearch, check
from fleetd.engine.scoring.scoring_layout import LayoutPass, ScoringLayout
from fleetd.engine.scoring.surprise_pass import STEP_TOKENS, SurprisePass, surprise_scores
from fleetd.engine.sequence_state.kinds import kind_of
from fleetd.engine.sequence_state.parts import parts
from fleetd.errors import InvalidValue, Overloaded


@dataclass(slots=True)
class _ScoringWork:
    """Times in seconds, ``computed`` in tokens."""

    ready: ClassVar[bool] = True
    due_s: ClassVar[None] = None

    tap: AttentionTap
    profile: Profile
    begun_s: float = 0.0
    computed: int = 0
    running: AttentionPass | SurprisePass | None = None
    scores: list[SegmentScores] = field(default_factory=list)

    def close(self) -> None:
        """Nothing is open."""


_Task = GuestTask[ScoringLayout, _ScoringWork]


@dataclass(kw_only=True)
class ScoreGuests(Guests[ScoringLayout, _ScoringWork]):
    """``search`` has the model, which is not changed before the first text, and its profile."""

    failure = "The text could not be scored"

    search: ProfileSearch

    def admit(self, command: ScoringLayout) -> tuple[_Task, Accepted]:
        request = command.request
        if len(self) >= limits.SCORES:
            raise Overloaded(f"{limits.SCORES} texts are being scored already.")
        if command.id in self:
            raise InvalidValue("This text is being scored already.")
        tap = self.search.tap
        if request.profile is not None:
            check(request.profile, tap)
        profile = request.profile or self.search.profile()
        self.budget.lend(command.id, self._bytes(tap, command, profile))
        return _Task(command, _ScoringWork(tap, profile)), Accepted(command.id, command.tokens)

    def _bytes(self, tap: AttentionTap, layout: ScoringLayout, profile: Profile) -> int:
        """Memory of the longest pass (its keys, and its KV or later its logits) and of the scores."""
        longest = max(len(each.tokens) for each in layout.passes)
        if layout.request.without_question:
            # Log-probabilities of a step are there in the model's type, in f32, and once more in between.
            vocabulary = len(self.search.tokenizer)
            sequence = self.budget.sizes.of(longest)
            return sequence + 3 * STEP_TOKENS * vocabulary * 4 + len(layout.starts) * TOKEN_BYTES
        # Running states have no part in it.
        per_layer = self.budget.sizes.row_bytes / max(1, sum(map(_in_rows, tap.stage.empty)))
        heads = len(profile.heads)
        most = max(each.count for each in layout.passes)
        # A key is half of a head's part of a cache, which may hold 16 bits where a key here has 32.
        keys = heads * per_layer / min(held for _, held in tap.heads.values())
        asking = max(each.asking for each in layout.passes)
        # In f32; one head's are there twice more while they are summed up.
        logits = most * asking * (heads + 2) * 4
        found = len(layout.starts) * TOKEN_BYTES
        kept = sum(map(_in_rows, tap.stage.empty[: profile.exit_layer]))
        return int(most * keys + max(longest * kept * per_layer, logits) + found)

    def advance(self, task: _Task, work: _ScoringWork, chunk_tokens: int) -> Scored | None:
        work.begun_s = work.begun_s or time.monotonic()
        profile = work.profile
        layout, tap = task.command, work.tap
        heads = _asked(profile, layout.request.exit_layer)
        if work.running is None:
            work.running = self._pass(layout, layout.passes[len(work.scores)], heads, work)
        work.computed += work.running.step(chunk_tokens)
        self.emit(Prefill(task.id, min(work.computed, layout.tokens), layout.tokens))
        if not work.running.finished:
            return None
        work.scores.append(_scores(tap, layout, work.running, heads))
        work.running = None
        if len(work.scores) < len(layout.passes):
            return None
        ended_s = time.monotonic()
        scores = join(work.scores).packed()
        return Scored(task.id, scores, profile, work.computed, ended_s - work.begun_s, ended_s)

    def _pass(
        self, layout: ScoringLayout, one: LayoutPass, heads: list[tuple[int, int]], work: _ScoringWork
    ) -> AttentionPass | SurprisePass:
        if layout.request.without_question:
            return SurprisePass(self.search.model, one)
        kept = {layer: _key_heads(work.tap, layer, heads) for layer, _ in heads}
        return AttentionPass(work.tap, one, kept)


def _in_rows(empty: Any) -> bool:
    """True if a layer with such a cache keeps keys and values of tokens."""
    return any(kind_of(part).attention for part in parts(empty))


def _asked(profile: Profile, exit_layer: int) -> list[tuple[int, int]]:
    """The heads of a profile that lie in the layers that are run. Raises InvalidValue if none does."""
    heads = [(layer, head) for layer, head in profile.heads if not exit_layer or layer < exit_layer]
    if not heads:
        raise InvalidValue(f"None of the first {exit_layer} layers is asked for scores.", param="exit_layer")
    return heads


def _key_heads(tap: AttentionTap, layer: int, heads: Iterable[tuple[int, int]]) -> list[int]:
    """Which key heads the asked heads of a layer look at, ascending."""
    queries, keys = tap.heads[layer]
    return sorted({head * keys // queries for where, head in heads if where == layer})


def _scores(
    tap: AttentionTap,
    layout: ScoringLayout,
    scored: AttentionPass | SurprisePass,
    heads: list[tuple[int, int]],
) -> SegmentScores:
    """The logits of a finished pass, head by head in the order of the profile."""
    work = scored.work
    if isinstance(scored, SurprisePass):
        own = slice(work.first, work.first + work.count)
        return surprise_scores(layout.starts[own], layout.ends[own], scored.surprise)
    logits = np.empty((len(heads), work.asking, work.count), np.float32)
    for row, (layer, head) in zip(logits, heads, strict=True):
        queries, keys = tap.heads[layer]
        key = scored.layers[layer].index(head * keys // queries)
        asking, asked = tap.placed(layer, scored.queries[layer][[head]], scored.keys[layer][[key]])
        row[:] = logits_of(asking[0], asked[0], tap.scales[layer])
    own = slice(work.first, work.first + work.count)
    return SegmentScores.of_logits(layout.starts[own], layout.ends[own], logits)
