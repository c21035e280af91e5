"""Where a model that fits no machine is cut, so that several hold it.

    a step of one answer     every machine computes its layers in turn: the sum of their times
    chunks of a prompt,      all compute at once: the longest of their times
    answers beside others

Pure. All layers count as much as the largest of them. Of the ways that fit, the one with the least of sum and
longest time together is taken: on machines that are equally fast that is equal parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import msgspec

# A part of one layer costs a hop and gains next to nothing; machines with less room than this are left out.
LEAST_LAYERS = 1
# Other machines that are tried together, the roomiest first.
MOST_OTHERS = 7
# Of the room that is left beside weights, so much is for keys and values: weights take a few percent more in
# memory than is reckoned, and a member that has less room than was planned refuses its part.
ROWS_SHARE = 0.75


class GroupMachine(msgspec.Struct, frozen=True):
    """A machine that could hold a part. ``layer_bytes``: of the largest layer as it would hold it."""

    node_id: str
    name: str
    # Bytes for weights and keys and values, besides what it works with.
    room_bytes: int
    # Of its memory or its arithmetic, whichever bounds its steps; only ratios count.
    bytes_per_s: float
    layer_bytes: int
    # It has no files of the model, and can fetch so many layers; None for a machine that has the files.
    can_fetch: int | None = None


class GroupModelSize(msgspec.Struct, frozen=True):
    layers: int
    # Bytes of embedding, norm and head, as the machine that answers holds them.
    outside_bytes: int
    # Bytes that a layer keeps of a token.
    row_bytes: int
    # So many layers at the end have to be on one machine.
    together: int = 1


class GroupPart(msgspec.Struct, frozen=True):
    """Layers [first, last) on a machine; the machine that answers has the first part, and both ends."""

    machine: GroupMachine
    first: int
    last: int

    @property
    def weights_bytes(self) -> int:
        """Bytes of its layers as the machine would hold them, about."""
        return (self.last - self.first) * self.machine.layer_bytes


class GroupCut(msgspec.Struct, frozen=True):
    parts: tuple[GroupPart, ...]
    # Tokens whose keys and values have room everywhere.
    tokens: int


class Shortage(msgspec.Struct, frozen=True):
    """No machines hold it: so many bytes are missing. ``cramped``: machines without room for one layer."""

    missing_bytes: int
    cramped: tuple[GroupMachine, ...] = ()


def cut(
    model: GroupModelSize,
    here: GroupMachine,
    others: Sequence[GroupMachine],
    *,
    least_tokens: int,
    most_tokens: int,
    every: bool = False,
) -> GroupCut | Shortage:
    """The cut over this machine, which answers, and as few others as hold the model.

    Args:
        others: in any order; the fastest with room come first in the chain.
        every: all others have to hold a part, also if fewer would do.
        least_tokens: whose keys and values must have room; ``most_tokens``: more are not wanted.
    """
    able = [each for each in others if _most_layers(model, each, least_tokens) >= LEAST_LAYERS]
    able.sort(key=lambda each: (-each.room_bytes, each.node_id))
    able = able[:MOST_OTHERS]
    for count in range(len(others) if every else 1, len(able) + 1):
        found = []
        for some in combinations(able, count):
            chosen = [here, *_chain(model, some)]
            if (counted := _counts(model, chosen, least_tokens)) is not None:
                found.append((counted, chosen))
        if found:
            (_, counts), chosen = min(found, key=lambda each: each[0][0])
            return _parts(model, chosen, counts, least_tokens, most_tokens)
    have = sum(_most_layers(model, each, least_tokens) for each in able)
    have += _most_layers(model, here, least_tokens, ends=True)
    missing = max(1, model.layers - have) * (here.layer_bytes + least_tokens * model.row_bytes)
    cramped = tuple(each for each in others if each not in able)
    if _most_layers(model, here, least_tokens, ends=True) < LEAST_LAYERS:
        cramped = (here, *cramped)
    return Shortage(missing, cramped)


def cut_with_fetchers(
    model: GroupModelSize,
    here: GroupMachine,
    having: Sequence[GroupMachine],
    fetchers: Sequence[GroupMachine],
    *,
    least_tokens: int,
    most_tokens: int,
    every: bool = False,
) -> GroupCut | Shortage:
    """The cut over machines that have the files; if these do not hold the model, also over ``fetchers``.
    ``every``: over all of them."""
    found: GroupCut | Shortage = Shortage(0)
    both = [*having, *fetchers]
    for others in (both,) if every else (having, both):
        found = cut(model, here, others, least_tokens=least_tokens, most_tokens=most_tokens, every=every)
        if isinstance(found, GroupCut):
            break
    return found


def step_s(found: GroupCut, hops_s: float) -> float:
    """Seconds of one token of one answer, if ``bytes_per_s`` are bytes per second that steps read of weights.

    Args:
        hops_s: what hidden states take from machine to machine and back, over all of them.
    """
    parts = (
        (part.last - part.first) * part.machine.layer_bytes / part.machine.bytes_per_s for part in found.parts
    )
    return sum(parts) + hops_s


def _chain(model: GroupModelSize, machines: Sequence[GroupMachine]) -> list[GroupMachine]:
    """The order of the other machines: the fastest first, or the roomiest last if layers stay together."""
    if model.together > LEAST_LAYERS:
        return sorted(machines, key=lambda each: (each.room_bytes, each.node_id))
    return sorted(machines, key=lambda each: (-each.bytes_per_s, each.node_id))


def _most_layers(model: GroupModelSize, machine: GroupMachine, tokens: int, *, ends: bool = False) -> int:
    room = machine.room_bytes - (model.outside_bytes if ends else 0)
    each = machine.layer_bytes + tokens * model.row_bytes
    most = model.layers if machine.can_fetch is None else min(model.layers, machine.can_fetch)
    return min(most, max(0, room) // each)


def _counts(
    model: GroupModelSize, machines: Sequence[GroupMachine], tokens: int
) -> tuple[float, list[int]] | None:
    """The cost, and the layers of each machine, none of which has none; None if they do not hold all."""
    most = [_most_layers(model, machine, tokens, ends=index == 0) for index, machine in enumerate(machines)]
    layer_s = [machine.layer_bytes / machine.bytes_per_s for machine in machines]
    least = [LEAST_LAYERS] * len(machines)
    least[-1] = max(LEAST_LAYERS, model.together)
    if sum(most) < model.layers or sum(least) > model.layers or not _at_least(most, least):
        return None
    best: tuple[float, list[int]] | None = None
    # The longest time is some number of layers of some machine; within it the fastest take all they can.
    for longest_s in sorted({n * s for s, m in zip(layer_s, most, strict=True) for n in range(1, m + 1)}):
        bounded = [min(m, int(longest_s / s + 1e-9)) for s, m in zip(layer_s, most, strict=True)]
        if not _at_least(bounded, least) or sum(bounded) < model.layers:
            continue
        counts = _fastest_first(model.layers, least, bounded, layer_s)
        times = [n * s for n, s in zip(counts, layer_s, strict=True)]
        cost = sum(times) + max(times)
        if best is None or cost < best[0] * (1 - 1e-9):
            best = cost, counts
    return best


def _at_least(counts: Sequence[int], least: Sequence[int]) -> bool:
    return all(count >= bound for count, bound in zip(counts, least, strict=True))


def _fastest_first(
    layers: int, least: Sequence[int], most: Sequence[int], layer_s: Sequence[float]
) -> list[int]:
    counts = list(least)
    left = layers - sum(counts)
    for index in sorted(range(len(most)), key=lambda i: (layer_s[i], i)):
        more = min(left, most[index] - counts[index])
        counts[index] += more
        left -= more
    return counts


def _parts(
    model: GroupModelSize,
    machines: Sequence[GroupMachine],
    counts: Sequence[int],
    least_tokens: int,
    most_tokens: int,
) -> GroupCut:
    parts, first = [], 0
    tokens = most_tokens
    for index, (machine, count) in enumerate(zip(machines, counts, strict=True)):
        parts.append(GroupPart(machine, first, first + count))
        first += count
        left = machine.room_bytes - count * machine.layer_bytes
        left -= 0 if index else model.outside_bytes
        tokens = min(tokens, int(ROWS_SHARE * left) // max(1, count * model.row_bytes))
    return GroupCut(tuple(parts), max(least_tokens, tokens))
