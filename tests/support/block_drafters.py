"""Block drafters of tiny models: random ones, and such that are right by construction."""

from __future__ import annotations

import json
from pathlib import Path
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


def config_for(model: Any, kind: str, layers: list[int]) -> dict[str, Any]:
    """For a model of any width, with states of these of its layers."""
    rows, width = Stage.of(model).weights.embed_tokens.weight.shape
    own = {**KINDS[kind], "target_layer_ids": layers, "mask_token_id": rows - 1, "markov_rank": width}
    own["num_target_layers"] = len(model.layers)
    return config_of(
        kind,
        hidden_size=width,
        vocab_size=rows,
        num_target_layers=len(model.layers),
        dflash_config=own,
    )


def drafter_of(model: Any, kind: str, seed: int = 1, config: dict[str, Any] | None = None) -> BlockDrafter:
    """A drafter with random weights; ``config`` is ``config_of(kind)`` if it is None."""
    drafter = BlockDrafter(model, BlockConfig.of(config or config_of(kind)))
    mx.random.seed(seed)
    weights = [(name, mx.random.normal(array.shape)) for name, array in tree_flatten(drafter.parameters())]
    drafter.load_weights([(n, 0.1 * array if array.ndim > 1 else array) for n, array in weights])
    return drafter


def right_drafter(model: Any, kind: str, config: dict[str, Any] | None = None) -> BlockDrafter:
    """A drafter of a ``simple`` model that gives what the model gives: its pairs are the model's."""
    drafter = drafter_of(model, kind, config=config)
    silenced(drafter)
    weights = Stage.of(model).weights
    table, head = weights.embed_tokens.weight, weights.lm_head.weight
    after = weights.norm(table)
    if kind == "dspark":
        # Nothing but the table of pairs says anything.
        drafter.norm.weight = mx.zeros(drafter.norm.weight.shape)
        drafter.markov_head.markov_w1.weight, drafter.markov_head.markov_w2.weight = after, head
        return drafter
    selector = drafter.candidate_selector
    at_mask = mx.fast.rms_norm(table[MASK], drafter.norm.weight, 1e-6)
    selector.hidden_projection.weight = mx.ones((WIDTH, 1)) * at_mask / (at_mask * at_mask).sum()
    # What pairs say outweighs what the mask says.
    selector.predecessor_codebook.weight, selector.successor_codebook.weight = 1000 * after, head
    selector.most = VOCAB
    return drafter


def saved(folder: Path, drafter: BlockDrafter, config: dict[str, Any], prefix: str = "") -> Path:
    """The drafter's folder, as its publisher has it; ``prefix`` is what its tensors' names begin with."""
    folder.mkdir()
    tensors = {}
    for name, array in tree_flatten(drafter.parameters()):
        bare = name.removesuffix(".weight") if "codebook" in name else name
        tensors[prefix + bare] = array
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"})
    # As publishers have it: it names code, which is never run.
    named = {**config, "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}
    (folder / "config.json").write_text(json.dumps(named))
    return folder
