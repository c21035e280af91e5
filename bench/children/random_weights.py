"""Models with random weights and another model's tokenizer. What they say means nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any


def save(model: Any, config: dict[str, Any], folder: Path, tokenizer: Path) -> None:
    """Give the model's parameters random values, and write it as a model folder.

    Args:
        tokenizer: the model folder whose tokenizer it gets; ``config`` has its number of tokens.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_map

    mx.random.seed(7)

    def drawn(array: mx.array) -> mx.array:
        noise = mx.random.normal(array.shape)
        return noise * 0.04 if array.ndim > 1 else 1.0 + noise * 0.1

    weights = dict(tree_flatten(tree_map(drawn, model.parameters())))
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    for pattern in ("tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt"):
        for path in tokenizer.glob(pattern):
            shutil.copy(path, folder / path.name)


def of_tokenizer(tokenizer: Path) -> dict[str, Any]:
    """What a model's config says of its tokenizer."""
    given = json.loads((tokenizer / "config.json").read_text())
    return {"vocab_size": given["vocab_size"], "eos_token_id": given.get("eos_token_id")}
