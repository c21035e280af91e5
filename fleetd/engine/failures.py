"""Errors of a worker: as it reports them, and broken invariants."""

from __future__ import annotations

import errno
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from fleetd import limits
from fleetd.engine.protocol import Failed
from fleetd.errors import EngineError, FleetError, ModelCorrupt, ModelUnsupported, OutOfMemory


@contextmanager
def over_files(failing: str, *besides: type[Exception]) -> Iterator[None]:
    """Blame a publisher's files for the errors of libraries' code that runs over them.

    Args:
        failing: what fails, as the beginning of a sentence.
        besides: errors that have other causes here; they pass, as a failing disk's and those of fleetd do.

    Raises:
        ModelUnsupported: a library is missing; some of mlx-lm's models end the process for that.
        ModelCorrupt: any other error, as the values and sizes in the files are arbitrary.
    """
    try:
        yield
    except FleetError:
        raise
    except (ImportError, NotImplementedError, SystemExit) as error:
        text = "mlx-lm's code for it ends the process" if isinstance(error, SystemExit) else _text(error)
        raise ModelUnsupported(
            f"{failing}: it needs something that the engine lacks ({text}).",
            hint="Choose another model (fleetctl models).",
        ) from error
    except Exception as error:
        of_system = _no_memory(error) or (isinstance(error, OSError) and error.errno is not None)
        if of_system or (isinstance(error, besides) and not isinstance(error, RecursionError)):
            raise
        raise ModelCorrupt(f"{failing}: {type(error).__name__}: {_text(error)}.") from error


def _no_memory(error: BaseException) -> bool:
    """True if memory is short, in the words of Python, the system or mlx ("[malloc] Unable to …")."""
    if isinstance(error, RuntimeError):
        return "malloc]" in str(error) or str(error) == "can't start new thread"
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def _text(error: BaseException) -> str:
    """It may quote the files at length."""
    return str(error)[: limits.ERROR_TEXT_CHARS]


def typed(error: BaseException, message: str) -> FleetError:
    """The error itself if it is a FleetError, OutOfMemory if there is no memory; else an EngineError with
    ``message``, and prints it."""
    if isinstance(error, FleetError):
        return error
    if _no_memory(error):
        return OutOfMemory(
            f"{message.rstrip(': ')} (this machine has no memory left).",
            hint="Close other programs, or choose a smaller model.",
        )
    traceback.print_exception(error)
    return EngineError(f"{message} ({type(error).__name__}).")


def failed(request_id: str, error: BaseException, message: str) -> Failed:
    """The error, as ``typed`` makes it, as a request's last message."""
    known = typed(error, message)
    return Failed(request_id, known.code, known.message, known.hint, known.param)


def require(condition: bool, message: str) -> None:
    """Raise AssertionError unless the condition holds. For the ``validate`` methods that tests call."""
    if not condition:
        raise AssertionError(message)


class MemberLost(BaseException):
    """A member is gone, or sent what is not due: the worker ends, as all that it holds is useless.

    No ``Exception``: it is not the failure of one request, nor of the model's files.
    """

    def __init__(self, error: FleetError) -> None:
        super().__init__(str(error))
        self.error = error
