"""How many tokens to keep: a share, bounds in tokens, or as many as hold most of the attention."""

from __future__ import annotations

from collections.abc import Sequence

from fleetd.compression.policy import SmartPrefillPolicy, wanted_ratio

# Without a target: the smallest set of units with this share of the attention, within these shares of the
# tokens. Above the higher one a long prompt is hardly worth shortening.
TAU = 0.95
LEAST, MOST = 0.05, 0.5
# Units stand out that have this many times the median's attention.
_STANDS_OUT = 2.0
# Without a target and without scores there is nothing to tell how much matters.
_UNSCORED = 0.25


def budget(
    policy: SmartPrefillPolicy,
    tokens: int,
    fixed_tokens: int,
    costs: Sequence[int],
    attention: Sequence[float] | None,
    at_least: float = 0.0,
) -> int:
    """How many of ``tokens`` to keep, pinned ones included.

    Args:
        fixed_tokens: tokens of the pinned units.
        costs: tokens of each unit that may be dropped.
        attention: how much each of them matters, at least 0; None if the text was not scored.
        at_least: the least share that the gate allows; the client's own bound on tokens still holds.
    """
    if ratio := wanted_ratio(policy):
        wanted = ratio * tokens
    elif attention is None:
        wanted = max(_UNSCORED * tokens, fixed_tokens + LEAST * tokens)
    else:
        massive = fixed_tokens + _mass_tokens(costs, attention)
        wanted = min(max(massive, LEAST * tokens), max(MOST * tokens, fixed_tokens + LEAST * tokens))
    wanted = max(wanted, at_least * tokens, policy.min_keep_tokens)
    if policy.max_keep_tokens:
        wanted = min(wanted, policy.max_keep_tokens)
    return min(tokens, int(wanted))


def _mass_tokens(costs: Sequence[int], attention: Sequence[float]) -> int:
    """Token count of the smallest set of units that holds the share ``TAU`` of the attention.

    A unit's mass is its score times its tokens, as far as it stands out: even the dullest text gets some
    attention, and together that is much. Where nothing stands out, all of it counts.
    """
    floor = _STANDS_OUT * sorted(attention)[len(attention) // 2] if attention else 0.0
    mass = [max(0.0, value - floor) * cost for value, cost in zip(attention, costs, strict=True)]
    left = (1 - TAU) * sum(mass)
    if left <= 0:
        return sum(costs)
    order = sorted(range(len(mass)), key=lambda i: (attention[i], -i))
    kept = sum(costs)
    for i in order:
        left -= mass[i]
        if left < 0:
            break
        kept -= costs[i]
    return kept
