"""What follows when an attempt to have a request answered fails. Pure.

    some of the answer was passed on, or ``limits.ATTEMPTS`` machines have failed ──────► stop
    another machine may do better ──────────────────────────────────────────────────────► elsewhere
    the request is wrong, says ┬ this machine, or a second one ─────────────────────────► stop
                               ├ another machine, which has served nothing yet ─────────► confirm
                               └ another machine, which has served ─────────────────────► confirm_loaded

A request that is wrong is wrong on every machine: trying more than two of them makes people wait longer for
the same answer. A machine that calls a request wrong which another machine serves has said something untrue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fleetd import limits
from fleetd.errors import (
    BadRequest,
    ContextLengthExceeded,
    FleetError,
    Incompatible,
    ModelRefused,
    ModelUnsupported,
    PeerWrong,
)
from fleetd.plan.refusals import THIS_NODE

# What another machine would say as well, if it is true.
_DETERMINISTIC = (BadRequest, ModelRefused, ModelUnsupported)
# What may well differ between machines, of these: memory, and versions.
_DIFFERS = (ContextLengthExceeded, ModelUnsupported)

# "confirm": ask one more machine whether the request is wrong; "confirm_loaded": only a machine that has
# the model loaded.
Next = Literal["stop", "elsewhere", "confirm", "confirm_loaded"]


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    """A machine called a request wrong."""

    node_id: str
    # The digest of the model there, with whose failures this one counts.
    digest: str
    error: FleetError

    @property
    def untrue(self) -> FleetError:
        """What the machine is blamed for once another one has served the request."""
        kind = Incompatible if isinstance(self.error, _DIFFERS) else PeerWrong
        return kind(f"It refused what another machine served ({self.error}).")


@dataclass(slots=True)
class Attempts:
    """The machines that one prompt was tried on."""

    # Node ids of those that failed.
    tried: frozenset[str] = frozenset()
    # The first that called the request wrong, once another one is asked.
    refusal: RefusedRequest | None = None

    def after(self, node_id: str, error: FleetError, *, answering: bool, proven: bool) -> Next:
        """What follows from the failure of a machine.

        Args:
            answering: some of the answer has been passed on.
            proven: that machine has served requests, and not failed since.
        """
        self.tried |= {node_id}
        if answering or len(self.tried) >= limits.ATTEMPTS:
            return "stop"
        if not isinstance(error, _DETERMINISTIC):
            return "elsewhere"
        if node_id == THIS_NODE or self.refusal is not None:
            return "stop"
        return "confirm_loaded" if proven else "confirm"
