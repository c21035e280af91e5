"""What a worker tells of an error: those that are foreseen as they are, all others by their kind."""

from __future__ import annotations

import traceback

from fleetd.engine.protocol import Failed
from fleetd.errors import EngineError, FleetError


def typed(error: Exception, said: str) -> FleetError:
    """The error itself, or ``said`` with the kind of one that nobody foresaw, which is printed."""
    if isinstance(error, FleetError):
        return error
    traceback.print_exception(error)
    return EngineError(f"{said} ({type(error).__name__}).")


def failed(request_id: str, error: Exception, said: str) -> Failed:
    """The same as a request's last message."""
    known = typed(error, said)
    return Failed(request_id, known.code, known.message, known.hint, known.param)
