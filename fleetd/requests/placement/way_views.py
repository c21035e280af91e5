"""The planner's ways as ``fleetctl plan`` shows them. Pure."""

from __future__ import annotations

from typing import Any

from fleetd.control.prefill_plan import OptionView, StepView
from fleetd.plan.beginnings import Beginning
from fleetd.plan.prefill import step_names
from fleetd.plan.refusals import THIS_NODE
from fleetd.plan.route import Rejection
from fleetd.plan.ways import Way, Ways
from fleetd.requests.job import THIS_NAME
from fleetd.requests.placement import planner_facts


def way_views(ways: Ways) -> list[OptionView]:
    """The chosen way, then the others by price, then the machines that cannot answer."""
    chosen = [] if ways.chosen is None else [way_view(ways.chosen, chosen=True)]
    others = [way_view(way) for way in ways.others]
    useless = {node for view in others if view.kind == "any" for node in view.nodes}
    helping = {node for view in others if view.kind != "remote" and view.predicted_s for node in view.nodes}
    return [
        *chosen,
        *others,
        # A machine that can neither answer nor help has one row.
        *(_rejected(each, able=each.name in helping) for each in ways.rejected if each.name not in useless),
    ]


def way_view(way: Way, *, chosen: bool = False) -> OptionView:
    """One way."""
    here, option = way.node_id == THIS_NODE, way.prefill
    fetched_from = way.begun.name if way.begun is not None else ""
    steps = [
        StepView(name, seconds, machine=fetched_from if name == step_names.FETCHED else "")
        for name, seconds in way.steps
    ]
    if option is None or option.kind == "any":
        kind = "any" if option is not None else "local" if here else "remote"
        nodes = list(option.names) if option is not None else [way.name]
        return OptionView(
            kind,
            nodes,
            way.first_token_s,
            steps,
            chosen,
            way.code,
            way.reason,
            **_known(way),
        )
    shown = planner_facts.view(option)
    return OptionView(
        kind=shown.kind if here else "remote",
        nodes=shown.nodes if here else [way.name, *option.names],
        predicted_s=way.first_token_s,
        steps=steps if option.priced else [],
        chosen=chosen,
        code=way.code,
        reason=way.reason,
        cuts=shown.cuts if here else [],
        chunk=shown.chunk,
        prefill="" if here else shown.kind,
        wire_bits=shown.wire_bits,
        **_known(way),
    )


def _known(way: Way) -> dict[str, Any]:
    """Which of the prompt's tokens are not computed, and where they come from."""
    begun = way.begun or Beginning(0, 0.0)
    return {
        "cached_tokens": way.cached_tokens,
        "restored_tokens": begun.restored,
        "fetched_tokens": begun.fetched,
        "fetched_from": begun.name,
    }


def _rejected(rejected: Rejection, *, able: bool) -> OptionView:
    """``able``: it can help, though it cannot answer."""
    here = rejected.node_id == THIS_NODE
    kind = "local" if here else "remote" if able or rejected.refusal.code == "context" else "any"
    name, refusal = THIS_NAME if here else rejected.name, rejected.refusal
    return OptionView(kind, [name], None, code=refusal.code, reason=refusal.sentence)
