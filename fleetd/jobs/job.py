"""One piece of work as a client asked for it: which model, what to generate, and where it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fleetd.engine.protocol import Generate


@dataclass(frozen=True, slots=True)
class Job:
    """``model`` as the client named it; "" or "default" is the configured one. ``route``: for the ledger."""

    model: str
    request: Generate
    origin: Literal["socket", "http"]
    route: str
