"""Names that stand for models."""

from __future__ import annotations

import pytest

from fleetd.models.model_names import ModelNames
from fleetd.models.names import is_path

NAMES = ModelNames("default-model", "large-model", "small-model")


@pytest.mark.parametrize(
    ("name", "stands_for"),
    [
        ("claude-opus-4-8", "large-model"),
        ("claude-sonnet-4-5-20250929", "large-model"),
        ("claude-3-5-haiku-latest", "small-model"),
        ("gpt-5.2-codex", "large-model"),
        ("gpt-5-mini", "small-model"),
        ("gpt-4.1-nano-2025-04-14", "small-model"),
        ("codex-mini-latest", "small-model"),
        ("o3", "large-model"),
        ("claude-fleet-mlx-community/Qwen3-8B-4bit", "mlx-community/Qwen3-8B-4bit"),
        ("gpt-oss-20b", None),
        ("gpt-neo-125m", None),
        ("mlx-community/claude-like", None),
        ("olmo", None),
        ("", None),
    ],
)
def test_aliases(name: str, stands_for: str | None) -> None:
    assert NAMES.alias(name) == stands_for


def test_the_default_model_takes_the_place_of_what_is_not_set() -> None:
    names = ModelNames("only")
    assert (names.large, names.small, names.alias("claude-haiku-4-5")) == ("only", "only", "only")
    large = ModelNames("default-model", "large-model")
    assert (large.small, large.alias("gpt-5-mini")) == ("large-model", "large-model")
    assert ModelNames("default-model", "", "small-model").large == "default-model"
    assert [names.named(each) for each in (None, "", "default", "other")] == ["only", "only", "only", "other"]


@pytest.mark.parametrize(
    "name",
    [
        "hf.co//etc",
        "hf.co/~root",
        "huggingface.co//etc",
        "hf.co/huggingface.co//etc",
        "claude-fleet-/etc",
        "claude-fleet-~root",
        "claude-fleet-hf.co//etc",
        "hf.co/claude-fleet-/etc",
    ],
)
def test_attack_a_name_never_becomes_a_path(name: str) -> None:
    found = NAMES.here(name)
    assert not is_path(found)
    assert not is_path(NAMES.here(found))
    assert is_path(NAMES.here("/etc"))
    assert is_path(NAMES.here("~root:latest"))
