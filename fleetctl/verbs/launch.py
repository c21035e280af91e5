"""`fleetctl launch`: a coding agent with the models of this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

import click

from fleetctl import client_settings
from fleetctl.agents import AGENTS, Agent, AgentModels
from fleetctl.cli import CliSession, json_option, note, pass_session
from fleetctl.client import Client
from fleetctl.exits import ClientError, Refused
from fleetd import limits
from fleetd.control.daemon_status import ClientSettings
from fleetd.errors import UnsupportedParameter

_PROBE: Mapping[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"name": "look", "description": "Look.", "input_schema": {"type": "object", "properties": {}}}],
}


@click.command("launch", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-m", "--model", default="", metavar="NAME", help="The model, if not the one of models.large.")
@click.argument("agent", type=click.Choice(sorted(AGENTS)))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@json_option
@pass_session
def command(session: CliSession, model: str, agent: str, arguments: tuple[str, ...]) -> None:
    """Start a coding agent with the models of this machine: fleetctl launch claude [ARGUMENTS].

    It checks that the model knows tools and has context enough, and loads it. The agent's settings are in its
    environment and arguments; its files stay as they are. --json before the agent's name shows them and
    starts nothing.
    """
    found = AGENTS[agent]
    path = shutil.which(found.program)
    if path is None:
        raise ClientError(f"{found.program} is not on the PATH.", hint=f"Install it: {found.install}")
    client = session.client()
    settings, base_url = client_settings.fetch(client)
    start = found.start(settings, base_url, _models(client, settings, model, found))
    given = [*start.arguments, *arguments]
    if session.json:
        session.emit({"command": [path, *given], "environment": start.environment}, "")
        return
    environment = {name: value for name, value in {**os.environ, **start.environment}.items() if value}
    # The terminal, its signals and the exit code are the agent's from here on.
    os.execve(path, [found.program, *given], environment)  # noqa: S606


def _models(client: Client, settings: ClientSettings, model: str, agent: Agent) -> AgentModels:
    """Raises FleetError for a model that the agent cannot use."""
    large = model or settings.large
    known = client.get(f"/v1/models/{large}")
    context = int(known.get("context_length") or 0)
    if 0 < context < agent.context_tokens:
        raise Refused(
            f"{large} has a context of {context} tokens; {agent.program} needs {agent.context_tokens}.",
            hint="Choose another with -m, or set models.large. `fleetctl models` shows what fits here.",
        )
    note(f"loading {large}")
    try:
        # Rendering tools needs the loaded model; nothing is computed.
        client.post(
            "/v1/messages/count_tokens", {"model": large, **_PROBE}, timeout_s=limits.CLIENT_LONG_CALL_S
        )
    except UnsupportedParameter as error:
        raise Refused(
            f"{large} knows no tool calls, which {agent.program} works with.",
            hint="Choose another with -m, or set models.large.",
        ) from error
    return AgentModels(large, model or settings.small, context or agent.context_tokens)
