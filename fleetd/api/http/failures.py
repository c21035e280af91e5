"""An error as a whole HTTP answer, in the dialect of the route; and bugs turned into errors."""

from __future__ import annotations

import logging
import math
import traceback
from http import HTTPStatus

import msgspec
from aiohttp import hdrs, web

from fleetd.api.http.dialect import Dialect
from fleetd.errors import FleetError, Unauthorized

log = logging.getLogger(__name__)


class HttpFailure(FleetError):
    """A refusal by the HTTP library itself: no such route, or a wrong method."""

    def __init__(self, status: int, message: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        phrase = HTTPStatus(status).phrase
        self.code = phrase.lower().replace(" ", "_").replace("-", "_")  # type: ignore[misc]
        self.status = status  # type: ignore[misc]


def response(error: FleetError, dialect: Dialect) -> web.Response:
    """The whole HTTP answer for an error."""
    answer = web.Response(
        status=dialect.status(error),
        body=msgspec.json.encode(dialect.error(error)),
        content_type="application/json",
    )
    if error.retry_after_s is not None:
        answer.headers[hdrs.RETRY_AFTER] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, Unauthorized):
        answer.headers[hdrs.WWW_AUTHENTICATE] = 'Bearer realm="fleetd"'
    return answer


def unexpected(error: BaseException, request_id: str) -> FleetError:
    """Log a bug and return an error that gives nothing away.

    Only the exception's type and the frames are logged: its message may quote the prompt.
    """
    frames = "".join(traceback.format_tb(error.__traceback__))
    log.error("http.internal_error request=%s type=%s\n%s", request_id, type(error).__name__, frames)
    return FleetError(
        f"An internal error stopped request {request_id}.",
        hint="The daemon's log has the details under this id.",
    )
