"""The other machines of a group, from the sockets that the daemon hands over."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence

from fleetd import limits
from fleetd.engine.groups.group_model import GroupModel
from fleetd.engine.groups.remote_stage import RemoteStage
from fleetd.engine.protocol import STAGE, StreamTag
from fleetd.engine.settings import GroupMember
from fleetd.engine.streams.handed_over import HandedOverStreams
from fleetd.errors import GroupLost


class GroupMembers:
    """Streams may come before or after ``of`` asks for them, on another thread."""

    def __init__(self, members: Sequence[GroupMember]) -> None:
        self._members = members
        self._moved = threading.Event()
        self._streams = HandedOverStreams(self._wake, eager=True)
        self._stages: list[RemoteStage] = []
        # Called, on any thread, when something came of a member that was asked what its disk has.
        self.wake: Callable[[], None] = lambda: None
        # Takes what is for no member, once the model is loaded.
        self.others: Callable[[StreamTag, socket.socket], None] = self._streams.put

    def _wake(self) -> None:
        self._moved.set()
        if any(stage.disk.asked for stage in self._stages):
            self.wake()

    def put(self, tag: StreamTag, sock: socket.socket) -> None:
        """Take a connected socket, to a member or for something else."""
        ours = any(member.stream == tag.job for member in self._members)
        (self._streams.put if ours else self.others)(tag, sock)

    def join(self, model: GroupModel) -> None:
        """Have them run the layers that ``model`` lacks; raises as ``of``."""
        model.join(self.of(model))

    def of(self, model: GroupModel) -> list[RemoteStage]:
        """All of them, for the model whose layers they have. Raises GroupLost if one does not connect."""
        self._wait()
        # All of them, or none: a block that is not wanted any more would be told of in two ways.
        direct = all(member.direct for member in self._members[1:])
        last = len(self._members) - 1
        self._stages = [
            RemoteStage(
                self._streams.connect(member.stream),
                self._moved,
                first=member.first,
                last=member.last,
                width=model.width,
                dtype=model.dtype,
                kept=model.kept_by(member.first, member.last),
                ids=model.takes_tokens,
                name=member.name,
                # The first one's hidden states come from this machine, and the last one's go back to it.
                from_before=direct and number > 0,
                to_next=direct and number < last,
                relayed=number > 0 and not direct,
            )
            for number, member in enumerate(self._members)
        ]
        return self._stages

    def _wait(self) -> None:
        """Until all are connected. Raises GroupLost."""
        until_s = time.monotonic() + limits.TICKET_S
        for member in self._members:
            while not self._streams.complete(member.stream, (STAGE,)):
                left_s = until_s - time.monotonic()
                self._moved.clear()
                if left_s <= 0:
                    raise GroupLost(f"{member.name} did not connect within {limits.TICKET_S:.0f} s.")
                if not self._streams.complete(member.stream, (STAGE,)):
                    self._moved.wait(left_s)
