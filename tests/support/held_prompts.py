"""Prompts whose tokenization a test holds: a text that names a pipe is not read before the pipe is closed.

Only programs that the tests fork have this.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

_NAMED = re.compile(r"held by (\S+) until")


class HeldPrompt:
    """A pipe that holds the prompts whose text has ``words``. All methods block."""

    def __init__(self, folder: Path) -> None:
        self._pipe = folder / "held"
        os.mkfifo(self._pipe)
        self.words = f"held by {self._pipe} until"

    def wait(self) -> Any:
        """Wait until such a prompt is being tokenized; it goes on once the result is closed."""
        return self._pipe.open("wb")


def install() -> None:
    """Called in the process that all programs are forked from."""
    from fleetd.engine.prompt import prompt_encoding

    usual = prompt_encoding._encoded

    def encoded(tokenizer: Any, text: str, **options: Any) -> Any:
        if (named := _NAMED.search(text)) is not None:
            Path(named[1]).read_bytes()
        return usual(tokenizer, text, **options)

    prompt_encoding._encoded = encoded
