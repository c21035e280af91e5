"""Which architectures a test is run on: a sample in the quick run, all of them in the long one."""

from __future__ import annotations

import re
from collections.abc import Iterable
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
