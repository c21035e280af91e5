"""What coding agents are started with, so that they use the models of this machine. Pure.

All of it is in their environment and arguments: an agent's own files stay as they are, and count where these
say nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fleetctl.programs import client_settings
from fleetd import limits
from fleetd.control.daemon_status import ClientSettings

# The variable from which Codex and opencode take the token: it is in no argument, which others could see.
_KEY = "FLEETD_API_KEY"
_TIMEOUT_MS = round(limits.AGENT_TIMEOUT_S * 1000)


@dataclass(frozen=True)
class AgentModels:
    """What an agent is to use. ``context_tokens``: the large model's."""

    large: str
    small: str
    context_tokens: int

    @property
    def output_tokens(self) -> int:
        """The most that an answer may take of the context."""
        return min(32_000, self.context_tokens // 4)


@dataclass(frozen=True)
class Start:
    """``environment``: variables for the agent; "" removes one. ``arguments``: before the user's own."""

    environment: Mapping[str, str]
    arguments: Sequence[str] = field(default_factory=tuple)


@dataclass(frozen=True)
class Agent:
    """A program that can be launched.

    Args:
        context_tokens: what its own instructions and tools need to leave room for work.
        start: by the daemon's settings and the base URL of OpenAI's clients.
        elsewhere: variables by which it would use another server.
    """

    program: str
    install: str
    context_tokens: int
    start: Callable[[ClientSettings, str, AgentModels], Start]
    elsewhere: Sequence[str] = ()


def _claude(settings: ClientSettings, base_url: str, models: AgentModels) -> Start:
    return Start(
        {
            **client_settings.anthropic(settings, base_url),
            "ANTHROPIC_MODEL": models.large,
            "ANTHROPIC_DEFAULT_OPUS_MODEL": models.large,
            "ANTHROPIC_DEFAULT_SONNET_MODEL": models.large,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": models.small,
            "CLAUDE_CODE_SUBAGENT_MODEL": models.large,
            # Claude Code takes the context of a name that it does not know for 200,000 tokens.
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(models.context_tokens),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(models.output_tokens),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            # It gives a request up after 10 minutes, and sends it again; a long prompt may take longer.
            "API_TIMEOUT_MS": str(_TIMEOUT_MS),
        }
    )


def _codex(settings: ClientSettings, base_url: str, models: AgentModels) -> Start:
    provider = {
        "name": "fleetd",
        "base_url": base_url,
        "env_key": _KEY,
        "wire_api": "responses",
        "stream_idle_timeout_ms": _TIMEOUT_MS,
    }
    chosen = {
        "model": models.large,
        "model_provider": "fleetd",
        "model_context_window": models.context_tokens,
        # There are no summaries: without this, Codex shows no reasoning.
        "show_raw_agent_reasoning": True,
        **{f"model_providers.fleetd.{name}": value for name, value in provider.items()},
    }
    # A value is read as TOML, in which texts, numbers and booleans are written as in JSON.
    options = [each for name, value in chosen.items() for each in ("-c", f"{name}={json.dumps(value)}")]
    return Start({_KEY: _token(settings)}, options)


def _opencode(settings: ClientSettings, base_url: str, models: AgentModels) -> Start:
    model = {
        "tool_call": True,
        "reasoning": True,
        # Its reasoning comes back with the next turn, which then begins as this one ended.
        "interleaved": {"field": "reasoning_content"},
        "limit": {"context": models.context_tokens, "output": models.output_tokens},
    }
    config = {
        "model": f"fleetd/{models.large}",
        "small_model": f"fleetd/{models.small}",
        "provider": {
            "fleetd": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "fleetd",
                "options": {"baseURL": base_url, "apiKey": f"{{env:{_KEY}}}", "timeout": _TIMEOUT_MS},
                "models": {models.large: model, models.small: model},
            }
        },
    }
    return Start({_KEY: _token(settings), "OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _token(settings: ClientSettings) -> str:
    return settings.api_key or "not-needed"


AGENTS: Mapping[str, Agent] = {
    "claude": Agent(
        "claude",
        "npm install -g @anthropic-ai/claude-code",
        32_768,
        _claude,
        client_settings.ANTHROPIC_ELSEWHERE,
    ),
    "codex": Agent("codex", "npm install -g @openai/codex", 32_768, _codex),
    "opencode": Agent("opencode", "npm install -g opencode-ai", 32_768, _opencode),
}
