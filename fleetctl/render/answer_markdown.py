"""Markdown as a terminal shows it: Rich's, in few colours, and without dropping any text."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import ClassVar

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement
from rich.padding import Padding
from rich.text import Text

_ITEM = "list_item_open"


class _LeftHeading(Heading):
    """Bold, at the left."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield Text.assemble(self.text, style="bold")


class _PlainCode(CodeBlock):
    """Indented, and cut only at the edge: a line of code is no line of words."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = Text(str(self.text).rstrip("\n"), style="cyan", overflow="fold", no_wrap=False)
        for line in code.split("\n", allow_blank=True):
            yield Padding(line, (0, 0, 0, 2))


class AnswerMarkdown(Markdown):
    """What a model wrote, for Rich."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": _LeftHeading,
        "fence": _PlainCode,
        "code_block": _PlainCode,
    }

    def __init__(self, text: str) -> None:
        super().__init__("", hyperlinks=False)
        self.markup = text
        parser = _parser()
        self.parsed = parser.parse(text)
        if any(each.nesting > 0 and each.level + 1 >= parser.options.maxNesting for each in self.parsed):
            # The parser drops what is nested deeper: all of it stays as it was written.
            self.parsed = MarkdownIt("zero").parse(text)
        for token in _all(self.parsed):
            if token.type == "softbreak":
                # Models break lines where they mean it.
                token.type = "hardbreak"


def complete_block(text: str) -> tuple[int, int]:
    """How many characters the first block or item of a list has, and the empty lines below it.

    (0, 0) until the next one has begun.
    """
    tokens = _parser().parse(text)
    blocks = [token.map[0] for token in tokens if token.map and token.level == 0]
    items = [token.map[0] for token in tokens if token.map and token.level == 1 and token.type == _ITEM]
    of_first = [at for at in items if len(blocks) < 2 or at < blocks[1]]
    if len(of_first) > 1:
        return _chars(text, of_first[1]), 0
    return (_chars(text, blocks[1]), 1) if len(blocks) > 1 else (0, 0)


def _chars(text: str, lines: int) -> int:
    return sum(len(line) for line in text.splitlines(keepends=True)[:lines])


@cache
def _parser() -> MarkdownIt:
    """Without what would drop text: HTML, images, escaped letters (a formula has many), entities."""
    parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
    return parser.disable(["image", "escape", "entity", "reference", "html_block", "html_inline"])


def _all(tokens: list[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from _all(token.children or [])
