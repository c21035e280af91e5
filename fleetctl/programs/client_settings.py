"""What programs on this machine need to call the daemon's HTTP API, as environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from fleetctl.connection.client import Client
from fleetctl.connection.replies import read
from fleetctl.exits import ClientError
from fleetd.control.daemon_status import ClientSettings

# Variables by which clients of a dialect would send prompts, or this machine's token, to another server; and
# keys and headers for another server that they would send here.
OPENAI_ELSEWHERE: Sequence[str] = ("OPENAI_API_BASE", "OPENAI_API_TYPE", "OPENAI_CUSTOM_HEADERS")
ANTHROPIC_ELSEWHERE: Sequence[str] = (
    "ANTHROPIC_API_KEY", "ANTHROPIC_CUSTOM_HEADERS", "ANTHROPIC_UNIX_SOCKET", "CLAUDE_CODE_API_BASE_URL",
    "CLAUDE_CODE_OAUTH_TOKEN", "CLAUDE_CODE_USE_ANTHROPIC_AWS", "CLAUDE_CODE_USE_BEDROCK",
    "CLAUDE_CODE_USE_FOUNDRY", "CLAUDE_CODE_USE_MANTLE", "CLAUDE_CODE_USE_VERTEX",
)  # fmt: skip
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_EXCEPTIONS = ("NO_PROXY", "no_proxy")
# Both names, for clients are told either. No [::1]: httpx refuses a NO_PROXY that has it.
_LOOPBACK = ("127.0.0.1", "localhost")


def past_proxies(url: str, environment: Mapping[str, str] = os.environ) -> Mapping[str, str]:
    """What keeps requests to this machine from a proxy that the environment names, which would read prompts
    and the token. Nothing if it names none: some libraries then ask the system, unless one of these is set.
    """
    if not any(environment.get(form) for name in _PROXIES for form in (name, name.upper())):
        return {}
    host = urlsplit(url).hostname or ""
    hosts = _LOOPBACK if host in _LOOPBACK else (host,)
    found = {}
    for name in _EXCEPTIONS:
        # Programs read either; one that is not set has what the other has.
        set_now = environment.get(name) or next(filter(None, map(environment.get, _EXCEPTIONS)), "")
        listed = set_now.replace(",", " ").split()
        missing = [] if "*" in listed else [each for each in hosts if each not in listed]
        if missing or not environment.get(name):
            found[name] = ",".join([*listed, *missing])
    return found


def set_elsewhere(names: Sequence[str], environment: Mapping[str, str] = os.environ) -> list[str]:
    """Those of ``names`` that are set."""
    return [name for name in names if environment.get(name)]


def fetch(client: Client) -> tuple[ClientSettings, str]:
    """The settings, and the base URL of OpenAI's clients. Raises ClientError without an HTTP address."""
    settings = read(client.get("/fleet/v1/env"), ClientSettings)
    if not settings.base_url:
        raise ClientError(
            "The daemon has no HTTP address, only its socket.",
            hint="Start it with `fleetd run --http 127.0.0.1:8114`, or set http.listen in fleetd.toml.",
        )
    return settings, settings.base_url


def openai(settings: ClientSettings, base_url: str) -> Mapping[str, str]:
    return {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": settings.api_key or "not-needed"}


def ollama(settings: ClientSettings, base_url: str) -> Mapping[str, str]:
    """Ollama's Python library sends the key as the token; other clients of Ollama's send none."""
    if settings.ollama_url:
        return {"OLLAMA_HOST": settings.ollama_url}
    return {"OLLAMA_HOST": base_url.removesuffix("/v1"), "OLLAMA_API_KEY": settings.api_key or "not-needed"}


def anthropic(settings: ClientSettings, base_url: str) -> Mapping[str, str]:
    """Anthropic's clients put /v1 behind the base URL themselves."""
    return {
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_AUTH_TOKEN": settings.api_key or "not-needed",
    }
