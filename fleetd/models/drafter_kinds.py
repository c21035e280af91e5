"""Folders that hold a drafter for another model, not a model: told by their configs. Pure.

Such a drafter reads the other model's hidden states, so it runs in that model's worker and answers nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

# "dflash": a block of tokens at once, from hidden states of several layers (DFlash, DFlash2, DSpark).
# "assistant": token by token, from the keys and values of Gemma 4.
DrafterKind = Literal["dflash", "assistant"]


def drafter_kind(config: Mapping[str, Any]) -> DrafterKind | None:
    """What kind of drafter a config describes; None if it is a model's, or of a kind not known here."""
    if isinstance(config.get("dflash_config"), dict):
        return "dflash"
    return "assistant" if str(config.get("model_type", "")).endswith("gemma4_assistant") else None
