"""From a verified folder to a model for vectors or for reranking, and the facts the daemon needs about it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from fleetd import limits
from fleetd.control.model_facts import MeasuredSpeed, ModelShape
from fleetd.engine.cpu.packed_layers import weights_bytes
from fleetd.engine.failures import over_files
from fleetd.engine.load.load_findings import versions
from fleetd.engine.load.model_reading import (
    Device,
    HeldWeights,
    context_tokens,
    dtype_of,
    keep_weights,
    known_tokens,
    little_besides,
    memory_budget,
    verified_config,
)
from fleetd.engine.load.readable_folder import readable
from fleetd.engine.measure.memory import admit_weights
from fleetd.engine.protocol import Loading, Ready
from fleetd.engine.settings import WorkerSettings
from fleetd.engine.vectors.modules import VectorModule, lazy_module, yes_no_rows
from fleetd.engine.vectors.reading import TextReader
from fleetd.engine.vectors.rerank_heads import YesNoHead
from fleetd.engine.vectors.token_rows import Pass, TokenRow
from fleetd.engine.vectors.vector_model import FRAME, Embedder, Reranker, VectorModel
from fleetd.models import catalog
from fleetd.models.vector_files import VectorRecipe, longest_text, recipe
from fleetd.plan.chip_speeds import compiles_late

# Texts of a measurement have so many tokens, as paragraphs have.
_MEASURED_TOKENS = 64


class LoadedVectors(msgspec.Struct, frozen=True):
    """A model for vectors that can run."""

    model: VectorModel
    facts: Ready


def load_vectors(
    settings: WorkerSettings, device: Device, report: Callable[[Loading], None]
) -> LoadedVectors:
    """Verify, read and measure. Raises as ``loading.load``."""
    begun = time.monotonic()
    config = verified_config(settings, report)
    path = Path(settings.path)
    how = _recipe(settings, path, config)
    room = memory_budget(device, settings)
    on_disk = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    weights = HeldWeights.of(settings, config, device, room, on_disk)
    admit_weights(settings.name, weights.expected, room)
    report(Loading("reading", 0, on_disk))
    with readable(path) as place, little_besides(path, weights.expected, weights.device):
        module = lazy_module(place, config, settings.purpose, how)
        longest = longest_text(path, config, context_tokens(config))
        with over_files(f"The model in {path.name} cannot be used"):
            vocab_size = known_tokens(module)
            reader = TextReader.of(place, vocab_size, longest)
            model = _model(settings, module, reader, how, config)
        admit_weights(settings.name, weights.bytes_of(module, tied=False), room)
        weights.hold(module)
    report(Loading("measuring"))
    pace = _pace(model, longest, device)
    keep_weights(device, settings)
    shape = ModelShape(
        architecture=str(config["model_type"]),
        weights_bytes=weights_bytes(module),
        context_tokens=longest,
        dtype=dtype_of(module),
        layers=int(config["num_hidden_layers"]),
        cpu_arithmetic=weights.arithmetic,
        unshareable="It reads texts, and writes none.",
        purpose=settings.purpose,
        vector_width=model.width if isinstance(model, Embedder) else 0,
    )
    facts = Ready(
        device=device,
        shape=shape,
        vocab_size=vocab_size,
        kv_budget_bytes=0,
        has_chat_template=False,
        tool_calls=False,
        reasoning=False,
        load_s=time.monotonic() - begun,
        versions=versions(weights.arithmetic),
        speed=MeasuredSpeed(prefill_tok_s=pace),
        last_layer=shape.layers,
    )
    return LoadedVectors(model, facts)


def _recipe(settings: WorkerSettings, path: Path, config: dict[str, Any]) -> VectorRecipe:
    """How vectors are made; the catalog has the prompts of families whose files leave them out."""
    if settings.purpose == "rerank":
        return VectorRecipe("cls")
    found = recipe(path, config)
    entry = catalog.find(settings.name)
    if entry is None or any(found.prompts.values()):
        return found
    return msgspec.structs.replace(found, prompts=entry.prompts)


def _model(
    settings: WorkerSettings,
    module: VectorModule,
    reader: TextReader,
    how: VectorRecipe,
    config: dict[str, Any],
) -> VectorModel:
    if settings.purpose == "embedding":
        width = how.dense[-1].width if how.dense else int(config["hidden_size"])
        return Embedder(module=module, reader=reader, recipe=how, width=width)
    if module.head is not None:
        return Reranker(module=module, reader=reader, head=module.head, frame=None)
    head = YesNoHead(yes_no_rows(module, (reader.token("yes"), reader.token("no"))))
    return Reranker(module=module, reader=reader, head=head, frame=reader.frame(*FRAME))


@over_files("The model cannot compute anything", RuntimeError)
def _pace(model: VectorModel, longest: int, device: Device) -> float:
    """How many tokens per second the model reads, in texts as long as paragraphs."""
    length = min(_MEASURED_TOKENS, longest)
    texts = [TokenRow([1] * length)] * (limits.VECTOR_MEASURED_TOKENS // length)
    # The first texts also compile kernels: if that takes long, all that the others need.
    model.results(Pass(texts if compiles_late(device) else texts[:1]))
    begun = time.perf_counter()
    model.results(Pass(texts))
    return len(texts) * length / (time.perf_counter() - begun)
