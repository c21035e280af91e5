"""What of a prompt is kept whatever the scores say.

system prompt but for its context · examples · the last user turn, or what asks in it · head and tail · what
the user marked · control tokens of a chat template in a text prompt. Tools, tool calls and names are no part
of a document: they are never touched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from fleetd.compression.document import Block, Document
from fleetd.compression.words import Range, estimate_tokens, merged

# Models lean on the first tokens whatever they say, and go on from the last ones: an answer of one token is
# what a lost tail looks like. Shares of the budget, so that a small one is not spent on them alone.
_HEAD_SHARE, _HEAD_CHARS = 0.06, (16, 1024)
_TAIL_SHARE, _TAIL_CHARS = 0.12, (48, 2048)
_CHARS_PER_TOKEN = 4

# Examples are short, alternate, and stand between the system prompt and the talk itself.
_EXAMPLE_TOKENS, _EXAMPLES = 128, 16
# Of the prompt, and of the budget.
_EXAMPLES_SHARE, _EXAMPLES_BUDGET = 0.1, 0.5
_CONTROL = re.compile(
    r"<\|[\w-]{1,32}\|>[^\n<]{0,32}\n?|</?s>|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>\w*\n?"
)


def pins(document: Document, budget_tokens: float) -> list[Range]:
    """Ranges of the document's text that are always kept: sorted, disjoint, possibly more than the budget."""
    return merged([*_always(document, budget_tokens), *_ends(document, budget_tokens)])


def _always(document: Document, budget_tokens: float) -> Iterator[Range]:
    yield from document.questions
    last_user = max((i for i, block in enumerate(document.blocks) if block.role == "user"), default=-1)
    examples = _examples(document, last_user, budget_tokens)
    for i, block in enumerate(document.blocks):
        if block.example or i in examples:
            yield document.flat(i, (0, len(block.text)))
        for span in block.instructions:
            yield document.flat(i, span)
        for span in block.marked:
            yield document.flat(i, span)
        if block.role == "text":
            for match in _CONTROL.finditer(block.text):
                yield document.flat(i, match.span())


def _examples(document: Document, last_user: int, budget_tokens: float) -> set[int]:
    """Blocks of short exchanges right behind the system prompt, if something longer follows them."""
    found: list[int] = []
    blocks = document.blocks
    first = next((i for i, block in enumerate(blocks) if block.role not in ("system", "developer")), 0)
    for i in range(first, min(last_user, len(blocks) - 1), 2):
        pair = blocks[i : i + 2]
        if [block.role for block in pair] != ["user", "assistant"] or not all(map(_short, pair)):
            break
        found += (i, i + 1)
    following = blocks[found[-1] + 1 :] if found else ()
    # Else it is the talk itself, in short turns.
    if len(found) > _EXAMPLES or all(map(_short, following[:2])):
        return set()
    tokens = sum(estimate_tokens(blocks[i].text) for i in found)
    most = min(_EXAMPLES_SHARE * document.estimated_tokens, _EXAMPLES_BUDGET * budget_tokens)
    return set(found) if tokens <= most else set()


def _short(block: Block) -> bool:
    return 0 < estimate_tokens(block.text) <= _EXAMPLE_TOKENS


def _ends(document: Document, budget_tokens: float) -> Iterator[Range]:
    """The first and the last characters outside the system prompt."""
    size = len(document.text)
    first = next((i for i, b in enumerate(document.blocks) if b.role not in ("system", "developer")), 0)
    start = document.starts[first] if document.starts else 0
    head = _chars(budget_tokens * _HEAD_SHARE, _HEAD_CHARS)
    tail = _chars(budget_tokens * _TAIL_SHARE, _TAIL_CHARS)
    yield start, min(start + head, size)
    yield max(start, size - tail), size


def _chars(tokens: float, bounds: tuple[int, int]) -> int:
    return min(max(int(tokens * _CHARS_PER_TOKEN), bounds[0]), bounds[1])
