"""The exit codes of fleetctl, and the errors that fleetctl itself raises."""

from __future__ import annotations

import enum
from typing import ClassVar

from fleetd.errors import FleetError, NotPaired, PairingFailed, PeerError


class Exit(enum.IntEnum):
    """The exit codes of every command, as `fleetctl --help` lists them."""

    OK = 0
    ERROR = 1
    USAGE = 2
    NO_DAEMON = 3
    REFUSED = 4
    FAILED = 5
    PAIRING = 6
    PEER = 7
    INTERRUPTED = 130

    @property
    def meaning(self) -> str:
        return _MEANINGS[self]


_MEANINGS = {
    Exit.OK: "done",
    Exit.ERROR: "something on this side failed: a file, a service, a check of `doctor`",
    Exit.USAGE: "the command line is wrong",
    Exit.NO_DAEMON: "no daemon can be reached",
    Exit.REFUSED: "the daemon refused the request (an HTTP 4xx)",
    Exit.FAILED: "the daemon failed (an HTTP 5xx), or the answer broke off",
    Exit.PAIRING: "pairing failed (wrong code, closed window), or it is not paired",
    Exit.PEER: "another machine is at fault, or none can run the model",
    Exit.INTERRUPTED: "interrupted with Ctrl-C",
}


class ClientError(FleetError):
    """An error that fleetctl found, not the daemon."""

    code = "client_error"
    exit: ClassVar[Exit] = Exit.ERROR


class NoDaemon(ClientError):
    """No daemon answers at the socket; the message says why."""

    code, exit = "no_daemon", Exit.NO_DAEMON


class ConnectionBroken(ClientError):
    """The daemon accepted the request, then stopped or sent nothing more."""

    code, exit = "connection_broken", Exit.FAILED


class Refused(ClientError):
    """A 4xx whose code this version does not know."""

    code, exit = "refused", Exit.REFUSED


class DaemonFailed(ClientError):
    """A 5xx whose code this version does not know."""

    code, exit = "daemon_failed", Exit.FAILED


def exit_for(error: FleetError) -> Exit:
    """The exit code for an error of the daemon or of fleetctl."""
    if isinstance(error, ClientError):
        return error.exit
    if isinstance(error, (NotPaired, PairingFailed)):
        return Exit.PAIRING
    if isinstance(error, PeerError):
        return Exit.PEER
    return Exit.REFUSED if 400 <= error.status < 500 else Exit.FAILED
