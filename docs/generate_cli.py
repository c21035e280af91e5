"""Write docs/fleetctl.md from the commands' own help: `python docs/generate_cli.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from fleetctl.cli import fleetctl
from fleetctl.exits import Exit

PAGE = Path(__file__).with_name("fleetctl.md")
_WIDTH = 80


def page() -> str:
    """The whole page."""
    codes = "\n".join(f"| {code.value} | {code.meaning} |" for code in Exit)
    parts = [
        "<!-- Written by docs/generate_cli.py; a test fails when it is out of date. -->",
        "# fleetctl",
        "The answer goes to stdout, progress and remarks go to stderr. `--json` works with every command.",
        f"## Exit codes\n\n| code | meaning |\n|---|---|\n{codes}",
        *(f"## {name}\n\n```text\n{text}\n```" for name, text in _pages(fleetctl, "fleetctl", None)),
    ]
    return "\n\n".join(parts) + "\n"


def _pages(command: click.Command, name: str, parent: click.Context | None) -> Iterator[tuple[str, str]]:
    settings = {**command.context_settings, "max_content_width": _WIDTH, "terminal_width": _WIDTH}
    context = click.Context(command, info_name=name, parent=parent, **settings)
    yield context.command_path, command.get_help(context)
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            if found is not None:
                yield from _pages(found, child, context)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
