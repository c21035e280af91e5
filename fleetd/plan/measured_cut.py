"""What the machines of a group were measured to take, and whether that makes another cut worth its load.

    layer_s  = seconds of a plain step in a machine's layers / layers that it has
    cost     = sum over machines of layers · layer_s  +  the longest of them      (as ``group_cut`` has it)
    gain     = cost of the cut that is held / cost of the best one - 1

Both costs are of measured seconds, so what machines were believed to be when the model was cut plays no part.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from fleetd.control.prefill_trace import GroupStage
from fleetd.plan.group_cut import GroupCut, GroupModelSize, cut

# A new cut reads weights for minutes and throws kept prompts away: it has to gain so much.
LEAST_GAIN = 0.15
# Plain steps of each machine, the medians of which count.
LEAST_STEPS = 32


def layer_seconds(held: GroupCut, stages: Sequence[GroupStage]) -> Mapping[str, float] | None:
    """Seconds that each machine takes for one of its layers in a plain step, by node id.

    Args:
        stages: what was measured of the parts of ``held``, in their order.

    Returns None if they are of another cut, or of too few steps.
    """
    if [(stage.first, stage.last) for stage in stages] != [(part.first, part.last) for part in held.parts]:
        return None
    if any(stage.steps < LEAST_STEPS or stage.computed_s <= 0 for stage in stages):
        return None
    return {
        part.machine.node_id: stage.computed_s / (stage.last - stage.first)
        for part, stage in zip(held.parts, stages, strict=True)
    }


def cut_anew(
    model: GroupModelSize, held: GroupCut, layer_s: Mapping[str, float], *, context_tokens: int
) -> tuple[GroupCut, float] | None:
    """The cut over the same machines that is best by what they take for a layer, and its gain.

    It has room for a prompt of ``context_tokens`` if ``held`` has. Returns None if it gains too little, or if
    one of the machines was not measured.
    """
    if any(part.machine.node_id not in layer_s for part in held.parts):
        return None
    machines = [
        replace(part.machine, bytes_per_s=part.machine.layer_bytes / layer_s[part.machine.node_id])
        for part in held.parts
    ]
    found = cut(
        model,
        machines[0],
        machines[1:],
        least_tokens=min(held.tokens, context_tokens),
        most_tokens=held.tokens,
        every=True,
    )
    if not isinstance(found, GroupCut):
        return None
    gain = _cost_s(held, layer_s) / _cost_s(found, layer_s) - 1
    return (found, gain) if gain >= LEAST_GAIN else None


def _cost_s(found: GroupCut, layer_s: Mapping[str, float]) -> float:
    times = [(part.last - part.first) * layer_s[part.machine.node_id] for part in found.parts]
    return sum(times) + max(times)
