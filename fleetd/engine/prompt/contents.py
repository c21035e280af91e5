"""Where the contents of messages lie in the text that a chat template makes of them, and where in its tokens
they end. Pure.

A template may trim what it is given, leave parts of it out or write it twice. So a message is not searched
for in the text: the template is rendered once more with marks in place of the contents, and only where these
contents put in place of the marks give the very text again do they lie there.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import msgspec

from fleetd import limits

Message = dict[str, Any]

_INSTRUCTIONS = frozenset({"system", "developer"})
# Characters of no language (private use); a text that has them all the same is not looked through.
_MARK = re.compile("\ue000content([0-9]+)\ue001")


class NotShown(Exception):
    """Contents cannot be found; ``str`` of it is the reason, for people."""


class ShownContent(msgspec.Struct, frozen=True):
    """A content in the text: all of it, or what a template's trimming leaves."""

    #: Characters [start, end) of the text.
    start: int
    end: int
    #: Characters at the beginning of the content that the text lacks.
    cut: int = 0

    def place(self, char: int) -> int:
        """The place in the text of a character of the content, or of the nearest one that is shown."""
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
        NotShown: the text does not tell.
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


def borders(
    text: str,
    messages: Sequence[Message],
    marks: Sequence[tuple[int, int]],
    offsets: Sequence[tuple[int, int]],
    render: Callable[[list[Message]], str],
) -> list[int]:
    """Numbers of tokens after which a later prompt may go on in another way, the most probable first: for
    models that keep states at few places of a prompt.

        system prompt and tools │ first message ... │ the last message │ what the template adds for the answer
                                ▲ new sessions      ▲ an edit of it    ▲ the next turn
                                  begin here          begins here        goes on here

    The end of the last message, the client's marks from the last to the first, the last whole block of what
    comes before the first message, the beginning of the last message, and the last whole block before that.
    Each lies a token before the border itself. They are in no order of place, may be 0 and may repeat.

    Args:
        text: ``render(messages)``.
        marks: (message, characters of its content) after which the client expects other requests to go on.
        offsets: each token's characters of ``text``.

    Raises:
        NotShown: the template does not show where these contents are.
    """
    if not messages:
        return []
    last = len(messages) - 1
    first = next((i for i, message in enumerate(messages) if message.get("role") not in _INSTRUCTIONS), last)
    contents = [message.get("content") for message in messages]
    lengths = [len(content) if isinstance(content, str) else 0 for content in contents]
    known = [(i, chars) for i, chars in marks if i <= last and 0 < chars <= lengths[i]]
    shown = find_contents(text, messages, {first, last, *(i for i, _ in known)}, render, verbatim=False)
    ends = [end for _, end in offsets]

    def tokens(char: int) -> int:
        # The last token before the border may be another one where other text follows.
        return max(0, bisect_right(ends, char) - 1)

    def whole_blocks(char: int) -> int:
        # Only at the end of a block can a state be written to the disk, for requests after a restart.
        return tokens(char) // limits.CHECKPOINT_BLOCK_TOKENS * limits.CHECKPOINT_BLOCK_TOKENS

    return [
        tokens(shown[last].end),
        *(tokens(shown[i].place(chars)) for i, chars in reversed(known)),
        whole_blocks(shown[first].start),
        tokens(shown[last].start),
        whole_blocks(shown[last].start),
    ]
