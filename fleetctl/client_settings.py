"""What programs on this machine need to call the daemon's HTTP API, as environment variables."""

from __future__ import annotations

from collections.abc import Mapping

from fleetctl.client import Client
from fleetctl.exits import ClientError
from fleetctl.replies import read
from fleetd.control.daemon_status import ClientSettings


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
