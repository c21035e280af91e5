"""Serves the requests of members: one task for each, within a bound per member."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fleetd import limits
from fleetd.errors import Draining, FleetError, NotFound, Overloaded
from fleetd.p2p.session.transport import PeerStream
from fleetd.process.observe import get_logger

log = get_logger("fleetd.p2p")

#: Serves one request: the peer's node id, the request's body, its stream. Its exception goes to the peer.
Handler = Callable[[str, bytes, PeerStream], Coroutine[Any, Any, None]]


class RequestServer:
    """``name`` is this machine's, for error messages."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._handlers: dict[str, Handler] = {}
        self._running: dict[str, set[asyncio.Task[None]]] = {}
        self._stopping = False

    def handle(self, method: str, handler: Handler) -> None:
        """Serve requests for ``method`` with ``handler``."""
        self._handlers[method] = handler

    def serve(
        self, peer: str, stream: PeerStream, method: str, body: bytes, group: asyncio.TaskGroup
    ) -> None:
        """Start the handler of a request in ``group``, or cancel its stream with the reason."""
        handler = self._handlers.get(method)
        running = self._running.setdefault(peer, set())
        if self._stopping:
            stream.cancel(Draining("This machine is stopping."))
        elif handler is None:
            stream.cancel(NotFound(f"This machine has nothing called {method[:64]!r}."))
        elif len(running) >= limits.PEER_REQUESTS:
            stream.cancel(Overloaded(f"{len(running)} requests of this machine already run here."))
        else:
            task = group.create_task(self._run(handler, peer, stream, method, body))
            running.add(task)
            task.add_done_callback(running.discard)
            stream.on_cancel = task.cancel

    async def stop(self) -> None:
        """Refuse new requests and cancel those that run; waits for at most ``limits.GOODBYE_S``."""
        self._stopping = True
        tasks = [task for running in self._running.values() for task in running]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=limits.GOODBYE_S)

    async def _run(self, handler: Handler, peer: str, stream: PeerStream, method: str, body: bytes) -> None:
        try:
            await handler(peer, body, stream)
            stream.end()
        except FleetError as error:
            stream.cancel(error)
        except asyncio.CancelledError:
            stream.cancel(Draining("This machine is stopping."))
            raise
        except Exception as error:  # the request's boundary: one bad request must not end the node
            # A bug. Its text may contain a prompt, so only the type is sent and logged.
            bug = type(error).__name__
            log.warning("peer.request_failed", method=method, bug=bug)
            stream.cancel(FleetError(f"Internal error ({bug}) on {self._name}."))
