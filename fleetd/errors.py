"""Every error a user or a client can meet, as one tree.

    FleetError                      code, status, hint
    ├─ ConfigError                  a setting is wrong: says which, where, and the nearest valid name
    ├─ AlreadyRunning               a second daemon on one home
    ├─ PortInUse                    an address of the daemon is taken
    ├─ SocketPathTooLong            the platform's limit on Unix socket paths
    ├─ BadRequest                   the request cannot mean anything
    │  ├─ InvalidValue              a parameter is out of range or of the wrong type
    │  ├─ UnsupportedParameter      understood, would change the answer, not implemented
    │  ├─ ContextLengthExceeded     prompt plus answer do not fit the model
    │  ├─ PayloadTooLarge           the body is over the limit
    │  ├─ HeadersTooLarge           the address or a header is over the limit
    │  ├─ UnsupportedMediaType      a body that is not JSON
    │  └─ RequestTimeout            the body arrived too slowly, or stopped arriving
    ├─ Unauthorized / Forbidden     no or wrong token / a foreign Host, Origin or user
    ├─ NotFound                     no such thing here
    │  ├─ ModelNotFound             unknown model: the nearest names are offered
    │  └─ ResponseNotFound          an answer, or an item of one, that is not kept or no longer
    ├─ NotOffered                   what other servers do at this address, and this one does not
    ├─ ModelError                   the model's files are at fault
    │  ├─ ModelCorrupt              truncated, bit-flipped or malformed; names the file
    │  ├─ ModelRefused              carries code or a format that may carry code
    │  ├─ ModelUnsupported          an architecture or option the engine cannot run
    │  └─ DownloadFailed            the source did not deliver
    ├─ Overloaded                   a queue or connection limit is reached; retry later
    ├─ ScorerNotReady               a model is not measured for scoring yet: that waits for idle time
    ├─ OutOfMemory                  refused before allocating, with the figures
    ├─ DiskFull                     nothing half-written is left behind
    ├─ Draining                     the daemon is stopping
    ├─ EngineError                  the worker failed
    │  ├─ EngineDied                the worker process ended
    │  │  └─ ModelUnloaded          somebody unloaded the model while it worked
    │  └─ EngineStalled             the worker made no progress
    └─ PeerError                    another machine is at fault, or the way to it
       ├─ PeerUnreachable           no address of it answers
       ├─ PeerLost                  it went away, or fell silent, in the middle of something
       │  ├─ PeerLate               it takes much longer than was planned with
       │  └─ GroupLost              it held some of the layers of a model that is on several machines
       │     ├─ MembersApart        another of these machines does not reach it any more
       │     └─ MemberGone          its stream ended; what its machine says of it tells why
       ├─ PeerWrong                 it computed something else than this machine does
       ├─ NotPaired                 it does not know this machine, or this machine does not know it
       ├─ VersionMismatch           it speaks no protocol version that this one speaks
       ├─ Incompatible              its model or its arithmetic differs from this machine's; names the field
       ├─ ProtocolError             it sent what the protocol does not allow
       │  └─ SealBroken             a sealed chunk that fails its tag, or comes out of order
       ├─ IdentityRefused           a key, certificate or node id that is not what it says
       ├─ RosterRefused             a roster record by a stranger, with a bad signature, or over a bound
       ├─ PairingFailed             a wrong code, or an attacker in between
       │  └─ PairingClosed          no window is open: not begun, used up, tried too often or too late
       └─ NoMachine                 no machine of the fleet can run this model; says why for each

Raise where the facts are known, translate once at each boundary. ``code`` is stable: logs, HTTP bodies, the
engine protocol and fleetctl's exit status all use it.
"""

from __future__ import annotations

from typing import ClassVar


class FleetError(Exception):
    """Base of all errors meant for people.

    Args:
        message: one sentence saying what is wrong, with the figures.
        hint: what to do about it; shown on its own line.
        param: the request field or setting at fault, if there is one.
        retry_after_s: seconds after which a retry makes sense (becomes ``Retry-After``).
    """

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.param = param
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class ConfigError(FleetError):
    code, status = "config_error", 500


class AlreadyRunning(FleetError):
    code, status = "already_running", 500


class PortInUse(FleetError):
    code, status = "port_in_use", 500


class SocketPathTooLong(FleetError):
    code, status = "socket_path_too_long", 500


class BadRequest(FleetError):
    code, status = "bad_request", 400


class InvalidValue(BadRequest):
    code, status = "invalid_value", 400


class UnsupportedParameter(BadRequest):
    code, status = "unsupported_parameter", 400


class ContextLengthExceeded(BadRequest):
    code, status = "context_length_exceeded", 400


class PayloadTooLarge(BadRequest):
    code, status = "payload_too_large", 413


class HeadersTooLarge(BadRequest):
    code, status = "headers_too_large", 431


class UnsupportedMediaType(BadRequest):
    code, status = "unsupported_media_type", 415


class RequestTimeout(BadRequest):
    code, status = "request_timeout", 408


class Unauthorized(FleetError):
    code, status = "invalid_api_key", 401


class Forbidden(FleetError):
    code, status = "forbidden", 403


class NotFound(FleetError):
    code, status = "not_found", 404


class ModelNotFound(NotFound):
    code, status = "model_not_found", 404


class ResponseNotFound(NotFound):
    code, status = "response_not_found", 404


class NotOffered(FleetError):
    code, status = "not_offered", 501


class ModelError(FleetError):
    code, status = "model_error", 500


class ModelCorrupt(ModelError):
    code, status = "model_corrupt", 500


class ModelRefused(ModelError):
    code, status = "model_refused", 400


class ModelUnsupported(ModelError):
    code, status = "model_unsupported", 400


class DownloadFailed(ModelError):
    code, status = "download_failed", 502


class Overloaded(FleetError):
    code, status = "overloaded", 429


class ScorerNotReady(FleetError):
    code, status = "scorer_not_ready", 503


class OutOfMemory(FleetError):
    code, status = "out_of_memory", 503


class DiskFull(FleetError):
    code, status = "disk_full", 507


class Draining(FleetError):
    code, status = "draining", 503


class EngineError(FleetError):
    code, status = "engine_error", 500


class EngineDied(EngineError):
    code, status = "engine_died", 502


class ModelUnloaded(EngineDied):
    code, status = "model_unloaded", 503


class EngineStalled(EngineError):
    code, status = "engine_stalled", 504


class PeerError(FleetError):
    code, status = "peer_error", 502


class PeerUnreachable(PeerError):
    code, status = "peer_unreachable", 503


class PeerLost(PeerError):
    code, status = "peer_lost", 502


class PeerLate(PeerLost):
    code, status = "peer_late", 504


class GroupLost(PeerLost):
    code, status = "group_lost", 502


class MembersApart(GroupLost):
    code, status = "members_apart", 502


class MemberGone(GroupLost):
    code, status = "member_gone", 502


class PeerWrong(PeerError):
    code, status = "peer_wrong", 502


class NotPaired(PeerError):
    code, status = "not_paired", 403


class VersionMismatch(PeerError):
    code, status = "version_mismatch", 502


class Incompatible(PeerError):
    code, status = "incompatible", 502


class ProtocolError(PeerError):
    code, status = "protocol_error", 502


class SealBroken(ProtocolError):
    code, status = "seal_broken", 502


class IdentityRefused(PeerError):
    code, status = "identity_refused", 403


class RosterRefused(PeerError):
    code, status = "roster_refused", 403


class PairingFailed(PeerError):
    code, status = "pairing_failed", 403


class PairingClosed(PairingFailed):
    code, status = "pairing_closed", 403


class NoMachine(PeerError):
    code, status = "no_machine", 503


def _tree(root: type[FleetError]) -> dict[str, type[FleetError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


BY_CODE: dict[str, type[FleetError]] = _tree(FleetError)


def from_code(code: str, message: str, *, hint: str = "", param: str | None = None) -> FleetError:
    """Rebuild an error that crossed a process boundary; an unknown code becomes a plain EngineError."""
    return BY_CODE.get(code, EngineError)(message, hint=hint, param=param)
