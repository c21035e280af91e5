"""Prompts of this worker's own that others may help with: from the offer to share to the end of it.

    Accepted(waits) ── word? ──► Share ── streams? ──► SharedPrefill ──► Shared, decoding
           │                       │                       │
           └── Alone, or no word   └── not in time         └── late, lost, wrong: Shared(code), and on alone
                                                               from what is verified

However it ends, the prompt goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from fleetd import limits
from fleetd.engine.failures import typed
from fleetd.engine.prefill import Prefiller
from fleetd.engine.prefix_cache import DENSE, PLAN, Hit, PrefixCache
from fleetd.engine.protocol import Accepted, PrefillShared, Report, Shared, StepTime
from fleetd.engine.sequence import ScheduledSequence, Undecided
from fleetd.engine.shared_prefill.frame_schedule import home_streams
from fleetd.engine.shared_prefill.home_prefill import SharedPrefill
from fleetd.engine.shared_prefill.sharable import Sharable
from fleetd.engine.sparse_prefill.sparse import SparsePrefiller, leading
from fleetd.engine.streams.handed_over import HandedOverStreams
from fleetd.errors import InvalidValue, PeerUnreachable


@dataclass
class SharedPrompts:
    """``sharable`` is None where no other machine can help with ``model``."""

    model: Any
    sharable: Sharable | None
    prefix: PrefixCache
    streams: HandedOverStreams
    emit: Callable[[Report], None]

    def accept(self, answer: ScheduledSequence, chunk: int) -> bool:
        """Say that an admitted prompt waits for word how it is prefilled. False where nobody can help."""
        request, tokens = answer.prepared.request, answer.prepared.tokens
        # The prompt's own probabilities need every hidden state after the last layer, here.
        scored = request.echo and answer.logprobs is not None
        if not request.shared or self.sharable is None or scored:
            return False
        # The KV of a token rests on all tokens before it: what follows a gap is in no dense cache.
        whole = tokens if answer.kept is None else tokens[: leading(answer.kept) + 1]
        hit = self.prefix.fetch(whole, DENSE, PLAN)
        short = answer.slots - 1 - hit.tokens < limits.SHARE_LEAST_TOKENS
        # A short one with numbers of others in its prefix is told of all the same: it is not exact.
        if short and hit.namespace == DENSE:
            return False
        answer.hit = hit
        answer.undecided = Undecided(self.sharable, time.monotonic() + 2 * limits.SHARE_SETUP_S)
        answer.started_s = time.monotonic()
        self.emit(
            Accepted(
                answer.id,
                len(tokens),
                hit.tokens,
                chunk,
                waits=True,
                exact=hit.namespace == DENSE,
                kept=len(answer.kept or ()),
                dense_reason=answer.dense_reason,
            )
        )
        return True

    def share(self, answer: ScheduledSequence, share: PrefillShared) -> None:
        """The word: with these. Ignored where it has gone on already."""
        undecided = answer.undecided
        if undecided is not None and undecided.share is None:
            undecided.share, undecided.until_s = share, time.monotonic() + limits.SHARE_SETUP_S

    def alone(self, answer: ScheduledSequence, reason: str) -> None:
        """The word: without help, or without it from here on."""
        if answer.undecided is not None and answer.undecided.share is None:
            self._begin_alone(answer)
            self.streams.drop(answer.id)
        elif answer.undecided is not None or isinstance(answer.prefiller, SharedPrefill):
            self.give_up(answer, PeerUnreachable(reason or "The daemon gave the helpers up."))

    def poll(self, answer: ScheduledSequence) -> None:
        """Begin a prompt whose streams have come; let one go on alone whose time is up."""
        undecided = answer.undecided
        if undecided is None:
            return
        share = undecided.share
        if share is not None and self.streams.complete(answer.id, home_streams(share.split)):
            self._begin(answer, share, undecided.sharable)
        elif time.monotonic() >= undecided.until_s:
            why = (
                "Nobody said in time whether others help."
                if share is None
                else f"The helpers did not connect within {limits.SHARE_SETUP_S:.0f} s."
            )
            self.give_up(answer, PeerUnreachable(why))

    def due_s(self, answer: ScheduledSequence) -> float | None:
        """When its wait ends even if nothing comes."""
        if answer.undecided is not None:
            return answer.undecided.until_s
        return answer.prefiller.due_s if isinstance(answer.prefiller, SharedPrefill) else None

    def give_up(self, answer: ScheduledSequence, error: Exception) -> None:
        """Go on alone, from what is verified."""
        known = typed(error, "Sharing the prompt failed")
        shared = answer.prefiller
        steps: list[StepTime] = []
        if isinstance(shared, SharedPrefill):
            verified, caches = shared.verified
            steps = shared.steps
            shared.close()
            tokens, kept = answer.prepared.tokens, answer.kept
            answer.prefiller = (
                Prefiller(self.model, tokens, caches, verified)
                if kept is None
                else SparsePrefiller.after(self.model, tokens, kept, caches, verified)
            )
            if verified == answer.cached and answer.hit is not None:
                answer.namespace = answer.hit.namespace
        else:
            self._begin_alone(answer)
            verified = answer.cached
        self.streams.drop(answer.id)
        self.emit(Shared(answer.id, steps, known.code, known.message, verified))

    def finish(self, answer: ScheduledSequence, shared: SharedPrefill) -> None:
        """Say how it went, and let the helpers go."""
        steps = shared.steps
        self.end(answer)
        self.emit(Shared(answer.id, steps))

    def end(self, answer: ScheduledSequence) -> None:
        """Leave nothing behind of a prompt that is done with sharing, or with everything."""
        answer.undecided = None
        if isinstance(answer.prefiller, SharedPrefill):
            answer.prefiller.close()
        if answer.prepared.request.shared:
            self.streams.drop(answer.id)

    def _begin_alone(self, answer: ScheduledSequence) -> None:
        hit = self._take_hit(answer)
        answer.namespace = hit.namespace
        tokens, kept = answer.prepared.tokens, answer.kept
        answer.prefiller = (
            Prefiller(self.model, tokens, hit.cache or make_prompt_cache(self.model), hit.tokens)
            if kept is None
            else SparsePrefiller.begin(self.model, tokens, kept, hit.cache, hit.tokens)
        )

    def _begin(self, answer: ScheduledSequence, share: PrefillShared, sharable: Sharable) -> None:
        hit = self._take_hit(answer)
        try:
            if share.split.cached != hit.tokens:
                raise InvalidValue(f"{share.split} is not a split after {hit.tokens} cached tokens.")
            answer.prefiller = SharedPrefill(
                sharable.stage,
                sharable.layout,
                answer.prepared.tokens,
                hit.cache,
                share,
                self.streams.connect(answer.id),
                kept=answer.kept,
                any_chunks=sharable.any_chunks,
            )
        except Exception as error:
            answer.hit = hit
            self.give_up(answer, error)
            return
        answer.namespace = DENSE if share.exact and hit.namespace == DENSE else PLAN

    def _take_hit(self, answer: ScheduledSequence) -> Hit:
        hit = answer.hit or Hit(0, None)
        answer.undecided, answer.cached = None, hit.tokens
        # What takes the rows keeps them for as long as they are of use.
        answer.hit = Hit(hit.tokens, None, hit.namespace)
        return hit
