"""Errors of a worker: as it reports them, and broken invariants."""

from __future__ import annotations

import traceback

from fleetd.engine.protocol import Failed
from fleetd.errors import EngineError, FleetError


def typed(error: Exception, message: str) -> FleetError:
    """The error itself if it is a FleetError; else an EngineError with ``message``. Prints the latter."""
    if isinstance(error, FleetError):
        return error
    traceback.print_exception(error)
    return EngineError(f"{message} ({type(error).__name__}).")


def failed(request_id: str, error: Exception, message: str) -> Failed:
    """The error, as ``typed`` makes it, as a request's last message."""
    known = typed(error, message)
    return Failed(request_id, known.code, known.message, known.hint, known.param)


def require(condition: bool, message: str) -> None:
    """For the ``validate`` methods that tests call. Raises AssertionError unless the condition holds."""
    if not condition:
        raise AssertionError(message)
