"""Turn a GGUF file into a folder that mlx-lm loads: config, weights, tokenizer, chat template.

Quantised weights stay quantised (``packing``); other weights get 16 bits. One slice of a tensor is in memory
at a time. ``header`` checks the file before anything in it is believed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from fleetd.errors import FleetError, ModelCorrupt
from fleetd.models.gguf import tokenizer as gguf_tokenizer
from fleetd.models.gguf.import_plan import ImportPlan, plan_import
from fleetd.models.gguf.refusals import corrupt
from fleetd.models.gguf.tensor_rows import StoredTensor, opened
from fleetd.models.safetensors_write import PlannedTensor, write_safetensors

Progress = Callable[[int, int], None]
Result = TypeVar("Result")


def import_gguf(
    source: Path,
    target: Path,
    *,
    what: str | None = None,
    generation: Mapping[str, float] = MappingProxyType({}),
    progress: Progress = lambda done, total: None,
) -> None:
    """Write the model in ``source`` into the existing, empty folder ``target``.

    Args:
        source: the file, or the first of the files that the model is spread over.
        what: the name of the file in messages; its own by default.
        generation: recommended sampling, for generation_config.json.
        progress: called with bytes of weights written and to write.

    Raises:
        ModelCorrupt: the file is damaged or malformed.
        ModelUnsupported: the file is sound, but holds something that cannot be imported.
        OSError: reading or writing failed.
    """
    what = what or source.name
    _typed(
        source, what, lambda metadata, tensors: _write(metadata, tensors, target, what, generation, progress)
    )


def read_plan(source: Path) -> ImportPlan:
    """The plan of what ``import_gguf`` would write, read from the header. Raises as it does."""
    return _typed(source, source.name, lambda metadata, tensors: plan_import(metadata, tensors, source.name))


def _typed(
    source: Path,
    what: str,
    work: Callable[[Mapping[str, Any], Mapping[str, StoredTensor]], Result],
) -> Result:
    try:
        with opened(source, what) as (header, tensors):
            return work(header.metadata, tensors)
    except (FleetError, OSError, MemoryError):
        raise
    except Exception as error:  # every number and text in the file is the publisher's
        raise ModelCorrupt(
            f"{what} could not be imported: {error}.", hint="Download the file again."
        ) from error


def _write(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    target: Path,
    what: str,
    generation: Mapping[str, float],
    progress: Progress,
) -> None:
    plan = plan_import(metadata, tensors, what)
    tokenizer = gguf_tokenizer.build(metadata, what)
    if tensors["token_embd.weight"].tensor.shape[0] < tokenizer.vocab_size:
        raise corrupt(what, f"it has no embedding for its {tokenizer.vocab_size} tokens")
    tokens = {"eos_token_id": list(tokenizer.eos_token_ids), "bos_token_id": tokenizer.bos_token_id}
    planned = [PlannedTensor(each.specs, each.pieces) for each in plan.parameters]
    write_safetensors(target / "model.safetensors", planned, progress)
    (target / "tokenizer.json").write_text(tokenizer.tokenizer_json, encoding="utf-8")
    _json(target / "tokenizer_config.json", tokenizer.tokenizer_config)
    _json(target / "generation_config.json", {**tokens, **generation})
    _json(target / "config.json", {**plan.config, **tokens})


def _json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
