"""A page that repaints itself on the terminal until q or Ctrl-C, and leaves the terminal as it was."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Callable
from types import FrameType

from prompt_toolkit.application import Application
from prompt_toolkit.formatted_text import ANSI
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.layout import Layout, Window
from prompt_toolkit.layout.controls import FormattedTextControl

REPAINT_S = 0.5


class _Page:
    """The lines of the page, and the number of the first visible one."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.top = 0

    def shown(self, rows: int) -> str:
        """The visible lines, above a line that lists the keys."""
        room = max(1, rows - 1)
        self.top = max(0, min(self.top, len(self.lines) - room))
        visible = self.lines[self.top : self.top + room]
        below = len(self.lines) - self.top - len(visible)
        keys = "q quits" + (f" · ↓ {below} more lines" if below else "") + (" · ↑" if self.top else "")
        return "\n".join([*visible, *[""] * (room - len(visible)), f"\x1b[2m{keys}\x1b[0m"])


def watch(draw: Callable[[int], str]) -> int:
    """Show ``draw(columns)`` until the user leaves; returns the exit code.

    ``draw`` runs in a thread and may block.
    """
    page = _Page()
    stop = threading.Event()
    control = FormattedTextControl(lambda: ANSI(page.shown(app.output.get_size().rows)))
    app: Application[int] = Application(
        layout=Layout(Window(control, wrap_lines=False, always_hide_cursor=True)),
        key_bindings=_keys(page),
        full_screen=True,
    )

    def refresh() -> None:
        try:
            while not stop.is_set():
                page.lines = draw(shutil.get_terminal_size().columns).split("\n")
                app.invalidate()
                stop.wait(REPAINT_S)
        except Exception as error:  # the thread's boundary: unseen, the page would just stand still
            if app.loop is not None:
                app.loop.call_soon_threadsafe(leave, error)

    def leave(error: Exception) -> None:
        if app.is_running and not app.is_done:
            app.exit(exception=error)

    def end(number: int, _frame: FrameType | None) -> None:
        # The exit code by the shell's rule. Without this handler the terminal would stay on the other screen.
        if app.is_running and not app.is_done:
            app.exit(result=128 + number)

    handlers = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    # A daemon thread: it may block on a daemon that does not answer, and leaving must not wait for it.
    thread = threading.Thread(target=refresh, name="live", daemon=True)
    try:
        return app.run(pre_run=thread.start)
    finally:
        stop.set()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _keys(page: _Page) -> KeyBindings:
    keys = KeyBindings()

    @keys.add("q")
    @keys.add("Q")
    @keys.add("c-c")
    @keys.add("c-d")
    def _(event: KeyPressEvent) -> None:
        event.app.exit(result=0)

    @keys.add("c-z")
    def _(event: KeyPressEvent) -> None:
        event.app.suspend_to_background()

    for names, step in (
        (("up", "k"), -1),
        (("down", "j"), 1),
        (("pageup",), -20),
        (("pagedown", "space"), 20),
    ):
        for name in names:

            @keys.add(name)
            def _(event: KeyPressEvent, step: int = step) -> None:
                page.top += step

    return keys
