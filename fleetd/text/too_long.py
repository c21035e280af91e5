"""The sentence about a prompt that is longer than a model's context, and its figures."""

from __future__ import annotations

import re

_FIGURES = re.compile(r"too long: (\d+) tokens > (\d+) maximum")


def sentence(tokens: int, context_tokens: int) -> str:
    """Claude Code compacts a conversation at the first sentence; litellm knows the second."""
    return (
        f"The prompt is too long: {tokens} tokens > {context_tokens} maximum. "
        f"This model's maximum context length is {context_tokens} tokens."
    )


def figures(message: str) -> tuple[int, int] | None:
    """The prompt's tokens and the model's, as a message has them that ``sentence`` made; else None."""
    found = _FIGURES.search(message)
    return None if found is None else (int(found[1]), int(found[2]))
