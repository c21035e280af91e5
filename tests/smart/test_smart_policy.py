from __future__ import annotations

import msgspec
import pytest

from fleetd.errors import InvalidValue
from fleetd.smart.policy import Policy, Wanted, resolve


@pytest.mark.parametrize(
    ("wanted", "enabled", "runs"),
    [
        (True, False, True),
        (False, True, False),
        (None, False, False),
        (None, True, True),
        (Wanted(), False, True),
        (Wanted(enabled=False), True, False),
    ],
)
def test_what_is_said_goes_over_what_is_set(wanted: bool | Wanted | None, enabled: bool, runs: bool) -> None:
    policy = resolve(wanted, Policy(enabled=enabled))
    assert (policy is not None) == runs
    assert policy is None or policy.enabled


def test_fields_that_are_left_out_come_from_the_defaults() -> None:
    defaults = Policy(target_ratio=0.3, min_prompt_tokens=500, mode="sparse")
    policy = resolve(Wanted(target_ratio=0.1, preserve_boundaries=False), defaults)
    assert policy == Policy(
        enabled=True, target_ratio=0.1, min_prompt_tokens=500, mode="sparse", preserve_boundaries=False
    )


def test_bounds_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(InvalidValue, match="min_keep_tokens 10 is over max_keep_tokens 5"):
        resolve(Wanted(min_keep_tokens=10, max_keep_tokens=5), Policy())


@pytest.mark.parametrize(
    "body",
    [
        '{"target_ratio": 0}',
        '{"target_ratio": 1.1}',
        '{"mode": "magic"}',
        '{"max_keep_tokens": -1}',
        '{"target": 1}',
    ],
)
def test_what_is_out_of_range_or_unknown_is_no_policy(body: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(body, type=Wanted)
