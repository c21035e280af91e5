"""The bodies of POST /fleet/v1/page/ticket and /fleet/v1/page/session: how a browser gets to see the page.

Neither has a default: nothing stands in for a secret.
"""

from __future__ import annotations

import msgspec


class PageTicket(msgspec.Struct, frozen=True):
    """``url`` logs in the browser that opens it first, if it does so within ``expires_s`` seconds."""

    url: str
    expires_s: float


class PageKey(msgspec.Struct, frozen=True):
    """What the page sends as X-Fleet-Page with every request, beside the cookie."""

    key: str
