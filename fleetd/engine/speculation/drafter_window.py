"""What a drafter's model sees of a long text: its first tokens and its last ones. Pure.

    the text        ▓▓─────────────────────────────────────────▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓ n
    what is seen    ▓▓ sink                                     window: the rest, a step or more of it

The model reads that as if nothing lay between: positions are those in what is seen, so its own context may
be shorter than the text. Where the window begins depends on the text's length alone, and moves by half a
window at a time. So most tokens are read twice, and the next turn of a conversation finds what the last one
has read.
"""

from __future__ import annotations

from fleetd import limits


def begins(length: int) -> int:
    """Where the window of a text of ``length`` tokens begins; where the sink ends if all of it is seen."""
    sink, step = limits.DRAFT_SINK_TOKENS, limits.DRAFT_WINDOW_TOKENS // 2
    over = max(0, length - sink - limits.DRAFT_WINDOW_TOKENS)
    return sink + -(-over // step) * step


def seen(length: int) -> int:
    """Tokens that are seen of a text of ``length`` tokens."""
    return length - begins(length) + limits.DRAFT_SINK_TOKENS
