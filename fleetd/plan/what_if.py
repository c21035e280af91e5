"""How soon the first token of prompts would come: on this machine alone, and with others. Pure.

All times are the planner's own prices of a fleet that has loaded the model and is idle. What people compare
before they buy a machine is the best of all ways: a request asks more of a machine whose speed is modelled,
until it has measured it.
"""

from __future__ import annotations

from collections.abc import Iterable

from fleetd.plan.refusals import THIS_NODE
from fleetd.plan.ways import Way, Ways

# Lengths of prompts that are compared.
LENGTHS = tuple(1 << power for power in range(10, 18))


def lengths(context_tokens: int) -> list[int]:
    """The lengths of prompts that a model takes."""
    return [tokens for tokens in LENGTHS if tokens < context_tokens]


def all_ways(ways: Ways) -> list[Way]:
    """Every way that has a price."""
    chosen = () if ways.chosen is None else (ways.chosen,)
    return [way for way in (*chosen, *ways.others) if way.prefill is not None and way.prefill.priced]


def warm_s(way: Way) -> float:
    """Seconds to the first token if nothing has to be waited for or loaded first."""
    if way.prefill is None:
        raise AssertionError("all_ways has those with a price")
    return way.prefill.predicted_s - way.prefill.load_s + way.price.network_s


def soonest(ways: Iterable[Way]) -> Way | None:
    """The way with the soonest first token; of equal ones the first."""
    return min(ways, key=warm_s, default=None)


def alone(ways: Ways) -> Way | None:
    """The way of this machine without any other; None if it cannot answer."""
    own = (way for way in all_ways(ways) if way.node_id == THIS_NODE)
    return next((way for way in own if way.prefill is not None and way.prefill.kind == "local"), None)
