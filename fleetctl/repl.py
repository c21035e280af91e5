"""A conversation on a terminal: line editing and history by prompt_toolkit, answers by fleetctl.answer.

Ctrl-C while an answer streams stops the answer and keeps what was said; at the prompt it clears the line.
Ctrl-D on an empty line leaves.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import click
import platformdirs
from prompt_toolkit import PromptSession
from prompt_toolkit.formatted_text import ANSI
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output

from fleetctl.answer import Options, ask, closing
from fleetctl.cli import note, show_error
from fleetctl.client import Client
from fleetctl.exits import Exit
from fleetctl.render.text import one_line
from fleetctl.replies import read
from fleetd.control.daemon_status import DaemonStatus
from fleetd.errors import FleetError

HELP = """\
/model [NAME]    show or change the model
/system [TEXT]   show or change the system message (/system - removes it)
/new             forget the conversation (also /clear)
/stats           switch the closing line with times and speeds on or off
/quit            leave (also Ctrl-D)
Enter sends; Alt-Enter or a backslash at the end of the line starts a new line; pasted text keeps its lines.
Ctrl-C stops an answer; at the prompt it clears the line."""

# Only a word of letters is a command, so that "/etc/fstab means what?" is a question.
_COMMAND = re.compile(r"/([a-z?]+)(?:\s+(.*))?", re.DOTALL)


def converse(client: Client, options: Options, system: str, *, stats: bool) -> int:
    """Talk until the user leaves. A missing daemon ends it at once; later failures only end an answer."""
    status = read(client.get("/fleet/v1/status"), DaemonStatus)
    if not options.model:
        options = replace(options, model=status.default_model)
    model = options.model or "the default model"
    note(click.style(f"{one_line(model)} · /help lists the commands, Ctrl-D leaves", dim=True))
    talk = Talk(client, options, system, stats=stats)
    session = editor()
    while True:
        try:
            line = session.prompt(ANSI("\x1b[1m>\x1b[0m "))
            if line.strip() and not talk.take(line):
                break
        except EOFError:
            break
        except KeyboardInterrupt:
            # A second Ctrl-C, while the first one was being handled.
            continue
    return Exit.OK


class Talk:
    """The conversation so far, and what a typed line does to it."""

    def __init__(self, client: Client, options: Options, system: str, *, stats: bool) -> None:
        self.client = client
        self.options = options
        self.system = system
        self.stats = stats
        self.turns: list[dict[str, str]] = []

    def take(self, line: str) -> bool:
        """Act on one line; False ends the conversation."""
        if found := _COMMAND.fullmatch(line.strip()):
            return self._command(found[1], (found[2] or "").strip())
        self._say(line)
        return True

    def _say(self, text: str) -> None:
        asked = [*self.turns, {"role": "user", "content": text}]
        system = [{"role": "system", "content": self.system}] if self.system else []
        try:
            answer = ask(self.client, self.options, [*system, *asked])
        except FleetError as error:
            # The turn is not kept: the next question would otherwise follow one that was never answered.
            show_error(error)
            return
        if answer.stopped:
            note(click.style("(stopped)", dim=True))
        if answer.content or not answer.stopped:
            self.turns = [*asked, {"role": "assistant", "content": answer.content}]
        if self.stats and not answer.stopped:
            closing(answer)

    def _command(self, name: str, rest: str) -> bool:
        match name:
            case "quit" | "exit":
                return False
            case "help" | "?":
                note(HELP)
            case "new" | "clear":
                self.turns = []
                note("The conversation starts anew.")
            case "model":
                if rest:
                    self._change_model(rest)
                note(f"model: {one_line(self.options.model)}")
            case "system":
                if rest:
                    self.system = "" if rest == "-" else rest
                note(f"system message: {self.system or '(none)'}")
            case "stats":
                self.stats = not self.stats
                note(f"closing line: {'on' if self.stats else 'off'}")
            case _:
                note(f"There is no command /{name}; /help lists them.")
        return True

    def _change_model(self, name: str) -> None:
        """Talk with another model; a name that no machine has a model of is told, and changes nothing."""
        try:
            self.client.get(f"/v1/models/{quote(name, safe='')}")
        except FleetError as error:
            show_error(error)
        else:
            self.options = replace(self.options, model=name)


def editor() -> PromptSession[str]:
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
    @keys.add("escape", "c-j")  # the same, typed ahead while an answer streamed
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    @keys.add("c-c")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.reset()

    # With stdout in a file the prompt still belongs on the screen.
    output = create_output(stdout=sys.stdout if sys.stdout.isatty() else sys.stderr)
    return PromptSession(
        history=history(Path(platformdirs.user_state_dir("fleetctl", appauthor=False)) / "chat-history"),
        key_bindings=keys,
        multiline=True,
        prompt_continuation="  ",
        output=output,
    )


def history(path: Path) -> History:
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
    return FileHistory(str(path))
