"""The shape of a block drafter, from its config.json, and whether it can belong to a model. Without mlx.

The field's configs differ: what is asked for first may stand in ``dflash_config`` or beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from fleetd.text.decoding import from_plain

_KINDS = ("full_attention", "sliding_attention")


class BlockConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A drafter's shape, under the names of its config and of the ``dflash_config`` in it."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    # Layers of the model whose outputs it takes, from 0.
    target_layer_ids: tuple[int, ...]
    # The token that stands for one that is to be guessed.
    mask_token_id: int
    # Tokens of the blocks that it was trained with: the newest one and the guesses; DSpark's: the guesses.
    block_size: int
    # Layers of the model that it was made for; 0 if it does not say.
    num_target_layers: int = 0
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    # "full_attention" or "sliding_attention" for each layer; () is the former for all.
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    # Whether a token of a block sees only those before it; None: in layers with a window.
    is_causal: bool | None = None
    final_logit_softcapping: float | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    # DFlash2's convolutions and selector; 0 without.
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    # DSpark's table of pairs; 0 without.
    markov_rank: int = 0

    @property
    def most(self) -> int:
        """Guesses of one block."""
        return self.block_size if self.markov_rank else self.block_size - 1

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> BlockConfig:
        """The shape that a config.json describes. Raises ValueError if it is none, or not known here."""
        own = config["dflash_config"]
        rope = config.get("rope_parameters") or config.get("rope_scaling")
        given = {**config, **own, "rope_scaling": rope}
        if isinstance(rope, dict) and "rope_theta" in rope:
            given["rope_theta"] = rope["rope_theta"]
        if "causal" in own:
            given["is_causal"] = own["causal"]
        if _is_dspark(config, own):
            given.setdefault("markov_rank", 256)
            given.setdefault("is_causal", False)
        try:
            found = from_plain({name: given[name] for name in cls.__struct_fields__ if name in given}, cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"its config does not fit: {error}") from None
        found._check(given)
        return found

    def _check(self, given: Mapping[str, Any]) -> None:
        """Raises ValueError for a shape that contradicts itself, or has parts that are not known here."""
        if given.get("attention_bias") or given.get("attention_sink_bias"):
            raise ValueError("its attention has biases")
        if self.markov_rank and given.get("markov_head_type", "vanilla") != "vanilla":
            raise ValueError("its Markov head is of a kind not known here")
        if self.layer_types and (
            len(self.layer_types) != self.num_hidden_layers or not {*self.layer_types} <= {*_KINDS}
        ):
            raise ValueError("its layer_types are not those of its layers")
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise ValueError("its layers have a window, and its config does not say how large")
        if self.most < 1 or not self.target_layer_ids or min(self.target_layer_ids) < 0:
            raise ValueError("its blocks or its layers of the model are none")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError("its mask is no token")

    def check_fits(self, width: int, layers: int, tokens: int) -> None:
        """Raises ValueError if the drafter was made for another model than one with so wide hidden states, so
        many layers and so many token ids."""
        if self.hidden_size != width:
            raise ValueError(f"it takes hidden states of {self.hidden_size}, the model's are of {width}")
        made_for = self.num_target_layers or layers
        if made_for != layers or max(self.target_layer_ids) >= layers:
            most = max(made_for, max(self.target_layer_ids) + 1)
            raise ValueError(f"it was made for a model of {most} layers; this one has {layers}")
        if self.vocab_size != tokens:
            raise ValueError(f"it knows {self.vocab_size} tokens; the model has {tokens}")


def _is_dspark(config: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    architectures = config.get("architectures") or [""]
    return own.get("projector_type") == "dspark" or "DSpark" in str(architectures[0]) or "markov_rank" in own
