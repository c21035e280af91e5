"""Long pastes at the prompt: a short mark on the screen stands for each until the line is sent. Pure."""

from __future__ import annotations

import re

# A paste that is longer is folded.
_LINES, _CHARS = 10, 1500
_MARK = re.compile(r"\[paste (\d+): [\d,]+ (?:lines|characters)\]")


class Pastes:
    """The long pastes of one conversation, by the number in their marks."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def fold(self, text: str) -> str:
        """What the prompt shows for a pasted text: the text itself if it is short."""
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        lines = text.count("\n") + (not text.endswith("\n"))
        if lines <= _LINES and len(text) <= _CHARS:
            return text
        self._texts.append(text)
        size = f"{lines:,} lines" if lines > 1 else f"{len(text):,} characters"
        return f"[paste {len(self._texts)}: {size}]"

    def unfold(self, line: str) -> str:
        """The line with every paste in place of its mark."""
        return _MARK.sub(lambda mark: self._text(int(mark[1])) or mark[0], line)

    def _text(self, number: int) -> str:
        return self._texts[number - 1] if 0 < number <= len(self._texts) else ""
