"""What a sequence waits for or does: its phase, what it holds in each phase, and which may follow.

    WAITING ─► FOLLOWING ─────────────────────────────────────────────────────┐
       │                                                                      ▼
       └─► RESTORING ─► FETCHING ─► OFFERED ───────────────────────────► READING ─► DECODING ─► ENDED

Any phase before READING may be passed over, and each may end at once. A prompt that helpers could have read
may follow another one after all. These two tables alone decide what is allowed; ``beginnings`` does it.
"""

from __future__ import annotations

from enum import IntEnum, auto


class Phase(IntEnum):
    """The phases, in the order in which the sources of a prompt's beginning are tried."""

    WAITING = auto()  # for memory, or for one of the streams
    FOLLOWING = auto()  # another prompt computes its beginning
    RESTORING = auto()  # its beginning comes from the disk
    FETCHING = auto()  # other machines are asked for its beginning, or it comes from one
    OFFERED = auto()  # the daemon decides whether helpers read it, or their streams are to come
    READING = auto()  # its prefill is computed, or is to have its first turn
    DECODING = auto()
    ENDED = auto()


# The phases of a prompt that is admitted, until it is read.
BEFORE_DECODING = frozenset(phase for phase in Phase if Phase.WAITING < phase < Phase.DECODING)

# The phases that may follow each.
NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: BEFORE_DECODING | {Phase.ENDED},
    # Of another prompt, if the one that it followed has ended.
    Phase.FOLLOWING: frozenset({Phase.FOLLOWING, Phase.READING, Phase.ENDED}),
    Phase.RESTORING: frozenset({Phase.FETCHING, Phase.OFFERED, Phase.FOLLOWING, Phase.READING, Phase.ENDED}),
    Phase.FETCHING: frozenset({Phase.OFFERED, Phase.FOLLOWING, Phase.READING, Phase.ENDED}),
    Phase.OFFERED: frozenset({Phase.READING, Phase.ENDED}),
    # With another prefill: the first one, or one without helpers.
    Phase.READING: frozenset({Phase.READING, Phase.DECODING, Phase.ENDED}),
    Phase.DECODING: frozenset({Phase.ENDED}),
    Phase.ENDED: frozenset(),
}

_Fields = frozenset[str]
_NONE: _Fields = frozenset()
# The fields of a sequence that are set in each phase, and those that may be set besides. No others are.
HOLDS: dict[Phase, tuple[_Fields, _Fields]] = {
    Phase.WAITING: (_NONE, _NONE),
    Phase.FOLLOWING: (frozenset({"awaited"}), _NONE),
    Phase.RESTORING: (frozenset({"restoring"}), _NONE),
    Phase.FETCHING: (frozenset({"fetching"}), frozenset({"hit"})),
    Phase.OFFERED: (frozenset({"undecided", "hit"}), _NONE),
    # A hit until its first turn, then a prefill.
    Phase.READING: (_NONE, frozenset({"hit", "prefiller"})),
    Phase.DECODING: (_NONE, _NONE),
    Phase.ENDED: (_NONE, _NONE),
}
# All fields that belong to a phase.
HELD = _NONE.union(*(must | may for must, may in HOLDS.values()))


class IllegalMove(RuntimeError):
    """A sequence was to go to a phase that does not follow its own: a bug."""
