"""A conversation: what was said so far, and what a typed line, a command or a question, does to it."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import click

from fleetctl import completion
from fleetctl.chat.answer import Options, ask, closing
from fleetctl.cli import note, show_error
from fleetctl.connection.client import Client
from fleetctl.render.text import count, one_line
from fleetctl.text_files import composed, read_text
from fleetd import limits
from fleetd.errors import FleetError

# Command → what follows it, and what it does. The order is that of /help.
COMMANDS = {
    "model": ("[NAME]", "show or change the model"),
    "models": ("", "list the models that can be asked"),
    "system": ("[TEXT]", "show or change the system message (- for none)"),
    "file": ("[PATH]", "ask the next question about a file (- for none)"),
    "local": ("[on|off]", "keep prompts on this machine"),
    "smart": ("[on|off|SHARE]", "let a small model leave out what does not matter"),
    "retry": ("", "ask the last question again"),
    "save": ("[PATH]", "write the conversation to a file"),
    "new": ("", "forget the conversation (also /clear)"),
    "stats": ("", "switch the closing line with times and speeds on or off"),
    "quit": ("", "leave (also Ctrl-D)"),
}
_ALIASES = {"exit": "quit", "clear": "new", "?": "help"}
_KEYS = """\
Enter sends; Alt-Enter or a backslash at the end of the line starts a new line; pasted text keeps its lines.
Tab completes commands, models and paths. Ctrl-C stops an answer; at the prompt it clears the line."""

# Only a word of letters is a command, so that "/etc/fstab means what?" is a question.
_COMMAND = re.compile(r"/([a-z?]+)(?:\s+(.*))?", re.DOTALL)
_PRIVATE = 0o600


class Talk:
    """The conversation so far. ``stopped``: the last answer was interrupted."""

    def __init__(
        self, client: Client, options: Options, system: str, *, stats: bool, plain: bool = False
    ) -> None:
        self.client = client
        self.options = options
        self.system = system
        self.stats = stats
        self.plain = plain
        self.turns: list[dict[str, str]] = []
        self.stopped = False
        # A file's name and text, for the next question.
        self._file: tuple[str, str] | None = None
        self._saved: Path | None = None

    def take(self, line: str) -> bool:
        """Act on one line; False ends the conversation."""
        self.stopped = False
        found = _COMMAND.fullmatch(line.strip())
        if found is None:
            self._say(line)
            return True
        name = _ALIASES.get(found[1], found[1])
        if name == "quit":
            return False
        self._command(name, (found[2] or "").strip())
        return True

    def _say(self, text: str) -> None:
        if self._file is not None:
            text, self._file = composed(text, self._file[1]) or text, None
        asked = [*self.turns, {"role": "user", "content": text}]
        system = [{"role": "system", "content": self.system}] if self.system else []
        try:
            answer = ask(self.client, self.options, [*system, *asked], plain=self.plain)
        except FleetError as error:
            # The turn is not kept: the next question would otherwise follow one that was never answered.
            show_error(error)
            return
        self.stopped = answer.stopped
        if answer.stopped:
            note(click.style("(stopped)", dim=True))
        if answer.content or not answer.stopped:
            self.turns = [*asked, {"role": "assistant", "content": answer.content}]
        if self.stats and not answer.stopped:
            closing(answer)

    # ---- commands ----------------------------------------------------------------------------------------

    def _command(self, name: str, rest: str) -> None:
        does: dict[str, Callable[[str], None]] = {
            "help": self._help,
            "model": self._model,
            "models": self._models,
            "system": self._system,
            "file": self._attach,
            "local": self._local,
            "smart": self._smart,
            "retry": self._retry,
            "save": self._save,
            "new": self._new,
            "stats": self._stats,
        }
        if name in does:
            does[name](rest)
            return
        near = difflib.get_close_matches(name, [*does, "quit"], n=1)
        maybe = f" Did you mean /{near[0]}?" if near else ""
        note(f"There is no command /{name}.{maybe} /help lists them.")

    def _help(self, _rest: str) -> None:
        rows = [(f"/{name} {form}".rstrip(), what) for name, (form, what) in COMMANDS.items()]
        width = max(len(form) for form, _ in rows)
        note("\n".join([*(f"{form:<{width}}  {what}" for form, what in rows), _KEYS]))

    def _model(self, name: str) -> None:
        """Talk with another model; a name that no machine has a model of is told, and changes nothing."""
        if name:
            try:
                self.client.get(f"/v1/models/{quote(name, safe='')}")
            except FleetError as error:
                show_error(error)
            else:
                self.options = replace(self.options, model=name)
        note(f"model: {one_line(self.options.model)}")

    def _models(self, _rest: str) -> None:
        names = completion.model_names(self.client, limits.CLIENT_CALL_S)
        if not names:
            note("No model can be asked now; `fleetctl models` says why.")
        for name in names:
            note(f"{'*' if name == self.options.model else ' '} {one_line(name)}")

    def _system(self, text: str) -> None:
        if text:
            self.system = "" if text == "-" else text
        note(f"system message: {self.system or '(none)'}")

    def _attach(self, path: str) -> None:
        if path == "-":
            self._file = None
        elif path:
            try:
                self._file = path, read_text(os.path.expanduser(path))
            except FleetError as error:
                show_error(error)
            except OSError as error:
                note(f"{one_line(path)}: {error.strerror or error}")
        if self._file is None:
            note("file: (none)")
        else:
            name, text = self._file
            note(f"file: {one_line(name)}, {count(len(text))} characters; the next question is about it")

    def _local(self, rest: str) -> None:
        said = {"on": True, "off": False, "": not self.options.local_only}.get(rest)
        if said is None:
            note("Say /local on or /local off.")
            return
        self.options = replace(self.options, local_only=said)
        note(f"local: {'on, no other machine sees these prompts' if said else 'off'}")

    def _smart(self, rest: str) -> None:
        smart: bool | float | None
        if rest in ("", "on", "off"):
            smart = True if rest == "on" or (not rest and self.options.smart is None) else None
        else:
            try:
                smart = float(rest.removesuffix("%")) / (100 if rest.endswith("%") else 1)
            except ValueError:
                smart = 0.0
            if not 0 < smart <= 1:
                note("Say /smart on, /smart off, or the share to keep: /smart 0.3.")
                return
        self.options = replace(self.options, smart=smart)
        share = "" if smart is None or isinstance(smart, bool) else f", keeps {smart:.0%} of a long prompt"
        note(f"smart prefill: {'off' if smart is None else f'on{share}'}")

    def _retry(self, _rest: str) -> None:
        asked = next((i for i in reversed(range(len(self.turns))) if self.turns[i]["role"] == "user"), None)
        if asked is None:
            note("Nothing was asked yet.")
            return
        before, question = self.turns, self.turns[asked]["content"]
        self.turns, self._file = self.turns[:asked], None
        self._say(question)
        if len(self.turns) == asked:
            # No answer came: the earlier one stays.
            self.turns = before

    def _save(self, path: str) -> None:
        """Never over a file that is not this conversation's own."""
        if not self.turns:
            note("There is nothing to save yet.")
            return
        file = Path(path or self._saved or "conversation.md").expanduser()
        parts = [f"## {turn['role']}\n\n{turn['content'].strip()}\n" for turn in self.turns]
        flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if file == self._saved else os.O_EXCL)
        try:
            with os.fdopen(os.open(file, flags, _PRIVATE), "w", encoding="utf-8") as out:
                out.write("\n".join(parts))
        except FileExistsError:
            note(f"{one_line(str(file))} exists already; say another name: /save PATH.")
        except OSError as error:
            note(f"{one_line(str(file))}: {error.strerror or error}")
        else:
            self._saved = file
            note(f"saved to {one_line(str(file))}")

    def _new(self, _rest: str) -> None:
        self.turns = []
        note("The conversation starts anew.")

    def _stats(self, _rest: str) -> None:
        self.stats = not self.stats
        note(f"closing line: {'on' if self.stats else 'off'}")
