"""Whether layers can be divided between machines."""

from __future__ import annotations

from fleetd.plan.ranks import undividable

LLAMA = {
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
}


def test_a_model_is_divided_by_what_divides_its_heads() -> None:
    assert undividable(LLAMA, 2) == undividable(LLAMA, 8) == ""
    assert undividable(LLAMA, 3) == "Its 32 attention heads cannot be divided between 3 machines."
    assert "8 pairs of keys and values" in undividable(LLAMA, 16)


def test_a_family_that_is_not_divided_is_named() -> None:
    assert (
        undividable({"model_type": "gemma3"}, 2)
        == "Layers of gemma3 models cannot be divided between machines."
    )


def test_a_model_with_a_text_part_goes_by_that() -> None:
    assert undividable({"model_type": "kimi_k25", "text_config": {"num_attention_heads": 3}}, 2)
