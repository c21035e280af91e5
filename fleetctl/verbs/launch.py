"""`fleetctl launch`: a coding agent with the models of this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

import click

from fleetctl import completion
from fleetctl.cli import CliSession, json_option, note, pass_session
from fleetctl.connection.client import Client
from fleetctl.connection.replies import read
from fleetctl.exits import ClientError, Refused
from fleetctl.programs import client_settings
from fleetctl.programs.agent_models import how_to_start
from fleetctl.programs.agents import AGENTS, Agent, AgentModels
from fleetctl.render.text import count
from fleetd import limits
from fleetd.control.model_listing import ModelListing

_PROBE: Mapping[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"name": "look", "description": "Look.", "input_schema": {"type": "object", "properties": {}}}],
}


@click.command("launch", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "-m",
    "--model",
    default="",
    metavar="NAME",
    help="The model, if not the one of models.large.",
    shell_complete=completion.models,
)
@click.argument("agent", type=click.Choice(sorted(AGENTS)))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@json_option
@pass_session
def command(session: CliSession, model: str, agent: str, arguments: tuple[str, ...]) -> None:
    """Start a coding agent with this machine's models.

    It checks that the model knows tools and has enough context, and loads it. If the model cannot do it, it
    names one that can. If the model of models.small cannot, the large one takes its place. The agent's
    settings are in its environment and arguments; its files stay as they are. --json before the agent's name
    shows them and starts nothing.
    """
    found, client = AGENTS[agent], session.client()
    settings, base_url = client_settings.fetch(client)
    large = model or settings.large
    context = _context(client, large, found)
    path = shutil.which(found.program)
    if path is None:
        raise ClientError(f"{found.program} is not on the PATH.", hint=f"Install it: {found.install}")
    start = found.start(settings, base_url, _models(client, model or settings.small, large, context, found))
    given = [*start.arguments, *arguments]
    changes = {**start.environment, **_not_elsewhere(found, base_url)}
    if session.json:
        session.emit({"command": [path, *given], "environment": changes}, "")
        return
    environment = {name: value for name, value in {**os.environ, **changes}.items() if value}
    # The terminal, its signals and the exit code are the agent's from here on.
    os.execve(path, [found.program, *given], environment)  # noqa: S606


def _not_elsewhere(agent: Agent, base_url: str) -> Mapping[str, str]:
    """What else of the environment changes, so that prompts and the token go to this machine alone; ""
    removes a variable."""
    removed = client_settings.set_elsewhere(agent.elsewhere)
    if removed:
        note(f"{agent.program} gets no {', '.join(removed)}: it is to use the models of this machine")
    proxies = client_settings.past_proxies(base_url)
    if proxies:
        note(f"{agent.program} asks this machine past the proxy: {' and '.join(proxies)} name it")
    return {**dict.fromkeys(removed, ""), **proxies}


def _models(client: Client, small: str, large: str, context: int, agent: Agent) -> AgentModels:
    """Load the large model. ``context``: its tokens, 0 if that is not known. Raises FleetError for a model
    that the agent cannot use."""
    note(f"loading {large}")
    # Rendering tools needs the loaded model; nothing is computed.
    client.post("/v1/messages/count_tokens", {"model": large, **_PROBE}, timeout_s=limits.CLIENT_LONG_CALL_S)
    # A model that was not on this machine is known only now.
    context = context or _context(client, large, agent)
    return AgentModels(large, _small(client, small, large, agent), context or agent.context_tokens)


def _context(client: Client, model: str, agent: Agent) -> int:
    """Tokens; 0 while they are not known. Raises Refused if they are too few for the agent."""
    context = int(client.get(f"/v1/models/{model}").get("context_length") or 0)
    if 0 < context < agent.context_tokens:
        models = read(client.get("/fleet/v1/models"), ModelListing)
        raise Refused(
            f"{model} has a context of {count(context)} tokens; {agent.program} needs "
            f"{count(agent.context_tokens)}.",
            hint=how_to_start(models, agent.program, agent.context_tokens),
        )
    return context


def _small(client: Client, small: str, large: str, agent: Agent) -> str:
    """The small model if the agent can use it, or else the large one. It is not loaded before it is asked."""
    if small == large:
        return large
    known = client.get(f"/v1/models/{small}")
    context = int(known.get("context_length") or 0)
    if 0 < context < agent.context_tokens:
        needed = count(agent.context_tokens)
        reason = f"has a context of {count(context)} tokens, and {agent.program} needs {needed}"
    elif (details := known.get("fleet", {})).get("installed") and not details.get("tools"):
        reason = f"has no chat template, and {agent.program} works with tools"
    else:
        return small
    note(f"{small} (models.small) {reason}: {large} takes its place")
    return large
