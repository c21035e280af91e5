"""Folders that hold a drafter for another model, not a model: told by their configs. Pure.

Such a drafter reads the other model's hidden states, so it runs in that model's worker and answers nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

# "dflash": a block of tokens at once, from hidden states of several layers (DFlash, DFlash2, DSpark).
# "assistant": token by token, from the keys and values of Gemma 4.
# "mtp": a model's MTP head in a folder of its own (``qwen3_5_mtp`` and the like).
DrafterKind = Literal["dflash", "assistant", "mtp"]


def drafter_kind(config: Mapping[str, Any]) -> DrafterKind | None:
    """What kind of drafter a config describes; None if it is a model's, or of a kind not known here."""
    if isinstance(config.get("dflash_config"), dict):
        return "dflash"
    kind = str(config.get("model_type", ""))
    if kind.endswith("gemma4_assistant"):
        return "assistant"
    return "mtp" if kind.endswith("_mtp") else None
