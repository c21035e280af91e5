"""Managing the models of another machine from this one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

import msgspec

from fleetd.control.model_change import ModelDone, ModelProgress, Verb
from fleetd.control.model_listing import FoundModels, ModelListing
from fleetd.errors import FleetError, NotFound, PeerLost, ProtocolError, VersionMismatch
from fleetd.p2p.session.transport import PeerStream
from fleetd.requests.managing import messages
from fleetd.requests.managing.messages import LookQuestion, LookTold, ManageQuestion, ManageTold
from fleetd.requests.ports import FleetPort
from fleetd.requests.remote.peer_stream import next_message, require_message, said_by


class ManagedMachine(msgspec.Struct, frozen=True):
    """Another machine, by its node id and what people call it, and the version of fleetd that it runs."""

    node_id: str
    name: str
    software: str = ""


async def run(
    fleet: FleetPort, machine: ManagedMachine, verb: Verb, model: str
) -> AsyncGenerator[ModelProgress | ModelDone, None]:
    """Have a machine do it; the last event is ModelDone. Closing it early ends it there.

    Raises:
        InvalidValue: no machine has a model of this name.
        FleetError: what that machine says, naming it; PeerLost if it leaves.
    """
    question = messages.encode(ManageQuestion(verb, messages.checked_name(model)))
    with _asked(fleet, machine, messages.RUN, question) as stream:
        while (body := await next_message(stream)) is not None:
            event = messages.decode(body, ManageTold).event
            yield event
            if isinstance(event, ModelDone):
                return
        raise PeerLost("It ended before it was done.", hint="The same command goes on or begins again.")


async def look(fleet: FleetPort, machine: ManagedMachine, words: str = "") -> ModelListing | FoundModels:
    """The models of a machine or, for words, those of the hub, each with whether it fits there.

    Raises FleetError: what that machine says, naming it.
    """
    with _asked(fleet, machine, messages.LOOK, messages.encode(LookQuestion(words))) as stream:
        answer = messages.decode(await require_message(stream), LookTold)
        found = answer.found if words else answer.listing
        if found is None:
            raise ProtocolError("It answered something else than it was asked.")
        return found


@contextmanager
def _asked(fleet: FleetPort, machine: ManagedMachine, method: str, question: bytes) -> Iterator[PeerStream]:
    """The stream of a request, cancelled at the end; errors name the machine."""
    try:
        stream = fleet.request(machine.node_id, method, question)
        try:
            stream.end()
            yield stream
        finally:
            stream.cancel()
    except FleetError as error:
        if type(error) is NotFound:
            # Versions before this one do not know the method.
            raise VersionMismatch(
                f"{machine.name} runs fleetd {machine.software or 'of an earlier version'}, which is not "
                "managed from other machines.",
                hint=f"Update fleetd on {machine.name}, then try again.",
            ) from error
        raise said_by(machine.name, error) from error
