"""A cut as people read it: who holds what, how fast that is, and why it is cut so. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from fleetd.control.group_view import GroupPartView, GroupView
from fleetd.plan.group_cut import GroupCut, GroupModelSize, GroupPart, Shortage, step_s
from fleetd.requests.job import THIS_NAME

# Machines whose layers take times that differ by less than this share count as equally fast.
_ALIKE = 0.1


def group_view(
    found: GroupCut | Shortage,
    size: GroupModelSize,
    hops_s: Mapping[str, float],
    *,
    named: bool,
    from_hub: bool = False,
) -> GroupView:
    """
    Args:
        hops_s: by node id, what a hidden state takes from this machine to another and back. From member to
            member it is taken to need as long as from here.
        named: a person has named the machines.
        from_hub: layers that a machine lacks come from the hub, those of this machine, too.
    """
    if isinstance(found, Shortage):
        missing = (
            f"{found.missing_bytes / 1e9:.1f} GB are missing on the machines that could hold it together."
        )
        return GroupView(layers=size.layers, why=missing)
    last = len(found.parts) - 1
    parts = [
        _part(part, size, _hop_s(hops_s.get(part.machine.node_id, 0.0), index, last), here=not index)
        for index, part in enumerate(found.parts)
    ]
    token_s = step_s(found, sum(part.hop_s for part in parts))
    why = _why(found, named=named, from_hub=from_hub)
    return GroupView(parts, size.layers, found.tokens, 1 / token_s, why=why)


def cut_anew_because(before: GroupCut, now: GroupCut, layer_s: Mapping[str, float], gain: float) -> str:
    """Why a loaded model is cut anew, as a sentence.

    Args:
        layer_s: by node id, measured seconds of one layer.
        gain: of the new cut over the one before, 0.15 for 15 %.
    """
    slow = max(before.parts, key=lambda part: layer_s[part.machine.node_id])
    fast = min(before.parts, key=lambda part: layer_s[part.machine.node_id])
    times = layer_s[slow.machine.node_id] / layer_s[fast.machine.node_id]
    return (
        f"Cut anew, as a layer was measured to take {times:.1f} times as long on {_name(before, slow)} as on "
        f"{_name(before, fast)}: layers {_layers(before, now)}. That gains about {100 * gain:.0f} %."
    )


def exchanged_because(before: GroupCut, now: GroupCut, layer_s: Mapping[str, float], gain: float) -> str:
    """Why other machines take the place of some, as a sentence. ``layer_s``, ``gain``: as
    ``cut_anew_because``."""
    left, came = _without(before, now), _without(now, before)
    slow = max(left, key=lambda part: layer_s[part.machine.node_id])
    fast = min(came or now.parts, key=lambda part: layer_s[part.machine.node_id])
    times = layer_s[slow.machine.node_id] / layer_s[fast.machine.node_id]
    names, places = (" and ".join(part.machine.name for part in parts) for parts in (came, left))
    who = f"with {names} in the place of {places}" if came else f"without {places}"
    return (
        f"Cut anew {who}, as a layer was measured to take {times:.1f} times as long on {_name(before, slow)} "
        f"as is reckoned for {_name(before, fast)}: layers {_layers(before, now)}. That gains about "
        f"{100 * gain:.0f} %."
    )


def _without(one: GroupCut, other: GroupCut) -> list[GroupPart]:
    """The parts of machines that are in one cut and not in the other."""
    node_ids = {part.machine.node_id for part in other.parts}
    return [part for part in one.parts if part.machine.node_id not in node_ids]


def _layers(before: GroupCut, now: GroupCut) -> str:
    return ", ".join(f"{part.first} to {part.last - 1} on {_name(before, part)}" for part in now.parts)


def _name(found: GroupCut, part: GroupPart) -> str:
    """The machine's name for people."""
    here = part.machine.node_id == found.parts[0].machine.node_id
    return THIS_NAME if here else part.machine.name


def _hop_s(there_and_back_s: float, index: int, last: int) -> float:
    """What of a step's way is a machine's: that to it, and of the last one also that back to this machine."""
    if not index:
        return 0.0
    return there_and_back_s if index == last else there_and_back_s / 2


def _part(part: GroupPart, size: GroupModelSize, hop_s: float, *, here: bool) -> GroupPartView:
    count, machine = part.last - part.first, part.machine
    weights = count * machine.layer_bytes + (size.outside_bytes if here else 0)
    return GroupPartView(
        THIS_NAME if here else machine.name,
        part.first,
        part.last,
        weights,
        max(0, machine.room_bytes - weights) // max(1, count * size.row_bytes),
        count * machine.layer_bytes / machine.bytes_per_s,
        hop_s,
        machine.can_fetch is not None,
    )


def _why(found: GroupCut, *, named: bool, from_hub: bool) -> str:
    count = len(found.parts)
    chosen = (
        f"These {count} machines were named."
        if named
        else f"No machine has room for all of it; {count} are the fewest that hold it together."
    )
    fetching = [_name(found, part) for part in found.parts if part.machine.can_fetch is not None]
    names, source = " and ".join(fetching), "the hub" if from_hub else "this machine"
    fetched = f" The layers of {names} are fetched from {source} first." if fetching else ""
    return f"{chosen} {_division(found)}{fetched}"


def _division(found: GroupCut) -> str:
    """Why one machine has more layers than another, as a sentence."""
    names = [THIS_NAME, *(part.machine.name for part in found.parts[1:])]
    counts = [part.last - part.first for part in found.parts]
    if max(counts) - min(counts) <= 1:
        return "Each has about the same number of layers."
    layer_s = [part.machine.layer_bytes / part.machine.bytes_per_s for part in found.parts]
    most, fastest = counts.index(max(counts)), layer_s.index(min(layer_s))
    if layer_s[most] <= layer_s[fastest] * (1 + _ALIKE):
        least = counts.index(min(counts))
        if layer_s[most] < layer_s[least] * (1 - _ALIKE):
            return f"{names[most]} is faster than {names[least]} and has more layers."
        return f"{names[most]} has more room than {names[least]} and more layers."
    return f"{names[fastest]} is faster than {names[most]}, and has no room for more layers."
