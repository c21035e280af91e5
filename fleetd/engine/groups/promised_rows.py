"""What a member of a group promises to the machine that answers, and how that machine divides it.

    tokens ─► promised_bytes   what a member keeps at the most
           └► divided          how many rows sequences may have that run, and those that are kept

Both follow from the tokens that were agreed on, so that what is admitted is never refused. A row is what all
layers keep of a token. A window counts as if it kept a row of every token: how many sequences there will be,
and how long, is not known when memory is promised.
"""

from __future__ import annotations

from fleetd import limits
from fleetd.control.model_facts import StateSizes
from fleetd.engine.measure.memory import RowBound
from fleetd.engine.sequence_state.growth import STEP


def promised_bytes(tokens: int, sizes: StateSizes) -> int:
    """The most bytes of sequences within both bounds of ``divided``, in layers with these ``sizes``."""
    # Both bounds have the spare rows of one sequence besides the tokens.
    states = tokens // _spare(running=True) + 2
    return (tokens + 2 * STEP) * sizes.row_bytes + states * sizes.state_bytes


def divided(tokens: int, kept: int, *, running: bool) -> tuple[RowBound, RowBound]:
    """Rows of sequences that run, and of those that are kept, if ``kept`` of the ``tokens`` are for these.

    ``running``: some layers have running states.
    """
    spare = _spare(running=running)
    return RowBound(tokens - kept + spare, spare), RowBound(kept + spare, spare)


def _spare(*, running: bool) -> int:
    """Rows that a sequence counts as besides its tokens: room is made in steps. Running states take no rows;
    so many for each sequence bound how many states there are."""
    return limits.GROUP_STATE_TOKENS if running else STEP
