"""A prompt as selection sees it: one block of text per message, and which characters of them ask.

    messages[i].content ──► blocks[i]          text: blocks joined by line feeds, what a scorer reads
    <fleet:keep>…</fleet:keep> ──► marked      the markers themselves are in no block

What a message has beside its content (tool calls, names, reasoning) and the list of tools are no candidates:
they stay as they are.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fleetd.compression.gate_signs import count_signs
from fleetd.compression.words import PARAGRAPH_END, Range, estimate_tokens, lines, merged, sentences

# Text between these is always kept; models never see them. One alone on its line takes the line with it.
_MARK = re.compile(r"(?m)^[ \t]*</?fleet:keep>[ \t]*\n|</?fleet:keep>")
# What stands between such tags in a system prompt is material, put there by a program that looked it up. They
# begin and end lines: a sentence only names them ("answer from what is in <context> tags"), and instructions
# follow.
_CONTEXT = re.compile(
    r"^[ \t]*<(context|documents|sources)>((?:(?!</?\1>).)*)</\1>[ \t\r]*$",
    re.DOTALL | re.IGNORECASE | re.MULTILINE,
)
# Only a client says what is to be kept: in a tool's result, or an answer, markers are text like any other.
_INSTRUCTING = ("system", "developer")
_MARKING = ("text", "user", "system", "developer")

# A last user turn over both of these is what is asked about, not the question: pasted with it.
_BLOB_TOKENS, _BLOB_SHARE = 256, 0.2
# What is taken for the question at either end of such a turn, in characters.
_HEAD_CHARS, _TAIL_CHARS = 240, 480
_FENCE_LINE = re.compile(r"[ \t]*(?:```|~~~)")
# Signs per token that show that a short text asks for something; texts themselves have fewer.
_SIGNS = 0.05
# So does how a sentence begins, or a question mark or what stands for it at the very end.
_ASKS = re.compile(
    r"[\s\"'(*_#>-]*(?:please|question|(?:your )?task|instructions?|query|answer|find|list|tell|give|name"
    r"|what|which|who|when|where|why|how|explain|describe|summari[sz]e|count|compare|translate|rewrite|quote|extract|identify"
    r"|return|write|use|using|read|based on|according to|given|frage|aufgabe|bitte|nenne|pregunta|domanda"
    r"|wer|wann|wo|warum|welche[rnms]?|erklär\w*|sag|such\w*|quand|où|comment|pourquoi|combien|quel(?:le)?s?"
    r"|expliqu\w*|dis|cherche|quién(?:es)?|qué|cuándo|dónde|cómo|cuál(?:es)?|cuánt\w+|expl[ií]ca\w*|dime)\b"
    r"|.{0,20}(?:是不是|有没有|能不能|是否)",
    re.IGNORECASE,
)
_QUESTION_MARKS = ("?", "\uff1f", "吗", "呢")
# A text that is pasted behind a question ends like a text, whatever signs its last lines have. They are a
# task beside the question if a sentence in them begins as a task does and they are this short, in tokens, or
# if they have this many signs per token. People break no lines at a margin, and write no rows of tables.
_TASK_TOKENS, _TASK_SIGNS = 32, 0.12
_PROSE = re.compile(r"\||(?:.{60,130}\n)+.+")
_HEADING = re.compile(r"#{1,6} [^\n]*")


class Block(msgspec.Struct, frozen=True):
    """One message's content, or a whole text prompt (``role`` "text"). ``marked``: what the user wants kept.

    ``example``: said to be part of an example, by its name. ``context``: what of a system prompt is material.
    """

    text: str
    role: str = "text"
    marked: tuple[Range, ...] = ()
    example: bool = False
    context: tuple[Range, ...] = ()

    @property
    def instructions(self) -> list[Range]:
        """What a system prompt says: all of it but its ``context``. None of another message."""
        if self.role not in _INSTRUCTING:
            return []
        edges = [0, *(edge for span in self.context for edge in span), len(self.text)]
        return [(first, last) for first, last in zip(edges[::2], edges[1::2], strict=True) if first < last]


@dataclass(frozen=True, slots=True)
class Document:
    """A prompt as blocks of text. ``questions``: ranges of ``text`` that ask; ``starts``: where its
    blocks begin.
    """

    blocks: tuple[Block, ...]
    questions: tuple[Range, ...] = ()
    text: str = field(init=False, repr=False)
    starts: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        at, starts = 0, []
        for block in self.blocks:
            starts.append(at)
            at += len(block.text) + 1
        object.__setattr__(self, "text", "\n".join(block.text for block in self.blocks))
        object.__setattr__(self, "starts", tuple(starts))

    @classmethod
    def of_messages(cls, messages: Sequence[Mapping[str, Any]], *, system_context: bool = False) -> Document:
        """``messages`` as chat templates read them. Content that is not one string becomes an empty block.

        Args:
            system_context: long system prompts are material, but for what they say at their ends.
        """
        blocks = tuple(_block(message) for message in messages)
        if system_context:
            blocks = tuple(map(_as_context, blocks))
        document = cls(blocks)
        users = [i for i, block in enumerate(blocks) if block.role == "user"]
        for i in reversed(users):
            asking = _asking(blocks[i].text, document.text)
            if asking:
                return cls(blocks, tuple(document.flat(i, span) for span in asking))
        # A user who pastes a text and adds nothing has said in an earlier message what is to be done with it.
        for i, block in enumerate(blocks) if users else ():
            whole = (0, len(block.text))
            short = estimate_tokens(block.text) <= _BLOB_TOKENS
            if block.role in _INSTRUCTING and short and _asks(block.text, whole):
                return cls(blocks, (document.flat(i, whole),))
        return document

    @classmethod
    def of_text(cls, text: str, *, asks: bool = True) -> Document:
        """The document of a /v1/completions prompt, whose question is at its head or at its end; False for
        ``asks``: it has none, whatever it looks like."""
        clean, marked = unmark(text)
        return cls((Block(clean, marked=marked),), tuple(question_ranges(clean)) if asks else ())

    @property
    def question(self) -> str:
        return "\n".join(self.text[start:end] for start, end in self.questions)

    @property
    def tasks(self) -> list[str]:
        """What states a task, each part by itself; of a long turn both ends, as its middle is pasted."""
        found = []
        for start, end in self.questions:
            said = self.text[start:end]
            ends = [(0, len(said))] if estimate_tokens(said) <= _BLOB_TOKENS else question_ranges(said)
            found += [said[a:b] for a, b in ends]
        return found

    @property
    def material(self) -> str:
        """The text without what asks and without what a system prompt says."""
        found, at = [], 0
        apart = [self.flat(i, span) for i, block in enumerate(self.blocks) for span in block.instructions]
        for start, end in merged([*self.questions, *apart]):
            found.append(self.text[at:start])
            at = end
        return "\n".join([*found, self.text[at:]])

    @property
    def estimated_tokens(self) -> int:
        return estimate_tokens(self.text)

    def block_at(self, at: int) -> int:
        """Index of the block that a character of ``text`` is in, its final line feed included."""
        return max(0, bisect_right(self.starts, at) - 1)

    def flat(self, block: int, span: Range) -> Range:
        """A range of a block's text as a range of ``text``."""
        start = self.starts[block]
        return start + span[0], start + span[1]


def unmark(text: str) -> tuple[str, tuple[Range, ...]]:
    """``text`` without markers, and the ranges that stood between them.

    A marker that is not closed holds to the end; one that was not opened means nothing.
    """
    pieces, marked, at, length, opened = [], [], 0, 0, -1
    for match in _MARK.finditer(text):
        pieces.append(text[at : match.start()])
        length += match.start() - at
        at = match.end()
        closing = "/" in match.group()
        if closing and opened >= 0:
            marked.append((opened, length))
            opened = -1
        elif not closing and opened < 0:
            opened = length
    pieces.append(text[at:])
    length += len(text) - at
    if opened >= 0:
        marked.append((opened, length))
    return "".join(pieces), tuple(merged(marked))


def unmarked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages without keep markers: what the model reads if nothing is dropped."""
    return [
        {**message, "content": block.text} if isinstance(message.get("content"), str) else dict(message)
        for message, block in ((message, _block(message)) for message in messages)
    ]


def is_blob(turn: str, text: str) -> bool:
    """Whether a last user turn is itself the long text of a prompt."""
    tokens = estimate_tokens(turn)
    return tokens > _BLOB_TOKENS and tokens > _BLOB_SHARE * estimate_tokens(text)


def question_ranges(text: str) -> list[Range]:
    """The parts of a long text that ask: at its end, at its head, or both.

    People put the question behind what they paste, or in front of it. None where neither end looks like one.
    """
    stripped = len(text.rstrip())
    if not stripped:
        return []
    head, tail = _head(text, stripped), _tail(text, stripped)
    if head[1] >= tail[0]:
        return [(head[0], stripped)]
    asking = [part for part in (head, tail) if _asks(text, part)]
    # A text may begin with "Please write soon"; an instruction stands by itself.
    if len(asking) == 2 and not PARAGRAPH_END.match(text, head[1]):
        return [tail]
    if len(asking) == 2 and _is_question(text, head) and not _is_task(text, tail):
        return [head]
    if len(asking) == 2 and _is_question(text, tail) and _HEADING.fullmatch(text, *head):
        return [tail]
    return asking


def _head(text: str, end: int) -> Range:
    """The first paragraph if it is short, else the first sentence."""
    first = len(text) - len(text.lstrip())
    gap = PARAGRAPH_END.search(text, first, end)
    stop = gap.start() if gap else end
    if stop - first > _HEAD_CHARS:
        stop = min(sentences(text, first, stop)[0][1], first + _HEAD_CHARS)
    return first, stop


def _tail(text: str, end: int) -> Range:
    """The last paragraph if it is short, else the last sentences."""
    gaps = [match.end() for match in PARAGRAPH_END.finditer(text, max(0, end - 2 * _TAIL_CHARS), end)]
    start = gaps[-1] if gaps else 0
    if end - start <= _TAIL_CHARS:
        return start, end
    at = end
    for first, _ in reversed(sentences(text, max(start, end - 2 * _TAIL_CHARS), end)):
        if at < end and end - first > _HEAD_CHARS:
            break
        at = first
    return max(at, end - _TAIL_CHARS), end


def _asking(turn: str, text: str) -> list[Range]:
    """The parts of a user's turn that ask: all of a short one."""
    if is_blob(turn, text):
        return question_ranges(turn)
    return [(0, len(turn))] if turn.strip() else []


def _asks(text: str, part: Range) -> bool:
    found = [text[a:b] for a, b in lines(text, *part)]
    if any(_FENCE_LINE.match(line) for line in found):
        return False
    said = text[slice(*part)].strip()
    if said.endswith(_QUESTION_MARKS) or any(
        _ASKS.match(text[a:b].strip()) for a, b in sentences(text, *part)
    ):
        return True
    signs = count_signs(said, text[: part[0]] + text[part[1] :])
    return sum(signs.counts.values()) > _SIGNS * estimate_tokens(said)


def _is_question(text: str, part: Range) -> bool:
    return text[slice(*part)].rstrip().endswith(_QUESTION_MARKS)


def _is_task(text: str, part: Range) -> bool:
    """Whether a part that asks would do so beside a question too: a text's last lines seldom would."""
    said = text[slice(*part)].strip()
    if said.endswith(_QUESTION_MARKS):
        return True
    signs = count_signs(said, text[: part[0]] + text[part[1] :])
    tokens = estimate_tokens(said)
    if tokens <= _TASK_TOKENS and any(_ASKS.match(text[a:b].strip()) for a, b in sentences(text, *part)):
        return not said.startswith("|")
    return not _PROSE.match(said) and sum(signs.counts.values()) + signs.own > _TASK_SIGNS * tokens


def _block(message: Mapping[str, Any]) -> Block:
    content, name = message.get("content"), message.get("name")
    role = str(message.get("role", "user"))
    text = content if isinstance(content, str) else ""
    text, marked = unmark(text) if role in _MARKING else (text, ())
    example = isinstance(name, str) and name.startswith("example")
    found = _CONTEXT.finditer(text) if role in _INSTRUCTING else ()
    return Block(text, role, marked, example, tuple(match.span(2) for match in found))


def _as_context(block: Block) -> Block:
    """A long system prompt that marks no context as one whose middle is context."""
    if block.role not in _INSTRUCTING or block.context or estimate_tokens(block.text) <= _BLOB_TOKENS:
        return block
    end = len(block.text.rstrip())
    middle = _head(block.text, end)[1], _tail(block.text, end)[0]
    return msgspec.structs.replace(block, context=(middle,)) if middle[0] < middle[1] else block
