"""``card_model NAME FOLDER TOKENIZER_FOLDER``: write a model of ``card_models`` on this device."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench.harness import card_models
from bench.harness.child import serve

_GROUP = 64


def main(name: str, folder: Path, tokenizer: Path) -> None:
    import mlx.core as mx
    import mlx.nn as nn

    shape, bits = card_models.shape(name)
    vocabulary = _vocabulary(tokenizer)
    limits = {"vocab_size": vocabulary, "max_position_embeddings": card_models.CONTEXT_TOKENS}
    config: dict[str, Any] = {**shape.config, **limits}
    if shape.module == "qwen3_5":
        config = {"model_type": shape.module, "text_config": config}
    module = importlib.import_module(f"mlx_lm.models.{shape.module}")
    # Small shapes are alike: their files must not be, or they would be one model under several names.
    mx.random.seed(zlib.crc32(name.encode()))
    # Nothing is computed before its file is written: the weights before rounding are never all there.
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    if bits:
        nn.quantize(model, group_size=_GROUP, bits=bits)
        config["quantization"] = {"group_size": _GROUP, "bits": bits}
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    _save(model, part)
    _save_tokenizer(tokenizer, part, vocabulary)
    ends = {"eos_token_id": 2, "bos_token_id": 1, "torch_dtype": "bfloat16"}
    (part / "config.json").write_text(json.dumps(config | ends))
    part.rename(folder)


def _save(model: Any, folder: Path) -> None:
    """One file for each layer, and one for all else."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    shards: dict[str, dict[str, mx.array]] = defaultdict(dict)
    for path, array in tree_flatten(model.parameters()):
        _, found, rest = path.partition("layers.")
        shards[f"layer-{int(rest.partition('.')[0]):03}" if found else "other"][path] = array
    index: dict[str, str] = {}
    for name in list(shards):
        arrays, file = shards.pop(name), f"model-{name}.safetensors"
        mx.save_safetensors(str(folder / file), arrays, metadata={"format": "mlx"})
        index |= dict.fromkeys(arrays, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _vocabulary(tokenizer: Path) -> int:
    if card_models.small():
        return int(json.loads((tokenizer / "config.json").read_text())["vocab_size"])
    return card_models.VOCABULARY


def _save_tokenizer(tokenizer: Path, folder: Path, vocabulary: int) -> None:
    """The tokenizer, with words that no text has up to the size of the vocabulary."""
    shutil.copy(tokenizer / "tokenizer_config.json", folder)
    known = json.loads((tokenizer / "tokenizer.json").read_text())
    words = known["model"]["vocab"]
    words |= {f"Ġfiller{number}": number for number in range(len(words), vocabulary)}
    (folder / "tokenizer.json").write_text(json.dumps(known))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    serve(lambda question: {})
