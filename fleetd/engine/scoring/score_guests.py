"""Texts that this worker scores: admitted, computed in turns beside answers, ended.

    Score ─► layout (prompt thread) ─► begin: memory ─► [find the profile] ─► passes ─► Scored

A step is a chunk of a text, as in prefill, so that running answers wait for no more than they do there.
Nothing of a text outlives its end; what is kept of the model is which of its heads find what is asked for,
or that none do, also for the next load.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fleetd import limits
from fleetd.compression.token_scores import TOKEN_BYTES, SegmentScores, join
from fleetd.engine.cached_results import CachedResult
from fleetd.engine.failures import failed
from fleetd.engine.memory import KvBudget
from fleetd.engine.protocol import Accepted, Finished, Prefill, Profile, Report, Scored
from fleetd.engine.scoring.attention_pass import AttentionPass, AttentionTap, logits_of
from fleetd.engine.scoring.head_profile import LEAST_FOUND, Profiling
from fleetd.engine.scoring.scoring_layout import ScoringLayout
from fleetd.errors import InvalidValue, ModelUnsupported, Overloaded


@dataclass(slots=True)
class _Task:
    layout: ScoringLayout
    profile: Profile | None
    begun_s: float = 0.0
    profile_s: float = 0.0
    computed: int = 0
    looking: AttentionPass | None = None
    found: list[SegmentScores] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.layout.request.id


@dataclass
class ScoreGuests:
    """``model`` and ``tokenizer`` are a whole model's; nothing is done to them before the first text.

    ``kept`` is where the model's profile is found again; None where it is not kept.
    """

    model: Any
    tokenizer: Any
    context_tokens: int
    budget: KvBudget
    emit: Callable[[Report], None]
    kept: CachedResult[Profile] | None = None
    # Forward passes, for the proof of progress.
    steps: int = field(default=0, init=False)
    _tasks: list[_Task] = field(default_factory=list, init=False)
    _sight: AttentionTap | None = field(default=None, init=False)
    # The model's own, once it is found, and while that is being done.
    _profile: Profile | None = field(default=None, init=False)
    _profiling: Profiling | None = field(default=None, init=False)

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def ready(self) -> bool:
        """Whether a step can be computed now."""
        return bool(self._tasks)

    def begin(self, layout: ScoringLayout) -> None:
        """Reserve a text's memory. What is refused is told, not raised."""
        request = layout.request
        try:
            if len(self._tasks) >= limits.SCORES:
                raise Overloaded(f"{limits.SCORES} texts are being scored already.")
            if any(task.id == request.id for task in self._tasks):
                raise InvalidValue("This text is being scored already.")
            self._sight = self._sight or AttentionTap.of(self.model)
            if request.profile is not None:
                _check(request.profile, self._sight)
            profile = request.profile or self._known(self._sight)
            self.budget.lend(request.id, self._bytes(self._sight, layout, profile))
        except Exception as error:
            self._told(request.id, error)
            return
        self._tasks.append(_Task(layout, profile))
        self.emit(Accepted(request.id, layout.tokens))

    def _known(self, sight: AttentionTap) -> Profile | None:
        """The model's own profile, if it was found now or at an earlier load.

        Raises ModelUnsupported where it was found that there is none.
        """
        if self._profile is None and self.kept is not None and (kept := self.kept.find()) is not None:
            with suppress(InvalidValue):
                _check(kept, sight)
                self._profile = kept
        if self._profile is not None and not self._profile.heads:
            raise ModelUnsupported(
                f"This model's attention finds fewer than {LEAST_FOUND:.0%} of sentences that answer a "
                "question: too few for scoring.",
                hint="Choose another model for scoring.",
            )
        return self._profile

    def _bytes(self, sight: AttentionTap, layout: ScoringLayout, profile: Profile | None) -> int:
        """The longest pass: its keys, and beside them its KV or, later, its logits. Of all: what is found."""
        total = sight.stage.total
        layers = total if profile is None else profile.exit_layer
        longest = max(len(each.tokens) for each in layout.passes)
        per_layer = self.budget.bytes_per_token / total
        heads = limits.SCORE_HEADS if profile is None else len(profile.heads)
        most = max(each.count for each in layout.passes)
        # A key is half of a head's part of a cache, which may hold 16 bits where a key here has 32.
        keys = heads * per_layer / min(held for _, held in sight.heads.values())
        asking = max(each.asking for each in layout.passes)
        # In f32; one head's are there twice more while they are summed up.
        logits = most * asking * (heads + 2) * 4
        found = len(layout.starts) * TOKEN_BYTES
        return int(most * keys + max(longest * layers * per_layer, logits) + found)

    def cancel(self, request_id: str) -> bool:
        """False where it is none of these."""
        for task in self._tasks:
            if task.id == request_id:
                self._end(task)
                self.emit(Finished(request_id, "cancelled"))
                return True
        return False

    def turn(self, chunk_tokens: int) -> None:
        """Compute a chunk of one text; of several in turns."""
        if not self._tasks or self._sight is None:
            return
        task = self._tasks.pop(0)
        self._tasks.append(task)
        begun = time.monotonic()
        try:
            if task.profile is None:
                self._find(task, self._sight, chunk_tokens)
                task.profile_s += time.monotonic() - begun
            else:
                task.begun_s = task.begun_s or begun
                self._step(task, self._sight, task.profile, chunk_tokens)
        except Exception as error:
            self._end(task)
            self._told(task.id, error)
        self.steps += 1

    def _find(self, task: _Task, sight: AttentionTap, chunk_tokens: int) -> None:
        """A step of finding the profile, for all texts that wait for it."""
        if self._profile is None:
            if self._profiling is None:
                self._profiling = Profiling(sight, self.tokenizer, self.context_tokens)
            try:
                if not self._profiling.finished:
                    self._profiling.step(chunk_tokens)
                if not self._profiling.finished:
                    return
                self._profile = self._profiling.profile()
                if self.kept is not None:
                    self.kept.keep(self._profile)
            except Exception:
                self._profiling = None
                raise
            self._profiling = None
        task.profile = self._known(sight)

    def _step(self, task: _Task, sight: AttentionTap, profile: Profile, chunk_tokens: int) -> None:
        layout = task.layout
        heads = _asked(profile, layout.request.exit_layer)
        if task.looking is None:
            work = layout.passes[len(task.found)]
            kept = {layer: _key_heads(sight, layer, heads) for layer, _ in heads}
            task.looking = AttentionPass(sight, work, kept, profile.rotated)
        looking = task.looking
        task.computed += looking.step(chunk_tokens)
        self.emit(Prefill(task.id, min(task.computed, layout.tokens), layout.tokens))
        if not looking.finished:
            return
        task.looking = None
        task.found.append(_scores(sight, layout, looking, heads))
        if len(task.found) == len(layout.passes):
            scores = join(task.found).packed()
            self._end(task)
            seconds = time.monotonic() - task.begun_s
            self.emit(Scored(task.id, scores, profile, task.computed, seconds, task.profile_s))

    def _told(self, request_id: str, error: Exception) -> None:
        self.emit(failed(request_id, error, "The text could not be scored"))

    def _end(self, task: _Task) -> None:
        self._tasks.remove(task)
        self.budget.give_back(task.id)

    def close(self) -> None:
        for task in list(self._tasks):
            self._end(task)


def _check(profile: Profile, sight: AttentionTap) -> None:
    """Raises InvalidValue where a profile is not this model's: it may come from another machine."""
    for layer, head in profile.heads:
        if layer not in sight.scales or not head < sight.query_heads(layer):
            raise InvalidValue(f"Layer {layer} of this model has no head {head} that could be asked.")
        if layer >= profile.exit_layer:
            raise InvalidValue(f"Layer {layer} is not run: {profile.exit_layer} are.")


def _asked(profile: Profile, exit_layer: int) -> list[tuple[int, int]]:
    """The heads of a profile that lie in the layers that are run. Raises InvalidValue where none does."""
    heads = [(layer, head) for layer, head in profile.heads if not exit_layer or layer < exit_layer]
    if not heads:
        raise InvalidValue(f"None of the first {exit_layer} layers is asked for scores.", param="exit_layer")
    return heads


def _key_heads(sight: AttentionTap, layer: int, heads: Iterable[tuple[int, int]]) -> list[int]:
    """Which key heads the asked heads of a layer look at, ascending."""
    queries, keys = sight.heads[layer]
    return sorted({head * keys // queries for where, head in heads if where == layer})


def _scores(
    sight: AttentionTap, layout: ScoringLayout, looking: AttentionPass, heads: list[tuple[int, int]]
) -> SegmentScores:
    """The logits of a finished pass, head by head in the order of the profile."""
    work = looking.work
    logits = np.empty((len(heads), work.asking, work.count), np.float32)
    for row, (layer, head) in zip(logits, heads, strict=True):
        queries, keys = sight.heads[layer]
        key = looking.layers[layer].index(head * keys // queries)
        row[:] = logits_of(looking.queries[layer][head], looking.keys[layer][key], sight.scales[layer])
    own = slice(work.first, work.first + work.count)
    return SegmentScores.of_logits(layout.starts[own], layout.ends[own], logits)
