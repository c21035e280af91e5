"""Texts that this worker scores.

    Score ─► layout (prompt thread) ─► begin: memory ─► [find the profile] ─► passes ─► Scored

A step is a chunk of a text, as in prefill, so that running sequences wait no longer than they do for prefill.
What outlives a task is the model's profile: which of its heads find what a question asks for, or that none
do. The next load finds it again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from fleetd import limits
from fleetd.compression.token_scores import TOKEN_BYTES, SegmentScores, join
from fleetd.engine.cached_results import CachedResult
from fleetd.engine.guests import Guests, GuestTask
from fleetd.engine.protocol import Accepted, Prefill, Profile, Scored
from fleetd.engine.scoring.attention_pass import AttentionPass, AttentionTap, logits_of
from fleetd.engine.scoring.head_profile import LEAST_FOUND, Profiling
from fleetd.engine.scoring.scoring_layout import ScoringLayout
from fleetd.errors import InvalidValue, ModelUnsupported, Overloaded


@dataclass(slots=True)
class _ScoringWork:
    """``profile`` is None until the model's own is found. Times in seconds, ``computed`` in tokens."""

    ready: ClassVar[bool] = True
    due_s: ClassVar[None] = None

    tap: AttentionTap
    profile: Profile | None
    begun_s: float = 0.0
    profile_s: float = 0.0
    computed: int = 0
    running: AttentionPass | None = None
    scores: list[SegmentScores] = field(default_factory=list)

    def close(self) -> None:
        """Nothing is open."""


_Task = GuestTask[ScoringLayout, _ScoringWork]


@dataclass(kw_only=True)
class ScoreGuests(Guests[ScoringLayout, _ScoringWork]):
    """``model`` and ``tokenizer``: a whole model's; they are not changed before the first text.

    ``kept``: where the model's profile is stored; None if it is not.
    """

    failure = "The text could not be scored"

    model: Any
    tokenizer: Any
    context_tokens: int
    kept: CachedResult[Profile] | None = None
    _tap: AttentionTap | None = field(default=None, init=False)
    # The model's own, once it is found, and the search for it.
    _profile: Profile | None = field(default=None, init=False)
    _profiling: Profiling | None = field(default=None, init=False)

    def admit(self, command: ScoringLayout) -> tuple[_Task, Accepted]:
        request = command.request
        if len(self) >= limits.SCORES:
            raise Overloaded(f"{limits.SCORES} texts are being scored already.")
        if command.id in self:
            raise InvalidValue("This text is being scored already.")
        tap = self._tap = self._tap or AttentionTap.of(self.model)
        if request.profile is not None:
            _check(request.profile, tap)
        profile = request.profile or self._known_profile(tap)
        self.budget.lend(command.id, self._bytes(tap, command, profile))
        return _Task(command, _ScoringWork(tap, profile)), Accepted(command.id, command.tokens)

    def _known_profile(self, tap: AttentionTap) -> Profile | None:
        """The model's own profile, if it was found now or at an earlier load.

        Raises ModelUnsupported if the search found that there is none.
        """
        if self._profile is None and self.kept is not None and (kept := self.kept.find()) is not None:
            with suppress(InvalidValue):
                _check(kept, tap)
                self._profile = kept
        if self._profile is not None and not self._profile.heads:
            raise ModelUnsupported(
                f"This model's attention finds fewer than {LEAST_FOUND:.0%} of sentences that answer a "
                "question: too few for scoring.",
                hint="Choose another model for scoring.",
            )
        return self._profile

    def _bytes(self, tap: AttentionTap, layout: ScoringLayout, profile: Profile | None) -> int:
        """Memory of the longest pass (its keys, and its KV or later its logits) and of the scores."""
        total = tap.stage.total
        layers = total if profile is None else profile.exit_layer
        longest = max(len(each.tokens) for each in layout.passes)
        per_layer = self.budget.bytes_per_token / total
        heads = limits.SCORE_HEADS if profile is None else len(profile.heads)
        most = max(each.count for each in layout.passes)
        # A key is half of a head's part of a cache, which may hold 16 bits where a key here has 32.
        keys = heads * per_layer / min(held for _, held in tap.heads.values())
        asking = max(each.asking for each in layout.passes)
        # In f32; one head's are there twice more while they are summed up.
        logits = most * asking * (heads + 2) * 4
        found = len(layout.starts) * TOKEN_BYTES
        return int(most * keys + max(longest * layers * per_layer, logits) + found)

    def advance(self, task: _Task, work: _ScoringWork, chunk_tokens: int) -> Scored | None:
        begun = time.monotonic()
        if work.profile is None:
            work.profile = self._find_profile(work.tap, chunk_tokens)
            work.profile_s += time.monotonic() - begun
            return None
        work.begun_s = work.begun_s or begun
        return self._step(task, work, work.profile, chunk_tokens)

    def _find_profile(self, tap: AttentionTap, chunk_tokens: int) -> Profile | None:
        """A step of finding the profile, for all texts that wait for it. None while it is not found."""
        if self._profile is None:
            profiling = self._profiling or Profiling(tap, self.tokenizer, self.context_tokens)
            # Begun anew after an error.
            self._profiling = None
            if not profiling.finished:
                profiling.step(chunk_tokens)
            if not profiling.finished:
                self._profiling = profiling
                return None
            self._profile = profiling.profile()
            if self.kept is not None:
                self.kept.keep(self._profile)
        return self._known_profile(tap)

    def _step(self, task: _Task, work: _ScoringWork, profile: Profile, chunk_tokens: int) -> Scored | None:
        layout, tap = task.command, work.tap
        heads = _asked(profile, layout.request.exit_layer)
        if work.running is None:
            kept = {layer: _key_heads(tap, layer, heads) for layer, _ in heads}
            work.running = AttentionPass(tap, layout.passes[len(work.scores)], kept, profile.rotated)
        work.computed += work.running.step(chunk_tokens)
        self.emit(Prefill(task.id, min(work.computed, layout.tokens), layout.tokens))
        if not work.running.finished:
            return None
        work.scores.append(_scores(tap, layout, work.running, heads))
        work.running = None
        if len(work.scores) < len(layout.passes):
            return None
        seconds = time.monotonic() - work.begun_s
        scores = join(work.scores).packed()
        return Scored(task.id, scores, profile, work.computed, seconds, work.profile_s)


def _check(profile: Profile, tap: AttentionTap) -> None:
    """Raises InvalidValue if a profile is not this model's: it may come from another machine."""
    for layer, head in profile.heads:
        if layer not in tap.scales or not head < tap.query_heads(layer):
            raise InvalidValue(f"Layer {layer} of this model has no head {head} that could be asked.")
        if layer >= profile.exit_layer:
            raise InvalidValue(f"Layer {layer} is not run: {profile.exit_layer} are.")


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
    tap: AttentionTap, layout: ScoringLayout, scored: AttentionPass, heads: list[tuple[int, int]]
) -> SegmentScores:
    """The logits of a finished pass, head by head in the order of the profile."""
    work = scored.work
    logits = np.empty((len(heads), work.asking, work.count), np.float32)
    for row, (layer, head) in zip(logits, heads, strict=True):
        queries, keys = tap.heads[layer]
        key = scored.layers[layer].index(head * keys // queries)
        row[:] = logits_of(scored.queries[layer][head], scored.keys[layer][key], tap.scales[layer])
    own = slice(work.first, work.first + work.count)
    return SegmentScores.of_logits(layout.starts[own], layout.ends[own], logits)
