"""Where the contents of messages lie in the text that a chat template makes of them. Pure.

A template may trim what it is given, leave parts of it out or write it twice. So a message is not searched
for in the text: the template is rendered once more with marks in place of the contents, and only where these
contents put in place of the marks give the very text again do they lie there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import msgspec

Message = dict[str, Any]

# Characters of no language (private use); a text that has them all the same is not looked through.
_MARK = re.compile("\ue000content([0-9]+)\ue001")


class NotShown(Exception):
    """Contents cannot be found; ``str`` of it is the reason, for people."""


class ShownContent(msgspec.Struct, frozen=True):
    """Characters [start, end) of the text, which lack the first ``cut`` characters of the content."""

    start: int
    end: int
    cut: int = 0

    def place(self, char: int) -> int:
        """Where a character of the content is in the text, or what is shown that is next to it."""
        return self.start + min(max(char - self.cut, 0), self.end - self.start)


def find_contents(
    text: str,
    messages: Sequence[Message],
    indices: Collection[int],
    render: Callable[[list[Message]], str],
    *,
    verbatim: bool,
) -> dict[int, ShownContent]:
    """Where the contents of the messages of these ``indices`` are in ``text``, which is ``render(messages)``.

    Args:
        verbatim: each is shown as it is, or trimmed. Otherwise the last may be shown in any form (as JSON).

    Raises:
        NotShown: that cannot be told.
    """
    ordered = sorted(indices)
    for index in ordered:
        if index >= len(messages) or not isinstance(messages[index].get("content"), str):
            raise NotShown(f"Message {index} is no plain text of which parts could be found.")
    marked = list(messages)
    for index in ordered:
        marked[index] = marked[index] | {"content": f"\ue000content{index}\ue001"}
    literals = _MARK.split(render(marked))
    if [int(index) for index in literals[1::2]] != ordered:
        raise NotShown("The chat template does not show each of these messages once, in order.")
    found: dict[int, ShownContent] = {}
    at = 0
    for index, before, after in zip(ordered, literals[:-1:2], literals[2::2], strict=True):
        if not text.startswith(before, at):
            raise NotShown("The chat template makes something else of the messages around these contents.")
        at += len(before)
        content, last = messages[index]["content"], index == ordered[-1]
        for shown, cut in _as_shown(content):
            if text.startswith(shown + after, at) and (not last or len(text) == at + len(shown + after)):
                found[index] = ShownContent(at, at + len(shown), cut)
                break
        else:
            if verbatim or not last or not text.endswith(after) or len(text) - len(after) < at:
                raise NotShown(f"The chat template does not show message {index} as it is.")
            found[index] = ShownContent(at, len(text) - len(after))
        at = found[index].end
    return found


def _as_shown(content: str) -> Iterable[tuple[str, int]]:
    """What templates make of a content, and how many of its first characters that lacks."""
    cut = len(content) - len(content.lstrip())
    return (content, 0), (content.strip(), cut), (content.rstrip(), 0), (content.lstrip(), cut)
