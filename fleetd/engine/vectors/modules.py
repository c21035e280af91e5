"""A model's modules with its weights: by its config, from its files, with mlx-lm's loader."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from fleetd.control.model_facts import ModelPurpose
from fleetd.engine.failures import over_files
from fleetd.engine.vectors.bert import Bert
from fleetd.engine.vectors.decoder import BidirectionalGemma, CausalDecoder
from fleetd.engine.vectors.modern_bert import ModernBert
from fleetd.engine.vectors.pooling import F32, host
from fleetd.engine.vectors.rerank_heads import ClassifierHead
from fleetd.engine.vectors.token_rows import Pass
from fleetd.errors import ModelCorrupt, ModelUnsupported
from fleetd.models.vector_files import ENCODERS, Dense, VectorRecipe, module_file

# Converters put the layers behind the pooling beside the others, by numbers.
_IN_MAIN_FILE = re.compile(r"^(dense\.\d+\.)(?!linear\.)")


class DenseLayer(nn.Module):  # type: ignore[misc]
    """A layer behind the pooling."""

    def __init__(self, width: int, step: Dense) -> None:
        super().__init__()
        self.linear = nn.Linear(width, step.width)
        self.tanh = step.activation == "tanh"

    def __call__(self, rows: mx.array) -> mx.array:
        found: mx.array = mx.tanh(self.linear(rows)) if self.tanh else self.linear(rows)
        return found


class VectorModule(nn.Module):  # type: ignore[misc]
    """States (T, width) of a pass's tokens, with the layers that stand behind the pooling."""

    def __init__(self, config: Mapping[str, Any], purpose: ModelPurpose, dense: tuple[Dense, ...]) -> None:
        super().__init__()
        self.trunk: Any = trunk_class(config)(config)
        self.head: Any = None
        if purpose == "rerank" and config["model_type"] in ENCODERS:
            self.head = ClassifierHead(config)
        widths = [config["hidden_size"], *(each.width for each in dense)]
        self.dense = [DenseLayer(width, each) for width, each in zip(widths, dense, strict=False)]
        self.read: set[str] = set()

    def __call__(self, texts: Pass) -> mx.array:
        found: mx.array = self.trunk(texts)
        return found

    def densed(self, vectors: F32) -> F32:
        """Pooled vectors behind the layers that follow, if any do."""
        if not self.dense:
            return vectors
        rows = mx.array(vectors)
        for layer in self.dense:
            rows = layer(rows)
        return host(rows)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """The weights of a file by their names here; those of no module are left out."""
        found: dict[str, mx.array] = {}
        trunk: dict[str, mx.array] = {}
        for name, array in weights.items():
            head = ClassifierHead.renamed(name) if self.head is not None else ""
            if head:
                found[f"head.{head}"] = array
            elif name.startswith("dense."):
                found[_IN_MAIN_FILE.sub(r"\1linear.", name)] = array
            else:
                trunk[self.trunk.renamed(name)] = array
        found |= {f"trunk.{name}": array for name, array in self.trunk.cleaned(trunk).items()}
        self.read = set(found)
        return found


def trunk_class(config: Mapping[str, Any]) -> type[Bert | ModernBert | CausalDecoder]:
    if config["model_type"] == "modernbert":
        return ModernBert
    if config["model_type"] in ENCODERS:
        return Bert
    return BidirectionalGemma if config.get("use_bidirectional_attention") else CausalDecoder


class _ArgumentsAsRead:
    """A config as mlx-lm's loader hands it on."""

    @staticmethod
    def from_dict(config: dict[str, Any]) -> dict[str, Any]:
        return config


def lazy_module(
    path: Path, config: dict[str, Any], purpose: ModelPurpose, recipe: VectorRecipe
) -> VectorModule:
    """The modules with none of their weights read yet: each is when something is computed from it.

    Raises:
        ModelCorrupt: weights are missing, or do not fit.
        ModelUnsupported: the model is of a type that is not known, or needs something else.
    """

    def classes(config: dict[str, Any]) -> tuple[Any, Any]:
        return lambda parsed: VectorModule(parsed, purpose, recipe.dense), _ArgumentsAsRead

    with over_files(f"The model in {path.name} cannot be built from its config and weights"):
        try:
            module, _ = load_model(path, lazy=True, strict=False, get_model_classes=classes)
        except ValueError as error:
            if "not supported" not in str(error):
                raise
            raise ModelUnsupported(
                f"The engine has no code for models of type {config.get('model_type')!r}.",
                hint="Choose another model (fleetctl models).",
            ) from error
        for index, each in enumerate(recipe.dense):
            if each.folder:
                module.read |= _load_dense(module, index, module_file(path, each.folder, "model.safetensors"))
    wanted = {name for name, _ in tree_flatten(module.parameters())}
    # A layer may have no bias, which only its weights tell.
    for index, layer in enumerate(module.dense):
        if f"dense.{index}.linear.bias" not in module.read:
            layer.linear.pop("bias", None)
            wanted.discard(f"dense.{index}.linear.bias")
    if lacking := sorted(wanted - module.read):
        raise ModelCorrupt(f"{path.name} lacks weights: {', '.join(lacking[:3])}.", hint="Pull it again.")
    if any(name.startswith("dense.") for name in module.read - wanted):
        raise ModelUnsupported(f"{path.name} has layers that its modules.json does not name.")
    checked: VectorModule = module
    return checked


def _load_dense(module: VectorModule, index: int, file: Path) -> set[str]:
    """Read a layer behind the pooling. Returns the names of what was read."""
    arrays = cast("dict[str, mx.array]", mx.load(str(file)))
    weights = {
        f"dense.{index}.linear.{name.removeprefix('linear.')}": array for name, array in arrays.items()
    }
    module.load_weights(list(weights.items()), strict=False)
    return set(weights)


def yes_no_rows(module: VectorModule, tokens: tuple[int, int]) -> mx.array:
    """The rows (2, width) of a decoder's head for two tokens; the head itself is let go."""
    model = module.trunk.model
    wanted = mx.array(tokens)
    head = model.get("lm_head")
    if head is None:
        rows = model.model.embed_tokens(wanted)
    elif isinstance(head, nn.QuantizedLinear):
        rows = mx.dequantize(
            head.weight[wanted],
            head.scales[wanted],
            head.biases[wanted] if "biases" in head else None,
            group_size=head.group_size,
            bits=head.bits,
            mode=head.mode,
        )
    else:
        rows = head.weight[wanted]
    mx.eval(rows)
    model.pop("lm_head", None)
    found: mx.array = rows
    return found
