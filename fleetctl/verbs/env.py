"""`fleetctl env`: the settings of a client on this machine, as shell commands."""

from __future__ import annotations

import shlex

import click

from fleetctl.cli import CliSession, json_option, note, pass_session
from fleetctl.programs import client_settings


@click.command("env")
@click.option(
    "--anthropic",
    is_flag=True,
    help="Print ANTHROPIC_BASE_URL and ANTHROPIC_AUTH_TOKEN, for Claude Code and Anthropic's libraries.",
)
@click.option(
    "--ollama",
    is_flag=True,
    help="Print OLLAMA_HOST, for Ollama's clients, and OLLAMA_API_KEY where they need the token.",
)
@json_option
@pass_session
def command(session: CliSession, anthropic: bool, ollama: bool) -> None:
    """Print OPENAI_BASE_URL and OPENAI_API_KEY; use it as: eval "$(fleetctl env)".

    The key is a secret of this machine: every program that has it may use the models. If the environment
    names a proxy, NO_PROXY is printed too, for the proxy would read prompts and the key. Variables that would
    send requests to another server are unset, with a word.
    """
    settings, base_url = client_settings.fetch(session.client())
    if anthropic and ollama:
        raise click.UsageError("Give --anthropic or --ollama, not both.")
    made, elsewhere = client_settings.openai, client_settings.OPENAI_ELSEWHERE
    if anthropic or ollama:
        made = client_settings.anthropic if anthropic else client_settings.ollama
        elsewhere = client_settings.ANTHROPIC_ELSEWHERE if anthropic else ()
    names = {**made(settings, base_url), **client_settings.past_proxies(base_url)}
    removed = client_settings.set_elsewhere(elsewhere)
    if removed:
        note(f"{', '.join(removed)} would send requests elsewhere, or belong there: unset")
    answer = {
        "base_url": base_url,
        "api_key": settings.api_key,
        **(names if anthropic or ollama else {}),
    }
    lines = [f"export {name}={shlex.quote(value)}" for name, value in names.items()]
    session.emit(answer, "\n".join([*lines, *(f"unset {name}" for name in removed)]))
