"""What a program is called that asks: by its User-Agent, without versions and odd bytes."""

from __future__ import annotations

import pytest
from aiohttp.test_utils import make_mocked_request

from fleetd.api.http.client_name import client_name


@pytest.mark.parametrize(
    ("agent", "name"),
    [
        ("OpenAI/Python 2.32.0", "OpenAI/Python"),
        ("claude-cli/1.0.3 (external, cli)", "claude-cli"),
        ("fleetctl/0.2.0", "fleetctl"),
        ("curl/8.5.0", "curl"),
        ("Mozilla/5.0 (X11; Linux x86_64)", "browser"),
        ("my-agent", "my-agent"),
        ("", ""),
        ("x" * 1000, "x" * 40),
        ("caf\u00e9/2", "caf"),
    ],
)
def test_a_client_is_known_by_the_first_word_of_its_user_agent(agent: str, name: str) -> None:
    assert client_name(make_mocked_request("POST", "/", {"User-Agent": agent})) == name


def test_the_page_is_called_so_whatever_its_browser_says() -> None:
    headers = {"User-Agent": "Mozilla/5.0", "X-Fleet-Page": "key"}
    assert client_name(make_mocked_request("POST", "/", headers)) == "page"
    assert client_name(make_mocked_request("POST", "/", {})) == ""
