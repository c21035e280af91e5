"""This worker's own prompts that other machines may help with: from the offer to share to its end.

    Accepted(waits) ─ decision ─► PrefillWithHelpers ─ streams ─► SharedPrefill ─► PrefillReport, decoding
           │                         │                          │
           └ PrefillAlone, or none   └ not in time              └ late, lost, wrong: PrefillReport(code), then
                                                                  alone from what is verified

However it ends, the prompt goes on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fleetd import limits
from fleetd.engine.failures import typed
from fleetd.engine.layers.prefill import Prefiller
from fleetd.engine.loop.phases import Phase
from fleetd.engine.loop.sequence import ScheduledSequence, Undecided
from fleetd.engine.measure.chunk_size import Chunks
from fleetd.engine.prefixes.prefix_cache import DENSE, EQUIVALENT, Hit, PrefixCache
from fleetd.engine.protocol import Accepted, PrefillReport, PrefillWithHelpers, Report, StepTime
from fleetd.engine.sequence_state import checkpoints
from fleetd.engine.shared_prefill.frame_schedule import home_streams
from fleetd.engine.shared_prefill.home_prefill import SharedPrefill
from fleetd.engine.shared_prefill.sharable import Sharable
from fleetd.engine.sparse_prefill.sparse import SparsePrefiller
from fleetd.engine.streams.handed_over import HandedOverStreams
from fleetd.errors import InvalidValue, PeerUnreachable
from fleetd.plan.prefill.split import WarmRows, prefix_hashes


@dataclass
class SharedPrompts:
    """``sharable`` is None if no other machine can help with ``model``."""

    model: Any
    sharable: Sharable | None
    chunks: Chunks
    prefix: PrefixCache
    streams: HandedOverStreams
    emit: Callable[[Report], None]
    # Prompts that were shared in vain, which are read alone next time.
    _lost: deque[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self._lost = deque(maxlen=limits.SHARE_LOST_PROMPTS)

    def offer(self, sequence: ScheduledSequence) -> bool:
        """Report that an admitted prompt waits for the daemon's decision. False if it cannot be shared."""
        tokens = sequence.prepared.tokens
        # Helpers read tokens: they have no images.
        whole = sequence.kept is None and not sequence.scores_prompt and sequence.prepared.images is None
        if self.sharable is None or not whole or tokens in self._lost:
            return False
        arithmetics = (DENSE,) if sequence.prepared.request.exact else (DENSE, EQUIVALENT)
        hit = sequence.hit or self.prefix.fetch(tokens, *arithmetics)
        short = len(tokens) - 1 - hit.tokens < limits.SHARE_LEAST_TOKENS
        # A short prompt with another machine's numbers in its prefix is offered too: it is not exact.
        if short and hit.namespace == DENSE:
            return False
        sequence.hit, sequence.started_s = hit, time.monotonic()
        until_s = sequence.started_s + 2 * limits.SHARE_SETUP_S
        sequence.move(Phase.OFFERED, undecided=Undecided(self.sharable, until_s))
        places, states = self._places(sequence, hit)
        self.emit(
            Accepted(
                sequence.id,
                len(tokens),
                hit.tokens,
                self.chunks.size(shared=False),
                waits=True,
                exact=hit.namespace == DENSE,
                places=places,
                states=states,
                dense_reason=sequence.dense_reason,
                tools_by_grammar=sequence.prepared.tools_by_grammar,
                warm=_warm(sequence.prepared.request.warm, tokens[: hit.tokens]),
            )
        )
        return True

    def _places(self, sequence: ScheduledSequence, hit: Hit) -> tuple[list[int], int]:
        """Where alone states of the prompt would be kept, and of how many, the last ones, there is room."""
        sharable, prepared, room = self.sharable, sequence.prepared, self.prefix.state_bytes
        if sharable is None or not room:
            return [], 0
        if not (each := sharable.layout.whole_bytes(len(prepared.tokens))):
            return [], 0
        found = checkpoints.places(len(prepared.tokens), prepared.borders, hit.tokens)
        # At its end the prompt's own caches are kept.
        found = [at for at in found if at < len(prepared.tokens) - 1]
        return found, min(len(found), room // each)

    def share(self, sequence: ScheduledSequence, share: PrefillWithHelpers) -> None:
        """Prefill it with helpers, once their streams are connected. Ignored if it has gone on already."""
        undecided = sequence.undecided
        if undecided is not None and undecided.share is None:
            undecided.share, undecided.until_s = share, time.monotonic() + limits.SHARE_SETUP_S

    def alone(self, sequence: ScheduledSequence, reason: str) -> None:
        """Prefill it without help, or without more help from here on."""
        if sequence.undecided is not None and sequence.undecided.share is None:
            self._begin_alone(sequence)
            self.streams.drop(sequence.id)
        elif sequence.undecided is not None or sequence.shared is not None:
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
        return sequence.shared.due_s if sequence.shared is not None else None

    def give_up(self, sequence: ScheduledSequence, error: Exception) -> Prefiller | SparsePrefiller:
        """Go on alone, from what is verified."""
        known = typed(error, "Sharing the prompt failed")
        steps: list[StepTime] = []
        if (shared := sequence.shared) is not None:
            verified = shared.read_so_far()
            steps = shared.steps
            shared.close()
            alone = sequence.go_on_from(self.model, verified, self.prefix.state_bytes)
        else:
            alone = self._begin_alone(sequence)
        self.streams.drop(sequence.id)
        self.emit(PrefillReport(sequence.id, steps, known.code, known.message, alone.done))
        return alone

    def finish(self, sequence: ScheduledSequence, shared: SharedPrefill) -> None:
        """Report how sharing went, and close the streams."""
        steps = shared.steps
        prefixes = shared.prefixes
        self.end(sequence)
        self.emit(PrefillReport(sequence.id, steps, prefixes=prefixes))

    def lost(self, sequence: ScheduledSequence) -> None:
        """It ended half way, and nothing that was read of it with helpers could be kept."""
        self._lost.append(sequence.prepared.tokens)

    def end(self, sequence: ScheduledSequence) -> None:
        """Close the streams of a prompt that is done with sharing, or has ended."""
        if sequence.shared is not None:
            sequence.shared.close()
        if sequence.prepared.request.shared:
            self.streams.drop(sequence.id)

    def _begin_alone(self, sequence: ScheduledSequence) -> Prefiller | SparsePrefiller:
        return sequence.begin_from(self.model, sequence.hit or Hit(0, None), self.prefix.state_bytes)

    def _begin(self, sequence: ScheduledSequence, share: PrefillWithHelpers, sharable: Sharable) -> None:
        hit = sequence.hit or Hit(0, None)
        try:
            if share.split.cached != hit.tokens:
                raise InvalidValue(f"{share.split} is not a split after {hit.tokens} cached tokens.")
            shared = SharedPrefill(
                sharable.stage,
                sharable.layout,
                sequence.prepared.tokens,
                hit.cache,
                share,
                self.streams.connect(sequence.id),
                prefix_namespace=hit.namespace,
                prefix_origins=hit.origins,
                any_chunks=sharable.any_chunks,
            )
        except Exception as error:
            self.give_up(sequence, error)
            return
        sequence.begin_with(shared, hit)


def _warm(known: Sequence[WarmRows], cached: list[int]) -> list[int]:
    """Which of ``known`` are of the first tokens of ``cached``."""
    fitting = [rows for rows in known if rows.tokens <= len(cached)]
    ends = sorted({rows.tokens for rows in fitting})
    hashes = prefix_hashes(np.array(cached, "<i4").tobytes(), ends)
    return [at for at, rows in enumerate(known) if hashes.get(rows.tokens) == rows.prefix]
