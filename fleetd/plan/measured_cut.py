"""What the machines of a group were measured to take, and whether that makes another cut worth its load.

    layer_s  = seconds of a plain step in a machine's layers / layers that it has
    cost     = sum over machines of layers · layer_s  +  the longest of them      (as ``group_cut`` has it)
    gain     = cost of the cut that is held / cost of the best one - 1

Both costs are of measured seconds, so what machines were believed to be when the model was cut plays no part.

A machine outside of the group was not measured at this work. Of the machines that stay, one is the most times
as slow as believed; a machine from outside is reckoned to be as many times as slow:

    layer_s  = believed_s · the largest measured layer_s / believed_s of the machines that stay

It takes a place only if the group has lost as much time without it as the load takes: what was written so far
is what tells how much will be.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from fleetd.control.prefill_trace import GroupStage
from fleetd.plan.group_cut import GroupCut, GroupMachine, GroupModelSize, cut

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
    machines = [_measured(part.machine, layer_s) for part in held.parts]
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


class OtherMachines(msgspec.Struct, frozen=True):
    """The machines outside of a group, and by node id figures of one kind of these and of the group's own."""

    machines: tuple[GroupMachine, ...]
    # Seconds of a plain step in one layer, as far as that is known without this model.
    believed_s: Mapping[str, float]
    # What a hidden state takes from the machine that answers to another and back.
    hops_s: Mapping[str, float]
    # Seconds that a load takes of one layer, those to fetch it included.
    load_s: Mapping[str, float]


class Exchange(msgspec.Struct, frozen=True):
    """A cut in which other machines have the place of some. ``layer_s``: by node id, of all of them."""

    found: GroupCut
    gain: float
    layer_s: Mapping[str, float]


def exchange(
    model: GroupModelSize,
    held: GroupCut,
    layer_s: Mapping[str, float],
    others: OtherMachines,
    *,
    tokens: int,
    context_tokens: int,
) -> Exchange | None:
    """The best cut in which machines from outside have the place of the slowest of a group.

    It has no more machines than ``held``, and room for a prompt of ``context_tokens`` if ``held`` has.

    Args:
        layer_s: what machines were measured to take for a layer, by node id; some of ``others`` may be there.
        tokens: that the group has written since it was loaded.

    Returns None if it gains too little over the best cut that needs no other machine, if the group has not
    lost as much time as the load takes, or if nothing is known of one of its machines.
    """
    ids = [part.machine.node_id for part in held.parts]
    if any(node_id not in layer_s or node_id not in others.believed_s for node_id in ids):
        return None
    within = cut_anew(model, held, layer_s, context_tokens=context_tokens)
    best = within[0] if within is not None else held
    before_s = _cost_s(best, layer_s) + _way_s(best, others.hops_s)
    for exchanged in _exchanges(model, held, layer_s, others, context_tokens):
        found, seconds = exchanged.found, exchanged.layer_s
        after_s = _cost_s(found, seconds) + _way_s(found, others.hops_s)
        if before_s / after_s - 1 < LEAST_GAIN:
            continue
        saved_s = _token_s(best, layer_s, others.hops_s) - _token_s(found, seconds, others.hops_s)
        if tokens * saved_s >= _load_s(found, others.load_s):
            now_s = _cost_s(held, layer_s) + _way_s(held, others.hops_s)
            return replace(exchanged, gain=now_s / after_s - 1)
    return None


def _exchanges(
    model: GroupModelSize,
    held: GroupCut,
    layer_s: Mapping[str, float],
    others: OtherMachines,
    context_tokens: int,
) -> list[Exchange]:
    """Cuts without the slowest machine, without the two slowest ones and so on, the cheapest first; of those
    that cost about the same, the one in which most machines stay."""
    here = held.parts[0].machine
    fast = sorted((part.machine for part in held.parts[1:]), key=lambda each: layer_s[each.node_id])
    found = []
    for count in range(len(fast)):
        stay = [here, *fast[:count]]
        slower = max(layer_s[each.node_id] / others.believed_s[each.node_id] for each in stay)
        reckoned = {each.node_id: others.believed_s[each.node_id] * slower for each in others.machines}
        seconds = {**reckoned, **layer_s}
        new = cut(
            model,
            _measured(here, seconds),
            [_measured(each, seconds) for each in (*stay[1:], *others.machines)],
            least_tokens=min(held.tokens, context_tokens),
            most_tokens=held.tokens,
        )
        if isinstance(new, GroupCut) and len(new.parts) <= len(held.parts):
            cost_s = _cost_s(new, seconds) + _way_s(new, others.hops_s)
            found.append((round(cost_s, 6), -count, Exchange(new, 0.0, seconds)))
    return [exchanged for _, _, exchanged in sorted(found, key=lambda each: each[:2])]


def _measured(machine: GroupMachine, layer_s: Mapping[str, float]) -> GroupMachine:
    return replace(machine, bytes_per_s=machine.layer_bytes / layer_s[machine.node_id])


def _load_s(found: GroupCut, load_s: Mapping[str, float]) -> float:
    """All machines load at once."""
    return max((part.last - part.first) * load_s[part.machine.node_id] for part in found.parts)


def _token_s(found: GroupCut, layer_s: Mapping[str, float], hops_s: Mapping[str, float]) -> float:
    """Seconds of one token of one answer."""
    times = ((part.last - part.first) * layer_s[part.machine.node_id] for part in found.parts)
    return sum(times) + _way_s(found, hops_s)


def _way_s(found: GroupCut, hops_s: Mapping[str, float]) -> float:
    """What one token's hidden states take from machine to machine and back: half a way to each, and half a
    way back from the last."""
    ways = [hops_s.get(part.machine.node_id, 0.0) / 2 for part in found.parts[1:]]
    return sum(ways) + (ways[-1] if ways else 0.0)


def _cost_s(found: GroupCut, layer_s: Mapping[str, float]) -> float:
    times = [(part.last - part.first) * layer_s[part.machine.node_id] for part in found.parts]
    return sum(times) + max(times)
