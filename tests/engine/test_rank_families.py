"""Layers of each family that mlx-lm divides, on two ranks: the whole model's tokens, nearly its numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tiny_architectures
from rank_workers import places

from fleetd.plan.ranks import FAMILIES

HERE = Path(__file__).parent
# Of the largest logit: sums of f32 in another order.
ROUNDING = 1e-5
TINY = sorted(FAMILIES & set(tiny_architectures.FAMILIES))
FEW = ["deepseek_v3", "gpt_oss", "llama", "qwen3_moe"]
# Its head is divided too.
REFUSED = "qwen3_5"


def compared(names: Sequence[str]) -> dict[str, Any]:
    """What rank 0 of two found."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                HERE / "rank_families.py",
                msgspec.json.encode(place).decode(),
                *names,
            ],
            stdout=subprocess.PIPE,
            env=environment,
        )
        for place in places(2)
    ]
    try:
        said, _ = ranks[0].communicate(timeout=150)
        found: dict[str, Any] = json.loads(said.splitlines()[-1])
        return found
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize("names", [FEW, pytest.param(TINY, marks=pytest.mark.long)])
def test_two_ranks_give_the_tokens_of_the_whole_model_and_hold_about_half(names: list[str]) -> None:
    found = compared([*names, REFUSED])
    assert "head" in found.pop(REFUSED)
    assert sorted(found) == names
    for name, each in found.items():
        assert isinstance(each, dict), (name, each)
        assert each["equal"], name
        assert each["apart"] < ROUNDING, name
        assert 0.5 <= each["share"] < 0.65, name


def test_families_that_can_be_divided_are_in_mlx_lm() -> None:
    import importlib

    for name in FAMILIES - {"mistral"}:
        assert hasattr(importlib.import_module(f"mlx_lm.models.{name}").Model, "shard"), name
