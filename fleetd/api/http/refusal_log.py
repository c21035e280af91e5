"""Refused requests in the log: many clients show nothing of what an answer says of their request.

A line has the client's own name, the address, the code and the field; never a value of the body.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from aiohttp import hdrs, web

from fleetd import limits
from fleetd.errors import FleetError
from fleetd.process.observe import get_logger

log = get_logger("fleetd.api")

_CLIENT_CHARS, _PATH_CHARS = 64, 100


class RefusalLog:
    """Each kind of refusal once in ``limits.REPEAT_LOG_S``, and at most ``limits.REFUSALS_LOGGED`` kinds."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._began_s = float("-inf")
        self._told: set[tuple[str, str, str, str]] = set()

    def note(self, request: web.Request, error: FleetError) -> None:
        """Log the refusal of a request over TCP: programs on the Unix socket show errors themselves."""
        client = request.headers.get(hdrs.USER_AGENT, "")[:_CLIENT_CHARS]
        path = request.path[:_PATH_CHARS]
        now_s = self._monotonic()
        if now_s - self._began_s >= limits.REPEAT_LOG_S:
            self._began_s = now_s
            self._told.clear()
        kind = (client, request.method, path, error.code)
        if kind in self._told or len(self._told) >= limits.REFUSALS_LOGGED:
            return
        self._told.add(kind)
        log.info(
            "http.refused",
            client=client,
            method=request.method,
            path=path,
            status=error.status,
            code=error.code,
            param=error.param,
        )
