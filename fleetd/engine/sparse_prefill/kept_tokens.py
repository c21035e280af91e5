"""From the kept ranges of messages to the tokens that are kept, through template and tokenizer. Pure.

    content [a, b) ──template──► text [x + a, x + b) ──the tokenizer's offsets──► tokens

A template may trim what it is given, leave parts of it out or write it twice. So a message is not searched
for in the text: the template is rendered once more with marks in place of the contents, and only where these
contents put in place of the marks give the very text again do they lie there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Range = tuple[int, int]
Message = dict[str, Any]

# Characters of no language (private use); a text that has them all the same is prefilled densely.
_MARK = re.compile("\ue000kept([0-9]+)\ue001")


class NotSparse(Exception):
    """A Keep cannot be followed; ``str`` of it is the reason, for people."""


def dropped_of_messages(
    text: str,
    messages: Sequence[Message],
    parts: Mapping[int, Sequence[Range]],
    render: Callable[[list[Message]], str],
) -> list[Range]:
    """The ranges of ``text``, which is ``render(messages)``, that are to go: all of the contents of the
    messages in ``parts`` but their kept ranges. Raises NotSparse if that cannot be told."""
    for index in parts:
        if index >= len(messages) or not isinstance(messages[index].get("content"), str):
            raise NotSparse(f"Message {index} is no plain text of which parts could be kept.")
    marked = [m | {"content": f"\ue000kept{i}\ue001"} if i in parts else m for i, m in enumerate(messages)]
    literals = _MARK.split(render(marked))
    if [int(index) for index in literals[1::2]] != sorted(parts):
        raise NotSparse("The chat template does not show each of these messages once, in order.")
    dropped: list[Range] = []
    at = 0
    for index, before, after in zip(sorted(parts), literals[:-1:2], literals[2::2], strict=True):
        if not text.startswith(before, at):
            raise NotSparse("The chat template makes something else of the messages around these contents.")
        at += len(before)
        content = messages[index]["content"]
        for shown, cut in _as_shown(content):
            if text.startswith(shown + after, at):
                gaps = gaps_of(parts[index], len(content))
                inside = ((max(a - cut, 0) + at, min(b - cut, len(shown)) + at) for a, b in gaps)
                dropped += [gap for gap in inside if gap[0] < gap[1]]
                at += len(shown)
                break
        else:
            raise NotSparse(f"The chat template does not show message {index} as it is.")
    if text[at:] != literals[-1]:
        raise NotSparse("The chat template makes something else of the messages around these contents.")
    return dropped


def _as_shown(content: str) -> Iterable[tuple[str, int]]:
    """What templates make of a content, and how many of its first characters that lacks."""
    cut = len(content) - len(content.lstrip())
    return (content, 0), (content.strip(), cut), (content.rstrip(), 0), (content.lstrip(), cut)


def gaps_of(kept: Iterable[Range], length: int) -> list[Range]:
    """What of [0, ``length``) is in none of ``kept``, ascending; these may come in any order and overlap."""
    gaps: list[Range] = []
    at = 0
    for first, end in sorted(kept):
        if first > at:
            gaps.append((at, min(first, length)))
        at = max(at, end)
    gaps.append((at, length))
    return [(a, b) for a, b in gaps if a < b]


def kept_tokens(offsets: Sequence[Range], dropped: Sequence[Range]) -> list[int]:
    """Indices of the tokens that have a character outside ``dropped`` (ascending, apart).

    ``offsets`` are the tokens' characters as a fast tokenizer tells them. What no token claims (the space
    before a word) belongs to the token after it; a token of no characters (a BOS) is kept, unless it lies
    between dropped ones.
    """
    kept: list[int] = []
    claimed = gap = 0
    for index, (start, end) in enumerate(offsets):
        first, last = min(start, claimed), end
        claimed = max(claimed, end)
        while gap < len(dropped) and dropped[gap][1] < last:
            gap += 1
        if gap == len(dropped) or not _within(first, last, dropped[gap]):
            kept.append(index)
    return kept


def _within(first: int, last: int, gap: Range) -> bool:
    if first < last:
        return gap[0] <= first and last <= gap[1]
    return gap[0] < first < gap[1]
