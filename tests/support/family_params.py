"""Which architectures a test is run on: a sample in the quick run, all of them in the long one."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest
from tiny_architectures import LONG, OWN, WITHOUT_EXPERTS, config_of

_COUNT = re.compile(r"(moe_)?(n|num)_(routed_|local_)?experts")


def _has_experts(config: dict[str, Any]) -> bool:
    return any(_COUNT.fullmatch(key) and value for key, value in config.items()) or (
        "text_config" in config and _has_experts(config["text_config"])
    )


# MLX multiplies with experts' matrices on a CPU in f32 only.
EXPERTS = {name for name in OWN if _has_experts(config_of(name))} - WITHOUT_EXPERTS.keys()


def each(names: Iterable[str], *, every: int = 1) -> list[Any]:
    """For ``pytest.mark.parametrize``. ``every``: only every so many-th of the sample in the quick run."""
    wanted = sorted(names)
    quick = [name for name in wanted if name not in LONG][::every]
    return [name if name in quick else pytest.param(name, marks=pytest.mark.long) for name in wanted]


def few(names: Collection[str], quick: Collection[str]) -> list[Any]:
    """For ``pytest.mark.parametrize``: ``quick``, and the others of ``names`` in the long run."""
    assert set(quick) <= set(names), "a family that has no such test"
    return [name if name in quick else pytest.param(name, marks=pytest.mark.long) for name in sorted(names)]


def in_turn(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """For ``pytest.mark.parametrize`` of two names: each value once or more, all pairs in the long run.

    Dictionaries name their values.
    """
    rows, columns = (
        [*values.items()]
        if isinstance(values, Mapping)
        else [(getattr(v, "__name__", str(v)), v) for v in values]
        for values in (first, second)
    )
    most = min(len(rows), len(columns))
    return [
        pytest.param(a, b, id=f"{left}-{right}", marks=() if i % most == j % most else pytest.mark.long)
        for i, (left, a) in enumerate(rows)
        for j, (right, b) in enumerate(columns)
    ]
