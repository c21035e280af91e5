"""HTTP over the daemon's Unix socket, with the standard library only.

`Client.call` is one JSON request and answer; `Client.stream` is a request whose answer is server-sent events.
Every failure is raised as a FleetError: the daemon's own, rebuilt from `{"error": ...}`, or one of
fleetctl.exits.
"""

from __future__ import annotations

import errno
import http.client
import json
import os
import shlex
import socket
import stat
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from fleetctl.connection.event_stream import Comment, Data, Decoder, EventTooLong
from fleetctl.connection.home import SYSTEM_HOME, Address
from fleetctl.exits import ConnectionBroken, DaemonFailed, NoDaemon, Refused
from fleetd import __version__, errors, limits
from fleetd.text import too_long

_PIECE_BYTES = 64 * limits.KIB


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, address: Address, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._address = address

    def connect(self) -> None:
        path = self._address.socket
        if (length := len(os.fsencode(path))) > limits.SOCKET_PATH_BYTES:
            raise NoDaemon(
                f"The socket path {path} has {length} bytes; the limit is {limits.SOCKET_PATH_BYTES}.",
                hint="Use a shorter home, for the daemon as well: fleetd run --home /short/path.",
            )
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(self.timeout)
        try:
            sock.connect(str(path))
        except OSError as error:
            sock.close()
            raise explain_connect(self._address, error) from error
        self.sock = sock


class StreamedReply:
    """An answer in server-sent events. Closing it early tells the daemon to cancel."""

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        self._connection = connection
        self._response = response
        self.headers = {name.lower(): value for name, value in response.getheaders()}

    def __iter__(self) -> Iterator[Comment | Data]:
        decoder = Decoder()
        while True:
            try:
                piece = self._response.read1(_PIECE_BYTES)
                if not piece:
                    return
                yield from decoder.feed(piece)
            except TimeoutError as error:
                raise ConnectionBroken(
                    f"The daemon sent no sign of life for {limits.CLIENT_STREAM_STALL_S:.0f} s.",
                    hint="`fleetctl doctor` tells what it is doing.",
                ) from error
            except (OSError, http.client.HTTPException, EventTooLong) as error:
                raise ConnectionBroken(
                    "The connection to the daemon broke before the answer was complete.",
                    hint="`fleetctl status` tells whether it still runs; its log tells why it stopped.",
                ) from error

    def reports(self) -> Iterator[dict[str, Any]]:
        """Yield the events as JSON objects, without the comments; raises FleetError for an error event."""
        for event in self:
            if isinstance(event, Comment):
                continue
            try:
                report = json.loads(event.text)
            except ValueError as error:
                raise ConnectionBroken("The daemon sent an event that is not JSON.") from error
            if not isinstance(report, dict):
                raise ConnectionBroken("The daemon sent an event that is not a JSON object.")
            if "error" in report:
                # The status line was sent long ago, so the error's code alone says which side failed.
                raise daemon_error(report, 500)
            yield report

    def close(self) -> None:
        self._response.close()
        self._connection.close()

    def __enter__(self) -> StreamedReply:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Client:
    """Requests to one daemon; every call opens its own connection."""

    def __init__(self, address: Address) -> None:
        self.address = address

    def get(self, path: str) -> Any:
        return self.call("GET", path)

    def post(self, path: str, body: Any, *, timeout_s: float = limits.CLIENT_CALL_S) -> Any:
        return self.call("POST", path, body, timeout_s=timeout_s)

    def call(
        self, method: str, path: str, body: Any = None, *, timeout_s: float = limits.CLIENT_CALL_S
    ) -> Any:
        """Send one request and return its JSON answer, decoded.

        Raises:
            NoDaemon, ConnectionBroken: no answer.
            FleetError: the daemon's own error.
        """
        connection = _UnixConnection(self.address, timeout_s)
        try:
            response = _request(connection, method, path, body, timeout_s)
            return _json(_read(response, timeout_s), response.status)
        finally:
            connection.close()

    def stream(self, path: str, body: Any) -> StreamedReply:
        """POST a body and return the stream of events; an early refusal raises like `call`."""
        connection = _UnixConnection(self.address, limits.CLIENT_STREAM_STALL_S)
        try:
            response = _request(connection, "POST", path, body, limits.CLIENT_STREAM_STALL_S)
            if response.status >= 400:
                _json(_read(response, limits.CLIENT_STREAM_STALL_S), response.status)
            return StreamedReply(connection, response)
        except BaseException:
            connection.close()
            raise


def _request(
    connection: http.client.HTTPConnection, method: str, path: str, body: Any, timeout_s: float
) -> http.client.HTTPResponse:
    headers = {"Accept": "application/json, text/event-stream", "User-Agent": f"fleetctl/{__version__}"}
    payload = None
    if body is not None:
        payload = json.dumps(body).encode()
        headers["Content-Type"] = "application/json"
    try:
        try:
            connection.request(method, path, payload, headers)
        except (BrokenPipeError, ConnectionResetError):
            # A body that is refused half-way (too large, draining): the reason may already be waiting.
            pass
        return connection.getresponse()
    except TimeoutError as error:
        raise _silent(timeout_s) from error
    except (OSError, http.client.HTTPException) as error:
        raise _cut_off() from error


def _read(response: http.client.HTTPResponse, timeout_s: float) -> bytes:
    try:
        return response.read()
    except TimeoutError as error:
        raise _silent(timeout_s) from error
    except (OSError, http.client.HTTPException) as error:
        raise _cut_off() from error


def _silent(timeout_s: float) -> ConnectionBroken:
    return ConnectionBroken(
        f"The daemon accepted the connection but did not answer within {timeout_s:.0f} s.",
        hint="Its log tells what it is doing; restart it if it is stuck.",
    )


def _cut_off() -> ConnectionBroken:
    return ConnectionBroken(
        "The daemon closed the connection without an answer.",
        hint="It may just have stopped: `fleetctl status` tells whether it still runs.",
    )


def _json(body: bytes, status: int) -> Any:
    try:
        value = json.loads(body)
    except ValueError as error:
        raise DaemonFailed(
            f"The daemon's answer (HTTP {status}) is not JSON.",
            hint="Another program may own this socket; `fleetctl doctor` compares versions.",
        ) from error
    if status >= 400 or (isinstance(value, dict) and "error" in value and status >= 300):
        raise daemon_error(value, status)
    return value


def daemon_error(value: Any, status: int) -> errors.FleetError:
    """The typed error that `{"error": {...}}` stands for; ``status`` decides where the code is unknown."""
    fields = value.get("error") if isinstance(value, dict) else None
    if not isinstance(fields, dict):
        fields = {"message": str(fields) if fields else f"The daemon answered HTTP {status}."}
    code = str(fields.get("code") or "")
    message = str(fields.get("message") or f"The daemon answered HTTP {status}.")
    hint = str(fields.get("hint") or "")
    if hint:  # the message ends in it
        message = message.removesuffix(f" {hint}")
    param = fields.get("param")
    if code == errors.ContextLengthExceeded.code and (found := too_long.figures(message)):
        # The message is for programs that look for its words.
        told, _, hint = hint.partition(". ")
        message = f"{found[0]:,} tokens; {told.rstrip('.') or f'the model takes {found[1]:,}'}."
    if code in errors.BY_CODE:
        return errors.from_code(code, message, hint=hint, param=str(param) if param else None)
    kind = Refused if 400 <= status < 500 else DaemonFailed
    return kind(message, hint=hint, param=str(param) if param else None)


def explain_connect(address: Address, error: OSError) -> NoDaemon:
    """The error for a failed connection: one sentence that says why the daemon cannot be reached."""
    path, home = address.socket, address.home
    start = _how_to_start(address)
    if isinstance(error, PermissionError):
        owner = _owner(path) or _owner(home) or "another user"
        return NoDaemon(
            f"Permission denied on {path}: the daemon belongs to {owner}.",
            hint="Run fleetctl as that user (for a system service: sudo), or start a daemon of your own.",
        )
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        if not home.is_dir():
            return NoDaemon(f"No daemon: its home {home} does not exist.", hint=start)
        return NoDaemon(f"No daemon is running in {home} (it has no socket).", hint=start)
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except OSError:
        is_socket = True
    if not is_socket:
        return NoDaemon(f"{path} is not a socket.", hint=f"Move that file away. {start}")
    if error.errno == errno.ECONNREFUSED:
        return NoDaemon(f"No daemon is running: {path} was left behind by one that ended.", hint=start)
    if isinstance(error, (TimeoutError, BlockingIOError)):
        return NoDaemon(
            f"The daemon at {path} does not accept connections.",
            hint="It is stuck or overloaded: see its log.",
        )
    return NoDaemon(f"Cannot connect to {path}: {error.strerror or error}.", hint=start)


def _how_to_start(address: Address) -> str:
    home = "" if address.default else f" --home {shlex.quote(str(address.home))}"
    hint = f"Start it with `fleetd run{home}`, or for good with `fleetctl{home} service install`."
    if address.default and SYSTEM_HOME.is_dir():
        hint += f" A system service has its home in {SYSTEM_HOME}: `sudo fleetctl --home {SYSTEM_HOME} ...`."
    return hint


def _owner(path: os.PathLike[str]) -> str | None:
    import pwd

    try:
        return "user " + pwd.getpwuid(os.stat(path).st_uid).pw_name
    except (OSError, KeyError):
        return None
