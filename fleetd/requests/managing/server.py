"""What paired machines may do with this machine's models: the verbs of the API, and a look at the list.

    ManageQuestion ──► may that machine manage this one ──► ``ModelOperations`` ──► progress … done

The request's stream is the life of it: when the machine that asked is gone, a download or a load ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

from fleetd import limits
from fleetd.control.model_change import ModelDone
from fleetd.control.model_listing import FoundModels, ModelListing
from fleetd.errors import Forbidden, Overloaded
from fleetd.p2p.membership.identity import short_id
from fleetd.p2p.session.transport import PeerStream
from fleetd.p2p.token_bucket import TokenBucket
from fleetd.process.observe import get_logger
from fleetd.requests.admission import ConcurrencyLimit, ServingContext
from fleetd.requests.concurrency import with_beats, with_heartbeats
from fleetd.requests.managing import messages
from fleetd.requests.managing.messages import LookQuestion, LookTold, ManageQuestion
from fleetd.requests.managing.operations import ModelOperations
from fleetd.requests.remote.message_codec import ALIVE
from fleetd.requests.remote.peer_stream import drained

log = get_logger("fleetd.managing")

#: The models of this machine as others may see them or, for words, those of the hub.
Look = Callable[[str], Coroutine[Any, Any, ModelListing | FoundModels]]


class ManageServer:
    """Args:
    enabled: False if the settings forbid that others manage this machine.
    confirmed: True for the node id of a machine that a person here has confirmed.
    """

    def __init__(
        self,
        operations: ModelOperations,
        look: Look,
        context: ServingContext,
        *,
        enabled: bool,
        confirmed: Callable[[str], bool],
        name_of: Callable[[str], str],
    ) -> None:
        self._operations = operations
        self._look = look
        self._enabled = enabled
        self._confirmed = confirmed
        self._name_of = name_of
        self._limit = ConcurrencyLimit(
            context, "manage", limits.MANAGED, "is being managed by as many", limits.MANAGED_PER_PEER
        )
        self._asked: dict[str, TokenBucket] = {}

    async def run(self, peer: str, body: bytes, stream: PeerStream) -> None:
        """The handler of ``messages.RUN``. Raises FleetError: what the other side is told."""
        asked = messages.decode(body, ManageQuestion)
        self._admit(peer)
        with self._limit.serving(peer, asked.verb) as served:
            log.info("models.managed", by=self._name_of(peer), verb=asked.verb, model=asked.model)
            async with (
                aclosing(self._operations.run(asked.verb, asked.model)) as events,
                aclosing(with_heartbeats(events, limits.JOB_ALIVE_S)) as beats,
            ):
                async for event in beats:
                    stream.send(ALIVE if event is None else messages.encode(messages.told(event)))
                    served.done = isinstance(event, ModelDone)
                    await drained(stream)

    async def look(self, peer: str, body: bytes, stream: PeerStream) -> None:
        """The handler of ``messages.LOOK``. Raises as ``run``."""
        asked = messages.decode(body, LookQuestion)
        self._admit(peer)
        with self._limit.serving(peer, "look") as served:
            looking = self._look(asked.words)
            found = await with_beats(looking, limits.JOB_ALIVE_S, lambda: stream.send(ALIVE))
            told = LookTold(found) if isinstance(found, ModelListing) else LookTold(found=found)
            stream.send(messages.encode(told))
            served.done = True

    def _admit(self, peer: str) -> None:
        """Raises Forbidden, Overloaded."""
        if not self._enabled:
            raise Forbidden(
                "It refuses to be managed by other machines: fleet.manage is off there.",
                hint="Type the command on that machine, or set fleet.manage = true in its fleetd.toml and "
                "restart it.",
            )
        if not self._confirmed(peer):
            raise Forbidden(
                "It is managed only by machines that a person there has confirmed.",
                hint=f"On that machine: `fleetctl peers prompts {short_id(peer)} yes` confirms this one.",
            )
        bucket = self._asked.setdefault(peer, TokenBucket(limits.MANAGE_BURST, limits.MANAGE_PER_S))
        if not bucket.take(1, asyncio.get_running_loop().time()):
            raise Overloaded("It was asked for too much at once.", hint="Try again in a minute.")
