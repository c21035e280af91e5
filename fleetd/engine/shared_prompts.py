"""This worker's own prompts that other machines may help with: from the offer to share to its end.

    Accepted(waits) ─ decision ─► PrefillShared ─ streams ─► SharedPrefill ─► Shared, decoding
           │                         │                          │
           └ PrefillAlone, or none   └ not in time              └ late, lost, wrong: Shared(code), then
                                                                  alone from what is verified

However it ends, the prompt goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fleetd import limits
from fleetd.engine.failures import typed
from fleetd.engine.prefill import Prefiller
from fleetd.engine.prefix_cache import DENSE, PLAN, Hit, PrefixCache
from fleetd.engine.protocol import Accepted, PrefillShared, Report, Shared, StepTime
from fleetd.engine.sequence import ScheduledSequence, Undecided, begin_prefill
from fleetd.engine.sequence_state import checkpoints
from fleetd.engine.shared_prefill.frame_schedule import home_streams
from fleetd.engine.shared_prefill.home_prefill import SharedPrefill
from fleetd.engine.shared_prefill.sharable import Sharable
from fleetd.engine.sparse_prefill.sparse import SparsePrefiller
from fleetd.engine.streams.handed_over import HandedOverStreams
from fleetd.errors import InvalidValue, PeerUnreachable


@dataclass
class SharedPrompts:
    """``sharable`` is None if no other machine can help with ``model``."""

    model: Any
    sharable: Sharable | None
    prefix: PrefixCache
    streams: HandedOverStreams
    emit: Callable[[Report], None]

    def accept(self, sequence: ScheduledSequence, chunk: int) -> bool:
        """Report that an admitted prompt waits for the daemon's decision. False if it cannot be shared."""
        request, tokens = sequence.prepared.request, sequence.prepared.tokens
        # The prompt's own probabilities need every hidden state after the last layer, here.
        scored = request.echo and sequence.logprobs is not None
        if not request.shared or self.sharable is None or scored:
            return False
        hit = sequence.hit or self.prefix.fetch(sequence.dense_tokens, DENSE, PLAN)
        short = sequence.slots - 1 - hit.tokens < limits.SHARE_LEAST_TOKENS
        # A short prompt with another machine's numbers in its prefix is offered too: it is not exact.
        if short and hit.namespace == DENSE:
            return False
        sequence.hit = hit
        sequence.undecided = Undecided(self.sharable, time.monotonic() + 2 * limits.SHARE_SETUP_S)
        sequence.started_s = time.monotonic()
        places, states = self._places(sequence, hit)
        self.emit(
            Accepted(
                sequence.id,
                len(tokens),
                hit.tokens,
                chunk,
                waits=True,
                exact=hit.namespace == DENSE,
                places=places,
                states=states,
                kept=len(sequence.kept or ()),
                dense_reason=sequence.dense_reason,
            )
        )
        return True

    def _places(self, sequence: ScheduledSequence, hit: Hit) -> tuple[list[int], int]:
        """Where alone states of the prompt would be kept, and of how many, the last ones, there is room."""
        sharable, prepared, room = self.sharable, sequence.prepared, self.prefix.state_bytes
        if sharable is None or sequence.kept is not None or not room:
            return [], 0
        if not (each := sharable.layout.whole_bytes(len(prepared.tokens))):
            return [], 0
        found = checkpoints.places(len(prepared.tokens), prepared.borders, hit.tokens)
        # At its end the prompt's own caches are kept.
        found = [at for at in found if at < len(prepared.tokens) - 1]
        return found, min(len(found), room // each)

    def share(self, sequence: ScheduledSequence, share: PrefillShared) -> None:
        """Prefill it with helpers, once their streams are connected. Ignored if it has gone on already."""
        undecided = sequence.undecided
        if undecided is not None and undecided.share is None:
            undecided.share, undecided.until_s = share, time.monotonic() + limits.SHARE_SETUP_S

    def alone(self, sequence: ScheduledSequence, reason: str) -> None:
        """Prefill it without help, or without more help from here on."""
        if sequence.undecided is not None and sequence.undecided.share is None:
            self._begin_alone(sequence)
            self.streams.drop(sequence.id)
        elif sequence.undecided is not None or isinstance(sequence.prefiller, SharedPrefill):
            self.give_up(sequence, PeerUnreachable(reason or "The daemon gave the helpers up."))

    def poll(self, sequence: ScheduledSequence) -> None:
        """Begin a prompt whose streams are connected; prefill one alone whose time is up."""
        undecided = sequence.undecided
        if undecided is None:
            return
        share = undecided.share
        if share is not None and self.streams.complete(sequence.id, home_streams(share.split)):
            self._begin(sequence, share, undecided.sharable)
        elif time.monotonic() >= undecided.until_s:
            why = (
                "The daemon did not decide in time whether others help."
                if share is None
                else f"The helpers did not connect within {limits.SHARE_SETUP_S:.0f} s."
            )
            self.give_up(sequence, PeerUnreachable(why))

    def due_s(self, sequence: ScheduledSequence) -> float | None:
        """When its wait ends even if nothing arrives; None while it does not wait."""
        if sequence.undecided is not None:
            return sequence.undecided.until_s
        return sequence.prefiller.due_s if isinstance(sequence.prefiller, SharedPrefill) else None

    def give_up(self, sequence: ScheduledSequence, error: Exception) -> None:
        """Go on alone, from what is verified."""
        known = typed(error, "Sharing the prompt failed")
        shared = sequence.prefiller
        steps: list[StepTime] = []
        if isinstance(shared, SharedPrefill):
            verified, caches = shared.verified
            steps = shared.steps
            shared.close()
            prepared, kept = sequence.prepared, sequence.kept
            sequence.prefiller = (
                Prefiller(
                    self.model,
                    prepared.tokens,
                    caches,
                    verified,
                    state_bytes=self.prefix.state_bytes,
                    borders=prepared.borders,
                )
                if kept is None
                else SparsePrefiller.after(self.model, prepared.tokens, kept, caches, verified)
            )
            if verified == sequence.cached and sequence.hit is not None:
                sequence.namespace = sequence.hit.namespace
        else:
            self._begin_alone(sequence)
            verified = sequence.cached
        self.streams.drop(sequence.id)
        self.emit(Shared(sequence.id, steps, known.code, known.message, verified))

    def finish(self, sequence: ScheduledSequence, shared: SharedPrefill) -> None:
        """Report how sharing went, and close the streams."""
        steps = shared.steps
        self.end(sequence)
        self.emit(Shared(sequence.id, steps))

    def end(self, sequence: ScheduledSequence) -> None:
        """Close the streams of a prompt that is done with sharing, or has ended."""
        sequence.undecided = None
        if isinstance(sequence.prefiller, SharedPrefill):
            sequence.prefiller.close()
        if sequence.prepared.request.shared:
            self.streams.drop(sequence.id)

    def _begin_alone(self, sequence: ScheduledSequence) -> None:
        hit = self._take_hit(sequence)
        sequence.namespace = hit.namespace
        sequence.prefiller = begin_prefill(
            self.model, sequence.prepared, sequence.kept, hit, self.prefix.state_bytes
        )

    def _begin(self, sequence: ScheduledSequence, share: PrefillShared, sharable: Sharable) -> None:
        hit = self._take_hit(sequence)
        try:
            if share.split.cached != hit.tokens:
                raise InvalidValue(f"{share.split} is not a split after {hit.tokens} cached tokens.")
            sequence.prefiller = SharedPrefill(
                sharable.stage,
                sharable.layout,
                sequence.prepared.tokens,
                hit.cache,
                share,
                self.streams.connect(sequence.id),
                kept=sequence.kept,
                any_chunks=sharable.any_chunks,
            )
        except Exception as error:
            sequence.hit = hit
            self.give_up(sequence, error)
            return
        sequence.namespace = DENSE if share.exact and hit.namespace == DENSE else PLAN

    def _take_hit(self, sequence: ScheduledSequence) -> Hit:
        hit = sequence.hit or Hit(0, None)
        sequence.undecided, sequence.cached = None, hit.tokens
        # The prefiller owns the rows from now on.
        sequence.hit = Hit(hit.tokens, None, hit.namespace)
        return hit
