"""How an answer would be drafted for, for people: what its engine can verify, and who would guess. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from fleetd.control.prefill_plan import DraftsView
from fleetd.engine.protocol import Ready
from fleetd.engine.speculation.lookup import PromptLookup
from fleetd.engine.speculation.suffix import SuffixSource

# What requests, figures and people call the drafts of another worker.
DRAFTER = "drafter"


def view(
    facts: Ready, tokens: int, draft_model: str, drafters: Sequence[str], *, remembers: bool
) -> DraftsView:
    """Of an answer to a prompt of so many tokens.

    Args:
        draft_model: that is to draft; "" for none.
        drafters: machines that could do it, in the order in which they are asked.
    """
    if facts.speculation_width < 2:
        return DraftsView(facts.speculation, reason=facts.speculation)
    # The token that is due and one draft.
    if tokens + 2 > facts.speculation_context:
        most = facts.speculation_context
        return DraftsView(
            facts.speculation, reason=f"blocks were found exact up to {most} tokens of context only"
        )
    local = (SuffixSource.name, PromptLookup.name)
    return DraftsView(
        facts.speculation,
        sources=[*([DRAFTER] if drafters else []), *local],
        width=facts.speculation_width,
        draft_model=draft_model,
        drafters=list(drafters),
        remembers=remembers,
    )
