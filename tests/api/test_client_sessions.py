"""What clients call their conversations, in the headers and bodies that they really send."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import ClientSession
from api_fakes import MODEL, TOKEN, FakeRunner, serve_in_thread, services

from fleetd import limits
from fleetd.api.http.client_sessions import session_of

CLAUDE = {"X-Claude-Code-Session-Id": "s1"}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
RESPONSE = {"model": MODEL, "input": "hi"}
MESSAGE = {**CHAT, "max_tokens": 9}


@pytest.mark.parametrize(
    ("path", "body", "headers", "session"),
    [
        ("messages?beta=true", MESSAGE, CLAUDE, "x-claude-code-session-id s1 "),
        (
            "messages",
            MESSAGE,
            {**CLAUDE, "X-Claude-Code-Agent-Id": "a2"},
            "x-claude-code-session-id s1 a2",
        ),
        ("messages", {**MESSAGE, "metadata": {"user_id": "user_1_session_2"}}, {}, "user_1_session_2"),
        ("messages", {**MESSAGE, "metadata": "nothing"}, {}, ""),
        ("responses", {**RESPONSE, "prompt_cache_key": "k"}, {}, "k"),
        (
            "responses",
            {**RESPONSE, "prompt_cache_key": "k"},
            {"session-id": "c1", "thread-id": "t1"},
            "session-id c1 t1",
        ),
        ("chat/completions", {**CHAT, "prompt_cache_key": "k", "user": "me"}, {}, "k"),
        ("chat/completions", {**CHAT, "user": "me"}, {}, "me"),
        (
            "chat/completions",
            CHAT,
            {"x-session-affinity": "ses_1", "x-session-id": "ses_1"},
            "x-session-affinity ses_1 ses_1",
        ),
        ("completions", {"model": MODEL, "prompt": "hi", "user": "me"}, {}, "me"),
        ("chat/completions", CHAT, {}, ""),
    ],
)
async def test_a_request_carries_the_name_of_its_session(
    path: str, body: dict[str, Any], headers: dict[str, str], session: str
) -> None:
    runner = FakeRunner()
    with serve_in_thread(lambda: services(runner)) as site:
        own = {"Authorization": f"Bearer {TOKEN}", **headers}
        async with (
            ClientSession(headers=own) as client,
            client.post(f"{site.url}/v1/{path}", json=body) as sent,
        ):
            assert sent.status == 200, await sent.text()
    assert [job.session for job in runner.jobs] == [session]


def test_a_name_is_bounded() -> None:
    assert len(session_of({"session-id": "x" * 10_000})) == limits.SESSION_CHARS
    assert len(session_of({}, "y" * 10_000)) == limits.SESSION_CHARS
