"""What to do about a prompt that is too long: the models here that take it, or smart prefill. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fleetd.compression.policy import MIN_PROMPT_TOKENS
from fleetd.errors import ContextLengthExceeded
from fleetd.models.folder import ModelFolder
from fleetd.text import too_long

# The share of a context that a shortened prompt may fill, and the least share of a prompt worth keeping.
_FILLED, _LEAST_SHARE = 0.85, 0.1


def advised(
    error: ContextLengthExceeded, model: str, installed: Iterable[ModelFolder], *, smart: bool
) -> ContextLengthExceeded:
    """The error with a hint for this machine.

    Args:
        model: the one that was asked.
        smart: the prompt was to be shortened, and is too long all the same.
    """
    found = too_long.figures(error.message)
    if found is None:
        return error
    tokens, context = found
    hint = f"{model} takes {context:,}."
    longer = [folder for folder in installed if folder.context_tokens > tokens]
    if longer:
        # The smallest: of those it is the likeliest to fit into memory.
        other = min(longer, key=lambda folder: (folder.weights_bytes, folder.name))
        hint += f" {other.name}, which is on this machine, takes {other.context_tokens:,}."
    else:
        hint += " No model on this machine takes as many."
    share = math.floor(100 * _FILLED * context / tokens) / 100
    if not smart and tokens >= MIN_PROMPT_TOKENS and share >= _LEAST_SHARE:
        hint += (
            f" Smart prefill that keeps {share:.0%} of the prompt fits: `--keep-ratio {share}` of "
            f"`fleetctl chat`, or `smart_prefill` with a `target_ratio` of {share} in a body."
        )
    elif not longer:
        hint += " Shorten it, or get a model with a longer context: `fleetctl models` lists them."
    return ContextLengthExceeded(error.message, hint=hint, param=error.param)
