"""Where in a chat's tokens its messages end, for models that keep states at few places of a prompt.

system prompt and tools │ first message ... │ the last message │ what the template adds for the answer
                        ▲ new sessions      ▲ an edit of it    ▲ the next turn
                          begin here          begins here        goes on here
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from fleetd import limits
from fleetd.engine.prompt.shown_contents import Message, find_contents

_INSTRUCTIONS = frozenset({"system", "developer"})


def borders(
    text: str,
    messages: Sequence[Message],
    marks: Sequence[tuple[int, int]],
    offsets: Sequence[tuple[int, int]],
    render: Callable[[list[Message]], str],
) -> list[int]:
    """Numbers of tokens after which a later prompt may go on in another way, the most probable first.

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
