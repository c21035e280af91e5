"""The sources that draft from the text itself. A new one is its class, its name and its line here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, get_args

from fleetd.engine.speculation.automaton import Automaton
from fleetd.engine.speculation.lookup import PromptLookup
from fleetd.engine.speculation.sources import DraftSource
from fleetd.engine.speculation.suffix import SuffixSource

# Requests, figures and plans name a source by one of these.
SourceName = Literal["suffix", "lookup", "drafter"]
SOURCE_NAMES: tuple[SourceName, ...] = get_args(SourceName)
# The source that another worker feeds; it is added to an answer once that worker is found.
DRAFTER: Final = "drafter"
LOCAL_NAMES = tuple(name for name in SOURCE_NAMES if name != DRAFTER)


def local_sources(past: Sequence[Automaton] = ()) -> list[DraftSource]:
    """New sources for one answer, the preferred one first.

    Args:
        past: automata of past answers, which the suffix source may draft from.
    """
    return [SuffixSource(past), PromptLookup()]
