"""The sources of drafts by their names, and those that need nothing but the answer itself. A new one is its
class, its name and its line here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, get_args

from fleetd.engine.speculation.forced import ForcedTokens
from fleetd.engine.speculation.lookup import PromptLookup
from fleetd.engine.speculation.sources import DraftSource
from fleetd.engine.speculation.suffix import SuffixSource

if TYPE_CHECKING:
    from fleetd.engine.grammar.matcher import AnswerMatcher

# Requests, figures and plans name a source by one of these.
SourceName = Literal["grammar", "suffix", "lookup", "drafter", "mtp", "dflash", "assistant"]
SOURCE_NAMES: tuple[SourceName, ...] = get_args(SourceName)
# The source that another worker feeds; it is added to an answer once that worker is found.
DRAFTER: Final = "drafter"
# The source of an answer that is held to a grammar.
GRAMMAR: Final = "grammar"
# The sources of a model that has something that drafts from its hidden states: an MTP head, a block drafter,
# Gemma 4's assistant.
MTP: Final = "mtp"
DFLASH: Final = "dflash"
ASSISTANT: Final = "assistant"
HIDDEN_NAMES: tuple[SourceName, ...] = (MTP, DFLASH, ASSISTANT)
# Those that every answer has.
LOCAL_NAMES = tuple(name for name in SOURCE_NAMES if name not in (DRAFTER, GRAMMAR, *HIDDEN_NAMES))


def local_sources(matcher: AnswerMatcher | None = None) -> list[DraftSource]:
    """New sources for one answer, the preferred one first. ``matcher``: of the grammar that it is held to."""
    forced = [] if matcher is None else [ForcedTokens(matcher)]
    return [*forced, SuffixSource(), PromptLookup()]
