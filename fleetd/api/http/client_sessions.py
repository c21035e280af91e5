"""Which conversation a request belongs to, as its client names it.

Claude Code, Codex and opencode name it in headers, the libraries of OpenAI and Anthropic in the body. A
client that names none is known by its prompt alone. Names are hints: they decide between machines that are
about equally good, and never what is answered.
"""

from __future__ import annotations

from collections.abc import Mapping

from fleetd import limits

# Each client's own headers for a session, then for the agent that works in it. Proxies may turn "_" to "-".
_HEADERS = (
    ("x-claude-code-session-id", "x-claude-code-agent-id"),  # Claude Code
    ("session-id", "thread-id"),  # Codex
    ("session_id", "conversation_id"),  # Codex before 2026
    ("x-session-affinity", "x-session-id"),  # opencode
)


def session_of(headers: Mapping[str, str], *fields: object) -> str:
    """The name of a request's session; "" if it has none.

    Args:
        fields: values in the body that may name it, the most particular first.
    """
    for session, agent in _HEADERS:
        if headers.get(session):
            return f"{session} {headers[session]} {headers.get(agent, '')}"[: limits.SESSION_CHARS]
    named = next((field for field in fields if isinstance(field, str) and field), "")
    return named[: limits.SESSION_CHARS]
