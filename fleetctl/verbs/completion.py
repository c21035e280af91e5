"""`fleetctl completion`: the script by which a shell completes verbs, options, models and machines."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from fleetctl.cli import CliSession, fleetctl, json_option, pass_session

VARIABLE = "_FLEETCTL_COMPLETE"


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@json_option
@pass_session
def command(session: CliSession, shell: str) -> None:
    """Print a script that completes commands, options, models and machines.

    \b
    bash:  echo 'eval "$(fleetctl completion bash)"' >> ~/.bashrc
    zsh:   echo 'eval "$(fleetctl completion zsh)"' >> ~/.zshrc
    fish:  fleetctl completion fish > ~/.config/fish/completions/fleetctl.fish
    """
    made = get_completion_class(shell)
    if made is None:
        raise click.UsageError(f"There is no completion for {shell}.")
    # Not `source`: of bash that would ask the bash on the PATH for its version, which is not the one to be.
    complete = made(fleetctl, {}, "fleetctl", VARIABLE)
    script = complete.source_template % complete.source_vars()
    session.emit({"shell": shell, "script": script}, script.strip("\n"))
