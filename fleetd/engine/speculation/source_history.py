"""What the answers of a worker have found about each source of drafts, for the answers after them. Pure.

    belief      how often its drafts were right; fades slowly
    account     plain steps that its drafts have saved, less those that they lost, within bounds
    allowance   plain steps that may be lost to find out whether a source pays that did not

An answer begins with what it finds here. A source whose drafts pay may risk what it has saved before. One
whose drafts do not pay is tried again, one token at a time, whenever the allowance bears the whole price of
the trial. The allowance grows by ``TRIAL_SHARE`` of a plain step with each token of any answer, and what a
trial loses is taken from it. So trials take no more than this share of the time, however many answers there
are, and trials that gain are not limited.

It is kept with the model: a worker that loads it anew begins anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# The assumed acceptance of a new source, and how many tokens of evidence that counts for.
PRIOR, PRIOR_TOKENS = 0.6, 3.0
# Evidence loses this share of its weight with each draft that is judged: sources and texts change.
_FADES = 0.03
# The most tokens of evidence that an answer takes over from the answers before it.
_REMEMBERED = 8.0
# Fewer judged tokens than this are no reason to say that a source does not pay.
_JUDGED = 8
# Plain steps that an answer may risk of what was saved before it; also the most that a trial may cost.
# A trial gives one token at most, so one that costs more could not pay.
CARRIED = 1.0
# The most that is kept of what was saved: an answer that has saved much may lose a little at its end.
_SAVED = 16.0
# Plain steps that trials of a source may lose for each token of answers.
TRIAL_SHARE = 0.005
# Sources have names of a closed list; more than these would be an error.
_SOURCES = 16


@dataclass(slots=True)
class SourceHistory:
    """One source, over all answers of a worker."""

    # Weights of the drafts that were right, and of all that were judged.
    right: float = PRIOR * PRIOR_TOKENS
    weight: float = PRIOR_TOKENS
    # Tokens that were judged.
    judged: int = 0
    # In plain steps; see the module.
    account: float = 0.0
    allowance: float = 0.0

    @property
    def acceptance(self) -> float:
        """Chance that a draft is right where all before it were."""
        return self.right / self.weight

    @property
    def known(self) -> bool:
        """True if enough drafts were judged."""
        return self.judged >= _JUDGED

    def remembered(self) -> tuple[float, float]:
        """Weights of right and of judged drafts for a new answer: the same acceptance, soon
        outweighed; or that of a new source, if it is higher and the drafts have saved time all the same,
        as those do that are right in some parts of a text."""
        weight = min(_REMEMBERED, self.weight)
        best = max(self.acceptance, PRIOR) if self.account >= CARRIED else self.acceptance
        return best * weight, weight

    def judge(self, right: int, *, wrong: bool) -> None:
        """Count a draft whose first ``right`` tokens were accepted; ``wrong``: the next one was rejected."""
        self.right = self.right * (1 - _FADES) + right
        self.weight = self.weight * (1 - _FADES) + right + wrong
        self.judged += right + wrong

    def gained(self, steps: float) -> None:
        """Note that drafts have saved ``steps`` plain steps; below 0 if they lost some."""
        self.account = min(_SAVED, max(0.0, self.account + steps))

    def tried(self, steps: float) -> None:
        """Note that a trial has saved ``steps`` plain steps; below 0 if it lost some."""
        # One that was held up must not end trials for good.
        self.allowance = max(-CARRIED, self.allowance + min(0.0, steps))

    def on_tokens(self, tokens: int) -> None:
        """Note that an answer has got ``tokens``."""
        self.allowance = min(CARRIED, self.allowance + TRIAL_SHARE * tokens)


@dataclass(slots=True)
class DraftHistory:
    """All sources of a worker."""

    sources: dict[str, SourceHistory] = field(default_factory=dict)

    def source(self, name: str) -> SourceHistory:
        if name not in self.sources and len(self.sources) >= _SOURCES:
            self.sources.clear()
        return self.sources.setdefault(name, SourceHistory())

    def on_tokens(self, tokens: int) -> None:
        """Note that an answer has got ``tokens``."""
        for each in self.sources.values():
            each.on_tokens(tokens)
