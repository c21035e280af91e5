"""`fleetctl env`: the settings of an OpenAI client on this machine, as shell commands."""

from __future__ import annotations

import shlex

import click

from fleetctl.cli import CliSession, json_option, pass_session
from fleetctl.exits import ClientError
from fleetctl.replies import read
from fleetd.control.daemon_status import ClientSettings


@click.command("env")
@json_option
@pass_session
def command(session: CliSession) -> None:
    """Print OPENAI_BASE_URL and OPENAI_API_KEY; use it as: eval "$(fleetctl env)".

    The key is a secret of this machine: every program that has it may use the models.
    """
    answer = session.client().get("/fleet/v1/env")
    env = read(answer, ClientSettings)
    if not env.base_url:
        raise ClientError(
            "The daemon has no HTTP address, only its socket.",
            hint="Start it with `fleetd run --http 127.0.0.1:8114`, or set http.listen in fleetd.toml.",
        )
    names = {"OPENAI_BASE_URL": env.base_url, "OPENAI_API_KEY": env.api_key or "not-needed"}
    session.emit(answer, "\n".join(f"export {name}={shlex.quote(value)}" for name, value in names.items()))
