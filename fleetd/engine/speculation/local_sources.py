"""The sources that draft from the text itself. A new one is its class, its name and its line here."""

from __future__ import annotations

from typing import Final, Literal, get_args

from fleetd.engine.speculation.lookup import PromptLookup
from fleetd.engine.speculation.sources import DraftSource
from fleetd.engine.speculation.suffix import SuffixSource

# Requests, figures and plans name a source by one of these.
SourceName = Literal["suffix", "lookup", "drafter"]
SOURCE_NAMES: tuple[SourceName, ...] = get_args(SourceName)
# The source that another worker feeds; it is added to an answer once that worker is found.
DRAFTER: Final = "drafter"
LOCAL_NAMES = tuple(name for name in SOURCE_NAMES if name != DRAFTER)


def local_sources() -> list[DraftSource]:
    """New sources for one answer, the preferred one first."""
    return [SuffixSource(), PromptLookup()]
