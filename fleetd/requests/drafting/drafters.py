"""Which machines could draft an answer, in which order they are asked, and how people are told. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from fleetd.control.prefill_plan import DraftsView
from fleetd.engine.protocol import Ready
from fleetd.engine.speculation.local_sources import DRAFTER, HIDDEN_NAMES, LOCAL_NAMES
from fleetd.plan.refusals import THIS_NODE
from fleetd.plan.route import gigabytes
from fleetd.requests.job import THIS_NAME
from fleetd.requests.members.members import Member, eligible, expected_load_s

Where = Literal["auto", "here", "peers"]
# With a longer round trip, most drafts come too late for the text that they continue.
_NEAR_S = 0.05


class DrafterCandidate(msgspec.Struct, frozen=True):
    """A machine that could draft, and with which model."""

    # THIS_NODE for this machine.
    node_id: str
    # The machine's name, for people.
    name: str
    model: str
    # Of a model on another machine; "" here.
    digest: str = ""
    # Seconds that loading takes there, by the machine's card; 0 if the model is loaded.
    load_s: float = 0.0

    @property
    def where(self) -> Literal["here", "peer"]:
        return "here" if self.node_id == THIS_NODE else "peer"


def candidates(others: Iterable[Member], target: str, model: str, where: Where) -> list[DrafterCandidate]:
    """The machines to ask, the best one first.

    A machine that has the model loaded, is near and is idle comes first: its drafts take no time from the
    model that verifies them. A model does not draft for itself in one worker.
    """
    here = [DrafterCandidate(THIS_NODE, THIS_NAME, model)] if model != target else []
    if where == "here":
        return here
    peers: list[tuple[tuple[bool, bool, bool, float], DrafterCandidate]] = []
    for member in others:
        found = member.model(model)
        if found is not None and found.digest and eligible(member, found.digest) is None:
            busy, cold = member.card.running + member.card.waiting > 0, found.state != "loaded"
            order = busy, member.rtt_s > _NEAR_S, cold, member.rtt_s
            load_s = expected_load_s(found) if cold else 0.0
            drafter = DrafterCandidate(member.node_id, member.name, found.name, found.digest, load_s)
            peers.append((order, drafter))
    peers.sort(key=lambda peer: peer[0])
    first = [candidate for (busy, far, cold, _), candidate in peers if not (busy or far or cold)]
    rest = [candidate for _, candidate in peers[len(first) :]]
    return [*first, *rest] if where == "peers" else [*first, *here, *rest]


def no_room(here: Member, model: str, target: str) -> str:
    """Why ``model`` cannot be loaded here beside ``target``, as a sentence; "" if it can, or is.

    Both are needed at the same time, so neither gives way to the other.
    """
    found = here.model(model)
    if found is None or found.state == "loaded" or found.memory_bytes <= here.card.usable_bytes:
        return ""
    need, free = gigabytes(found.memory_bytes), gigabytes(here.card.usable_bytes)
    return f"{model} needs {need} beside {target} on this machine; {free} are free, and neither gives way."


def view(facts: Ready, tokens: int, draft_model: str, drafters: Sequence[str]) -> DraftsView:
    """How the answer to a prompt of ``tokens`` tokens would be drafted.

    Args:
        draft_model: the model that would draft; "" for none.
        drafters: machines that could run it, in the order in which they are asked.
    """
    if facts.speculation_width < 2:
        return DraftsView(facts.speculation, reason=facts.speculation)
    # The next token and one draft.
    if tokens + 2 > facts.speculation_context:
        most = facts.speculation_context
        return DraftsView(
            facts.speculation, reason=f"blocks were found exact up to {most} tokens of context only"
        )
    return DraftsView(
        facts.speculation,
        sources=[
            *([DRAFTER] if drafters else []),
            *LOCAL_NAMES,
            *(name for name in HIDDEN_NAMES if facts.draft_head.startswith(f"{name}:")),
        ],
        width=facts.speculation_width,
        draft_model=draft_model,
        drafters=list(drafters),
    )
