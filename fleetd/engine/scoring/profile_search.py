"""The profile of the model that a worker has: known from before, or searched for between requests.

    known_profiles ─► ready | unable
        └ unmeasured ─► a step in each idle turn ─► kept ─► ready | unable

A search takes about as long as a prefill of ``SEARCH_TOKENS``, so no text waits for it: until it is done,
texts that bring no profile are refused with ``ScorerNotReady``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fleetd import limits
from fleetd.engine.failures import typed
from fleetd.engine.protocol import Profile, ScoringState
from fleetd.engine.scoring.attention_pass import AttentionTap
from fleetd.engine.scoring.head_profile import LEAST_FOUND, Profiling
from fleetd.engine.scoring.known_profiles import SEARCH_TOKENS, ProfileStore
from fleetd.errors import FleetError, InvalidValue, ModelUnsupported, OutOfMemory, ScorerNotReady


@dataclass(kw_only=True)
class ProfileSearch:
    """``digest`` and ``device`` are what the profile is known under, in ``known``.

    ``due_s``: from then on the search may go on, by ``clock``.
    """

    model: Any
    tokenizer: Any
    context_tokens: int
    known: ProfileStore = field(default_factory=ProfileStore)
    digest: str = ""
    device: str = "cpu"
    clock: Callable[[], float] = time.monotonic
    due_s: float = field(default=0.0, init=False)
    _pause_s: float = field(default=limits.SEARCH_AGAIN_S, init=False)
    _tap: AttentionTap | None = field(default=None, init=False)
    _profile: Profile | None = field(default=None, init=False)
    _failure: FleetError | None = field(default=None, init=False)
    _profiling: Profiling | None = field(default=None, init=False)
    _done: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._profile = self.known.find(self.digest, self.device)

    @property
    def state(self) -> ScoringState:
        if self._failure is not None or (self._profile is not None and not self._profile.heads):
            return ScoringState("unable")
        if self._profile is not None:
            return ScoringState("ready")
        return ScoringState("unmeasured", max(1, SEARCH_TOKENS - self._done))

    @property
    def tap(self) -> AttentionTap:
        """Raises ModelUnsupported."""
        if self._tap is None:
            self._tap = AttentionTap.of(self.model)
        return self._tap

    def profile(self) -> Profile:
        """The model's own profile. Raises ScorerNotReady before it is known, ModelUnsupported if there is
        none."""
        if self._failure is not None:
            raise self._failure
        if self._profile is None:
            raise ScorerNotReady(
                "This model has not been measured for scoring yet: that is done while nothing else runs.",
                hint="Ask again later, or choose another model for scoring.",
            )
        if not self._profile.heads:
            raise ModelUnsupported(
                f"This model's attention cannot be looked into, or finds fewer than {LEAST_FOUND:.0%} of "
                "sentences that answer a question: too few for scoring.",
                hint="Choose another model for scoring.",
            )
        try:
            check(self._profile, self.tap)
        except InvalidValue:
            # What was kept is not this model's.
            self._profile = None
            return self.profile()
        return self._profile

    def step(self, chunk_tokens: int) -> None:
        """Go on with the search by about so many tokens.

        An error ends it: this model then scores nothing. If memory was short, it begins anew at ``due_s``.
        """
        try:
            self._search(chunk_tokens)
        except ModelUnsupported as error:
            self._failure = error
            # Known from then on, so that another model is chosen before this one is loaded again.
            self.known.keep(self.digest, self.device, Profile([], 0))
        except Exception as error:
            known = typed(error, "This model could not be measured for scoring")
            if isinstance(known, OutOfMemory):
                self._later()
            elif known is error:
                self._failure = known
            else:
                self._failure = ModelUnsupported(f"This model could not be measured for scoring: {error}.")

    def _later(self) -> None:
        """Memory was short, which may pass: begin anew after a pause, longer each time."""
        self._profiling, self._done = None, 0
        self.due_s = self.clock() + self._pause_s
        self._pause_s = min(limits.SEARCH_AGAIN_MOST_S, 2 * self._pause_s)

    def _search(self, chunk_tokens: int) -> None:
        # One short text's keys at a time: no more than is kept free for working in.
        if self._profiling is None:
            self._profiling = Profiling(self.tap, self.tokenizer, self.context_tokens)
        self._done += self._profiling.step(chunk_tokens)
        if self._profiling.finished:
            self._profile = self._profiling.profile()
            self._profiling = None
            self.known.keep(self.digest, self.device, self._profile)


def check(profile: Profile, tap: AttentionTap) -> None:
    """Raises InvalidValue if a profile is not this model's: it may come from another machine."""
    for layer, head in profile.heads:
        if layer not in tap.scales or not head < tap.query_heads(layer):
            raise InvalidValue(f"Layer {layer} of this model has no head {head} that could be asked.")
        if layer >= profile.exit_layer:
            raise InvalidValue(f"Layer {layer} is not run: {profile.exit_layer} are.")
