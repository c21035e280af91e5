"""What `fleetctl` alone shows: the state in a few lines, and three next steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fleetctl.connection.client import Client
from fleetctl.exits import NoDaemon
from fleetctl.render.fleet_words import daemon_word
from fleetctl.render.text import duration, listed, one_line, size
from fleetd import limits
from fleetd.errors import FleetError

Step = tuple[str, str]

# What Claude Code, Codex and opencode need of a model's context (agents.py, which is not loaded here).
_AGENT_TOKENS = 32_768
_OTHERS = "`fleetctl --help` lists all commands."


def front_page(client: Client) -> tuple[dict[str, Any], str]:
    """The state for programs and for people. Never raises FleetError: what is wrong is the state."""
    try:
        status = client.call("GET", "/fleet/v1/status", timeout_s=limits.CLIENT_GLANCE_S)
    except NoDaemon:
        return {"running": False}, _page(
            [f"fleetd does not run here (home {one_line(str(client.address.home))})."],
            [
                ("fleetd run", "start it in this terminal"),
                ("fleetctl service install", "start it now, and at each login"),
                ("fleetctl doctor", "check this machine"),
            ],
        )
    except FleetError as error:
        lines = [f"fleetd does not answer: {one_line(error.message)}"]
        return {"running": False}, _page(lines, [("fleetctl doctor", "say what is wrong")])
    return {"running": True, **status}, _page(_state(status), _steps(status))


def _state(status: dict[str, Any]) -> list[str]:
    version, up = one_line(str(status.get("version", "?"))), duration(status.get("uptime_s", 0))
    lines = [f"fleetd {version} is {daemon_word(status)}, up {up}"]
    engines = status.get("engines") or ()
    loaded, loading = (_names(engines, state) for state in ("ready", "loading"))
    default = one_line(str(status.get("default_model") or "the default model"))
    memory = (status.get("machine") or {}).get("available_bytes")
    if loaded:
        lines.append(f"{listed(loaded)} {'are' if loaded[1:] else 'is'} loaded")
    if loading:
        lines.append(f"{listed(loading)} {'are' if loading[1:] else 'is'} being loaded")
    fetched = [one_line(str(pull.get("model"))) for pull in status.get("pulls") or ()]
    if fetched:
        lines.append(f"{listed(fetched)} {'are' if fetched[1:] else 'is'} being fetched")
    if not (loaded or loading or fetched):
        lines.append(f"no model is loaded; {default} loads with the first question")
    if memory:
        lines.append(f"{size(memory)} of memory are free")
    peers = _peers(status)
    names = listed([one_line(str(peer.get("name"))) for peer in peers if peer.get("state") == "usable"])
    away = [one_line(str(peer.get("name"))) for peer in peers if peer.get("state") != "usable"]
    if not (status.get("fleet") or {}).get("enabled"):
        lines.append("the fleet is off")
    elif not peers:
        lines.append("no other machine is paired")
    else:
        cannot = f"{listed(away)} cannot be used now" if away else ""
        lines.append("; ".join(part for part in (f"paired with {names}" if names else "", cannot) if part))
    return lines


def _names(engines: Iterable[dict[str, Any]], state: str) -> list[str]:
    """The models whose workers are in this state; of some layers it is said that they are no whole model."""
    found = (engine for engine in engines if engine.get("state") == state)
    return [
        f"a part of {one_line(str(engine['part_of']))}"
        if engine.get("part_of")
        else one_line(str(engine.get("model")))
        for engine in found
    ]


def _steps(status: dict[str, Any]) -> list[Step]:
    peers = _peers(status)
    fleet = status.get("fleet") or {}
    if any(peer.get("state") != "usable" for peer in peers):
        third = ("fleetctl peers", "see why a machine cannot be used")
    elif peers and _takes_agents(status):
        third = ("fleetctl launch claude", "start a coding agent with these models")
    elif peers or not fleet.get("enabled"):
        third = ("fleetctl models", "see which larger models fit")
    else:
        third = ("fleetctl pair", "let another machine help")
    return [("fleetctl chat", "ask something"), ("fleetctl open", "see the fleet in a browser"), third]


def _takes_agents(status: dict[str, Any]) -> bool:
    """True if a loaded model has a context that is long enough for coding agents."""
    shapes = [engine.get("shape") or {} for engine in status.get("engines") or ()]
    return any(shape.get("context_tokens", 0) >= _AGENT_TOKENS for shape in shapes)


def _peers(status: dict[str, Any]) -> list[dict[str, Any]]:
    return list((status.get("fleet") or {}).get("peers") or ())


def _page(state: list[str], steps: list[Step]) -> str:
    width = max(len(line) for line, _ in steps)
    return "\n".join([*state, "", *(f"  {line:<{width}}  {what}" for line, what in steps), "", _OTHERS])
