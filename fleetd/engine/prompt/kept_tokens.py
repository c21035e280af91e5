"""From the kept ranges of messages to the tokens that are kept, through template and tokenizer. Pure.

content [a, b) ──template──► text [x + a, x + b) ──the tokenizer's offsets──► tokens
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from fleetd.engine.prompt.contents import Message, find_contents

Range = tuple[int, int]


class NotSparse(Exception):
    """A Keep cannot be followed; ``str`` of it is the reason, for people."""


def dropped_of_messages(
    text: str,
    messages: Sequence[Message],
    parts: Mapping[int, Sequence[Range]],
    render: Callable[[list[Message]], str],
) -> list[Range]:
    """The ranges of ``text``, which is ``render(messages)``, that are to go: all of the contents of the
    messages in ``parts`` but their kept ranges. Raises NotShown if that cannot be told."""
    dropped: list[Range] = []
    for index, shown in find_contents(text, messages, parts, render, verbatim=True).items():
        gaps = gaps_of(parts[index], len(messages[index]["content"]))
        inside = ((shown.place(a), shown.place(b)) for a, b in gaps)
        dropped += [gap for gap in inside if gap[0] < gap[1]]
    return dropped


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
