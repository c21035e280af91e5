"""One piece of work as a client asked for it: which model, what to generate, and where it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from fleetd.engine.protocol import Generate

Origin = Literal["socket", "http", "peer"]
Exactness = Literal["exact", "plan", "lossy"]


@dataclass(frozen=True, slots=True)
class Job:
    """``model`` as the client named it; "" or "default" is the configured one. ``route``: for the ledger.

    ``local_only``: this machine or none. It holds for every job that came from a peer, so that no request
    travels in circles. ``digest``: only a model of exactly this content will do; "" is any.
    """

    model: str
    request: Generate
    origin: Origin
    route: str
    local_only: bool = False
    digest: str = ""


class Planned(msgspec.Struct, frozen=True):
    """The first event of every job, and again when it moves to another machine.

    ``nodes`` are names for people, "this" for the machine that was asked. ``reason``: why it moved.
    """

    kind: Literal["local", "remote"]
    nodes: tuple[str, ...]
    exactness: Exactness
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.kind}; nodes={','.join(self.nodes)}"


LOCAL = Planned("local", ("this",), "exact")
