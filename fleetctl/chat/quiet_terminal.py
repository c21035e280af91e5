"""A terminal that shows nothing of what is typed while an answer streams, and keeps it for the next prompt.

Characters wait in the terminal's queue, unedited; Ctrl-C still interrupts, and does not empty the queue.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

# What arrows and the like send, a bracketed paste's marks, and Alt with a letter.
_SEQUENCES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|O.|.|$)", re.DOTALL)
_READ_BYTES = 65_536


@contextmanager
def quiet() -> Iterator[None]:
    """Until the end nothing that is typed is shown. Does nothing without a terminal in the foreground."""
    descriptor = _terminal()
    if descriptor is None:
        yield
        return
    before = termios.tcgetattr(descriptor)
    _silence(descriptor, before)

    def again(_number: int, _frame: FrameType | None) -> None:
        # The shell had the terminal while fleetctl was stopped by Ctrl-Z.
        with suppress(termios.error):
            _silence(descriptor, before)

    def ended(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    kept = {number: signal.signal(number, ended) for number in (signal.SIGTERM, signal.SIGHUP)}
    kept[signal.SIGCONT] = signal.signal(signal.SIGCONT, again)
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
        with suppress(termios.error):
            termios.tcsetattr(descriptor, termios.TCSANOW, before)


def typed() -> str:
    """What was typed and waits, as text for a prompt: without what arrows and the like send."""
    if not sys.stdin.isatty():
        return ""
    waiting = bytearray()
    descriptor = sys.stdin.fileno()
    while select.select([descriptor], [], [], 0)[0]:
        piece = os.read(descriptor, _READ_BYTES)
        if not piece:
            break
        waiting += piece
    return edited(waiting.decode("utf-8", "ignore"))


def edited(text: str) -> str:
    """Raw input as the text that it would have become: backspaces take a letter away."""
    kept: list[str] = []
    for letter in _SEQUENCES.sub("", text.replace("\r", "\n")):
        if letter in "\x7f\b":
            del kept[-1:]
        elif letter in "\n\t" or letter.isprintable():
            kept.append(letter)
    return "".join(kept)


def _terminal() -> int | None:
    """The terminal that answers are shown on and input comes from, if it is this program's now."""
    for stream in (sys.stdin, sys.stdout):
        with suppress(OSError, ValueError, AttributeError):
            descriptor = stream.fileno()
            if os.isatty(descriptor):
                # A program in the background would be stopped by a change of the terminal.
                return descriptor if os.tcgetpgrp(descriptor) == os.getpgrp() else None
    return None


def _silence(descriptor: int, before: list[Any]) -> None:
    modes = list(before)
    # Enter stays a carriage return, as the prompt expects it.
    modes[0] &= ~termios.ICRNL
    modes[3] &= ~(termios.ECHO | termios.ICANON)
    modes[3] |= termios.ISIG | termios.NOFLSH
    termios.tcsetattr(descriptor, termios.TCSANOW, modes)
