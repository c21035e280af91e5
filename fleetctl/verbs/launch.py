"""`fleetctl launch`: a coding agent with the models of this machine.

The agent gets its settings in its environment alone, so its own files stay as they are.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import click

from fleetctl import client_settings
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


@dataclass(frozen=True)
class AgentModels:
    """What an agent is to use. ``context_tokens``: the large model's."""

    large: str
    small: str
    context_tokens: int


@dataclass(frozen=True)
class Agent:
    """A program that can be launched.

    Args:
        context_tokens: what its own instructions and tools need to leave room for work.
        environment: the variables for it; "" removes one.
    """

    program: str
    install: str
    context_tokens: int
    environment: Callable[[ClientSettings, str, AgentModels], Mapping[str, str]]


def _claude(settings: ClientSettings, base_url: str, models: AgentModels) -> Mapping[str, str]:
    return {
        **client_settings.anthropic(settings, base_url),
        # A key of the user's own would be sent to the daemon in the token's place.
        "ANTHROPIC_API_KEY": "",
        "ANTHROPIC_MODEL": models.large,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": models.large,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": models.large,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": models.small,
        "CLAUDE_CODE_SUBAGENT_MODEL": models.large,
        # Claude Code takes the context of a name that it does not know for 200,000 tokens.
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(models.context_tokens),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(min(32_000, models.context_tokens // 4)),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        # It gives a request up after 10 minutes, and sends it again; a long prompt may take longer.
        "API_TIMEOUT_MS": str(round(limits.AGENT_TIMEOUT_S * 1000)),
    }


AGENTS: Mapping[str, Agent] = {
    "claude": Agent("claude", "npm install -g @anthropic-ai/claude-code", 32_768, _claude),
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
    environment; its files stay as they are. --json before the agent's name shows them and starts nothing.
    """
    found = AGENTS[agent]
    path = shutil.which(found.program)
    if path is None:
        raise ClientError(f"{found.program} is not on the PATH.", hint=f"Install it: {found.install}")
    client = session.client()
    settings, base_url = client_settings.fetch(client)
    models = _models(client, settings, model, found)
    own = found.environment(settings, base_url, models)
    if session.json:
        session.emit({"command": [path, *arguments], "environment": own}, "")
        return
    environment = {name: value for name, value in {**os.environ, **own}.items() if value}
    # The terminal, its signals and the exit code are the agent's from here on.
    os.execve(path, [found.program, *arguments], environment)  # noqa: S606


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
