"""A drafter for a model's hidden states in a folder of its own: checked against the model, and read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from fleetd.engine.cpu.packed_layers import table_rows
from fleetd.engine.heads.assistant import Assistant, AssistantConfig
from fleetd.engine.heads.block_config import BlockConfig
from fleetd.engine.heads.block_drafter import BlockDrafter
from fleetd.engine.heads.head_files import packing, read_lone_head
from fleetd.engine.heads.mtp_head import MtpHead, check_ids
from fleetd.engine.layers.stage import Stage
from fleetd.errors import ModelUnsupported
from fleetd.models.drafter_kinds import drafter_kind
from fleetd.models.folder import read_config
from fleetd.models.verify import verify
from fleetd.models.weights import weight_files
from fleetd.text.decoding import from_plain

# Copies of the model's embedding and head, which some publishers add; and what guesses how sure a guess is.
_UNUSED = ("embed_tokens.", "lm_head.", "confidence_head.")
# Tables that DFlash2's files name without ``.weight``.
_BARE = ("predecessor_codebook", "successor_codebook")


def read_drafter(folder: Path, model: Any) -> BlockDrafter | Assistant | MtpHead:
    """The drafter in ``folder``, its weights not read yet.

    Args:
        model: the one that it is to draft for, as mlx-lm has built it.

    Raises:
        ModelCorrupt, ModelRefused: from ``verify``.
        ModelUnsupported: the folder holds none, or it was made for another model.
    """
    verify(folder)
    config = read_config(folder)
    try:
        match drafter_kind(config):
            case "dflash":
                drafter: BlockDrafter | Assistant = _block_drafter(config, model)
                weights = _as_block(_tensors(folder))
            case "assistant":
                drafter = Assistant(model, from_plain(config, AssistantConfig))
                weights = _as_assistant(_tensors(folder), drafter)
            case "mtp":
                _check_head(config, model)
                return read_lone_head(folder, model)
            case None:
                raise ModelUnsupported(f"{folder.name} is no drafter for hidden states.")
        nn.quantize(drafter, class_predicate=lambda name, module: packing(name, module, weights))
        drafter.load_weights([*weights.items()], strict=True)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelUnsupported(f"{folder.name} does not belong to this model: {error}") from error
    return drafter


def _block_drafter(config: Mapping[str, Any], model: Any) -> BlockDrafter:
    stage, shape = Stage.of(model), BlockConfig.of(config)
    shape.check_fits(stage.hidden_width, stage.total, table_rows(stage.weights.embed_tokens))
    return BlockDrafter(model, shape)


def _check_head(config: Mapping[str, Any], model: Any) -> None:
    """Raises ValueError if the config of a lone head names another model's shape. Heads carry the config of
    the text model that they were taken from."""
    text, stage = {**config, **(config.get("text_config") or {})}, Stage.of(model)
    own = {
        "hidden_size": stage.hidden_width,
        "num_hidden_layers": stage.total,
        "vocab_size": table_rows(stage.weights.embed_tokens),
    }
    for name, value in own.items():
        if text.get(name, value) != value:
            raise ValueError(f"it was made for a model with {name} {text[name]}; this one has {value}")


def _tensors(folder: Path) -> dict[str, mx.array]:
    found: dict[str, mx.array] = {}
    for file in weight_files(folder):
        found |= mx.load(str(file))  # type: ignore[arg-type]  # a dict for safetensors
    return found


def _as_assistant(tensors: Mapping[str, mx.array], drafter: Assistant) -> dict[str, mx.array]:
    """The tensors of an assistant without those of keys and values, and without a copy of its table."""
    if (ids := tensors.get("masked_embedding.token_ordering")) is not None:
        check_ids("token_ordering", ids, drafter.config.args.vocab_size)
    unused = [".k_proj", ".v_proj", ".k_norm", *([] if "lm_head" in drafter else ["lm_head"])]
    return {
        name: array for name, array in tensors.items() if not name.rpartition(".")[0].endswith(tuple(unused))
    }


def _as_block(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """The tensors of a block drafter under the names that its module has for them."""
    named = {}
    for name, array in tensors.items():
        name = name.removeprefix("model.")
        if not name.startswith(_UNUSED):
            named[f"{name}.weight" if name.endswith(_BARE) else name] = array
    return named
