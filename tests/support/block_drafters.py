"""Block drafters of tiny models: random ones, and such that are right by construction."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from hidden_drafters import VOCAB, silenced
from mlx.utils import tree_flatten

from fleetd.engine.heads.block_config import BlockConfig
from fleetd.engine.heads.block_drafter import BlockDrafter
from fleetd.engine.layers.stage import Stage

WIDTH, MASK = 128, 255
SHAPE = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "num_target_layers": 4,
    "rope_theta": 10000.0,
    "block_size": 8,
}
OWN = {"target_layer_ids": [0, 2], "mask_token_id": MASK}
KINDS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "window": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12},
    "dflash2": {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": WIDTH, "selector_top_k": 64},
    "dspark": {"projector_type": "dspark", "markov_rank": WIDTH, "num_target_layers": 4},
}


def config_of(kind: str, **changes: Any) -> dict[str, Any]:
    return {**SHAPE, "dflash_config": {**OWN, **KINDS[kind]}, **changes}


def drafter_of(model: Any, kind: str, seed: int = 1) -> BlockDrafter:
    drafter = BlockDrafter(model, BlockConfig.of(config_of(kind)))
    mx.random.seed(seed)
    weights = [(name, mx.random.normal(array.shape)) for name, array in tree_flatten(drafter.parameters())]
    drafter.load_weights([(n, 0.1 * array if array.ndim > 1 else array) for n, array in weights])
    return drafter


def right_drafter(model: Any, kind: str) -> BlockDrafter:
    """A drafter of a ``simple`` model that gives what the model gives: its pairs are the model's."""
    drafter = drafter_of(model, kind)
    silenced(drafter)
    weights = Stage.of(model).weights
    table, head = weights.embed_tokens.weight, weights.lm_head.weight
    after = weights.norm(table)
    if kind == "dspark":
        # Nothing but the table of pairs says anything.
        drafter.norm.weight = mx.zeros(WIDTH)
        drafter.markov_head.markov_w1.weight, drafter.markov_head.markov_w2.weight = after, head
        return drafter
    selector = drafter.candidate_selector
    at_mask = mx.fast.rms_norm(table[MASK], drafter.norm.weight, 1e-6)
    selector.hidden_projection.weight = mx.ones((WIDTH, 1)) * at_mask / (at_mask * at_mask).sum()
    # What pairs say outweighs what the mask says.
    selector.predecessor_codebook.weight, selector.successor_codebook.weight = 1000 * after, head
    selector.most = VOCAB
    return drafter
