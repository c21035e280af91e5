from __future__ import annotations

import msgspec
import pytest

from fleetd.compression.policy import SmartPrefillBody, SmartPrefillPolicy, resolve
from fleetd.errors import InvalidValue


@pytest.mark.parametrize(
    ("wanted", "enabled", "runs"),
    [
        (True, False, True),
        (False, True, False),
        (None, False, False),
        (None, True, True),
        (SmartPrefillBody(), False, True),
        (SmartPrefillBody(enabled=False), True, False),
    ],
)
def test_what_is_said_goes_over_what_is_set(
    wanted: bool | SmartPrefillBody | None, enabled: bool, runs: bool
) -> None:
    policy = resolve(wanted, SmartPrefillPolicy(enabled=enabled))
    assert (policy is not None) == runs
    assert policy is None or policy.enabled


def test_fields_that_are_left_out_come_from_the_defaults() -> None:
    defaults = SmartPrefillPolicy(target_ratio=0.3, min_prompt_tokens=500, mode="sparse")
    policy = resolve(SmartPrefillBody(target_ratio=0.1, preserve_boundaries=False), defaults)
    assert policy == SmartPrefillPolicy(
        enabled=True, target_ratio=0.1, min_prompt_tokens=500, mode="sparse", preserve_boundaries=False
    )


def test_bounds_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(InvalidValue, match="min_keep_tokens 10 is over max_keep_tokens 5"):
        resolve(SmartPrefillBody(min_keep_tokens=10, max_keep_tokens=5), SmartPrefillPolicy())


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
        msgspec.json.decode(body, type=SmartPrefillBody)
