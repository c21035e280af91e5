"""A conversation on a terminal: line editing and history by prompt_toolkit, answers by conversation.py.

Ctrl-C while an answer streams stops the answer and keeps what was said, and what was typed meanwhile; at the
prompt it clears the line. Ctrl-D on an empty line leaves.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import click
import platformdirs
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import ANSI
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import create_output

from fleetctl import completion
from fleetctl.chat import quiet_terminal
from fleetctl.chat.answer import Options
from fleetctl.chat.conversation import COMMANDS, Talk
from fleetctl.chat.pastes import Pastes
from fleetctl.cli import note
from fleetctl.connection.client import Client
from fleetctl.connection.replies import read
from fleetctl.exits import Exit
from fleetctl.render import live_text
from fleetctl.render.text import one_line
from fleetd.control.daemon_status import DaemonStatus

# Tab waits so long for the names of models, in seconds.
_NAMES_S = 1.0
_WITH_PATHS = ("/file ", "/save ")


def converse(client: Client, options: Options, system: str, *, stats: bool, plain: bool) -> int:
    """Talk until the user leaves. A missing daemon ends it at once; later failures only end an answer."""
    status = read(client.get("/fleet/v1/status"), DaemonStatus)
    if not options.model:
        options = replace(options, model=status.default_model)
    model = options.model or "the default model"
    note(click.style(f"{one_line(model)} · /help lists the commands, Ctrl-D leaves", dim=True))
    talk = Talk(client, options, system, stats=stats, plain=plain)
    pastes = Pastes()
    session = editor(pastes, CommandCompleter(lambda: completion.model_names(client, _NAMES_S)))
    # Rich takes a tenth of a second, which passes while the first question is typed.
    threading.Thread(target=live_text.load, daemon=True).start()
    draft = ""
    # All the while, so that nothing is shown between an answer and the next prompt either.
    with quiet_terminal.quiet():
        while True:
            try:
                line = pastes.unfold(session.prompt(ANSI("\x1b[1m>\x1b[0m "), default=draft))
                draft = ""
                if line.strip() and not talk.take(line):
                    break
                if talk.stopped:
                    # Lines that were already sent become text again: who stops an answer looks first.
                    draft = quiet_terminal.typed()
            except EOFError:
                break
            except KeyboardInterrupt:
                # A second Ctrl-C, while the first one was being handled.
                continue
    return Exit.OK


class CommandCompleter(Completer):
    """Commands, and what may follow them. ``models`` is asked once, at the first Tab that needs them."""

    def __init__(self, models: Callable[[], list[str]]) -> None:
        self._models = models
        self._names: list[str] = []
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        line = document.text_before_cursor
        command, space, rest = line.partition(" ")
        if not line.startswith("/") or "\n" in line:
            return
        if not space:
            for name in [*COMMANDS, "help"]:
                if name.startswith(command[1:]):
                    yield Completion(f"/{name}", -len(command))
        elif command == "/model":
            self._names = self._names or self._models()
            for name in self._names:
                if name.startswith(rest) and name.isprintable():
                    yield Completion(name, -len(rest))
        elif line.startswith(_WITH_PATHS):
            yield from self._paths.get_completions(Document(rest, len(rest)), complete_event)


def editor(pastes: Pastes, completer: Completer) -> PromptSession[str]:
    """The line editor: Enter sends, Alt-Enter and a trailing backslash break the line, Ctrl-C clears."""
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.is_cursor_at_the_end and buffer.text.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    @keys.add("c-c")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.reset()

    @keys.add(Keys.BracketedPaste)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text(pastes.fold(event.data))

    # With stdout in a file the prompt still belongs on the screen.
    output = create_output(stdout=sys.stdout if sys.stdout.isatty() else sys.stderr)
    folder = Path(platformdirs.user_state_dir("fleetctl", appauthor=False))
    return PromptSession(
        history=history(folder / "chat-history", pastes),
        key_bindings=keys,
        multiline=True,
        prompt_continuation="  ",
        completer=completer,
        complete_while_typing=False,
        output=output,
    )


class UnfoldedHistory(FileHistory):
    """Keeps lines as they were sent: the marks of pastes mean nothing in another conversation."""

    def __init__(self, file: str, pastes: Pastes) -> None:
        super().__init__(file)
        self._pastes = pastes

    def store_string(self, string: str) -> None:
        super().store_string(self._pastes.unfold(string))


def history(path: Path, pastes: Pastes) -> History:
    """Lines of earlier conversations, in a file that only this user reads; in memory where that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)
    except OSError as error:
        note(f"history is not kept: {error.strerror}: {path}")
        return InMemoryHistory()
    return UnfoldedHistory(str(path), pastes)
