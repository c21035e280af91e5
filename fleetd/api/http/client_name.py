"""What the program that asks is called, by its own account."""

from __future__ import annotations

import re

from aiohttp import hdrs, web

# "OpenAI/Python 2.32.0" is OpenAI/Python, "claude-cli/1.0.3 (external)" is claude-cli.
_VERSION = re.compile(r"/v?[0-9].*")
_ODD = re.compile(r"[^\x21-\x7e]")
_CHARS = 40
#: The header of the page's requests (``page.access``).
PAGE_HEADER = "X-Fleet-Page"


def client_name(request: web.Request) -> str:
    """The first word of the User-Agent without its version; "page" for the page, "" if there is none."""
    if PAGE_HEADER in request.headers:
        return "page"
    word = request.headers.get(hdrs.USER_AGENT, "").partition(" ")[0]
    name = _ODD.sub("", _VERSION.sub("", word))[:_CHARS]
    return "browser" if name == "Mozilla" else name
