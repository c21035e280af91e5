"""From a verified folder to a model that can run, and the facts the daemon needs about it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.utils import load_config, load_model

from fleetd import limits
from fleetd.cache.block_names import LateBasis
from fleetd.control.daemon_status import MemoryBudget
from fleetd.engine import address_space, cpu, device_memory
from fleetd.engine.calibrate import Speeds, calibrate
from fleetd.engine.failures import over_files
from fleetd.engine.load_findings import FindingsKey, LoadFindings, block_basis
from fleetd.engine.memory import admit_weights, human
from fleetd.engine.protocol import Loading, Ready
from fleetd.engine.sampling import SamplingDefaults
from fleetd.engine.scoring.known_profiles import ProfileStore
from fleetd.engine.scoring.profile_search import ProfileSearch
from fleetd.engine.sequence_state import batches, checkpoints
from fleetd.engine.sequence_state.kinds import StateKind, kind_of
from fleetd.engine.sequence_state.parts import all_parts
from fleetd.engine.sequence_state.parts import sizes as sizes_of
from fleetd.engine.settings import WorkerSettings
from fleetd.engine.shared_prefill.sharable import Sharable, accelerator_name
from fleetd.engine.sparse_prefill.sparse import Sparse
from fleetd.engine.speculation.exactness_probe import ExactnessVerdict, ProbePlan, probe
from fleetd.engine.speculation.verdicts import VerdictKey
from fleetd.engine.stage import Stage
from fleetd.engine.tool_formats import has_reasoning, with_format
from fleetd.errors import ModelCorrupt, ModelUnsupported
from fleetd.hardware import memory, mlx_device
from fleetd.hardware.device_facts import DeviceFacts
from fleetd.models import digest as digests
from fleetd.models import manifest
from fleetd.models.memory_need import WORKING_BYTES, build_bytes, weights_in_memory
from fleetd.models.verify import verify
from fleetd.plan.state_sizes import StateSizes

Device = Literal["cpu", "metal", "cuda"]
# Prefix cache: this share of what is left for KV, so that keeping old prompts never starves new ones.
PREFIX_SHARE = 0.25
# Prompts of unequal length to try a batch with, and how far rounding may move its numbers, as a share of the
# largest.
_UNEQUAL, _ROUNDING = ([3, 4, 5, 6, 7], [8]), 0.03
# A context can be huge and memory small; without a stated context this is what llama-family models had.
FALLBACK_CONTEXT = 4096
# A token's id and the length of its text.
_ENTRY = struct.Struct("<iI")


@dataclass(frozen=True, slots=True)
class Loaded:
    model: Any
    tokenizer: Any
    facts: Ready
    prefix_bytes: int
    defaults: SamplingDefaults
    # Whether several answers can be decoded in one batch.
    together: bool
    # Whether blocks of tokens give the bytes of single steps.
    verdict: ExactnessVerdict
    # None if no other machine can help with it.
    sharable: Sharable | None
    # None if prompts must be prefilled whole.
    sparse: Sparse | None
    search: ProfileSearch
    # Stores speeds that were measured after the load, for the next one.
    keep_speeds: Callable[[Speeds], None]
    # Seconds of a chunk of prompt, by its tokens.
    chunk_s: dict[int, float]
    # What decides the bytes of keys and values besides the tokens.
    basis: LateBasis
    # Whether some layers cannot be taken back to an earlier token, so that states are kept at some.
    keeps_states: bool


def pick_device(wanted: str) -> Device:
    """Set MLX's default device and name it. Raises ModelUnsupported if a GPU is demanded in vain."""
    if wanted != "cpu" and mx.is_available(mx.gpu):
        mx.set_default_device(mx.gpu)
        device: Device = "metal" if mx.metal.is_available() else "cuda"
        device_memory.prepare(device, memory.system_memory(()).total_bytes)
        return device
    if wanted == "gpu":
        raise ModelUnsupported(
            "engine.device is gpu, but MLX sees no GPU.", hint="Set engine.device to auto."
        )
    mx.set_default_device(mx.cpu)
    return "cpu"


def memory_budget(device: Device, settings: WorkerSettings) -> MemoryBudget:
    """Memory this worker may take, by the daemon's own rule and from what MLX says of the device now."""
    facts = DeviceFacts("cpu") if device == "cpu" else mlx_device.describe()
    found = memory.system_memory(memory.cgroup_folders(Path("/")))
    return memory.budget(
        memory.of_card(found, facts.card_bytes, facts.card_free_bytes),
        device_limit_bytes=facts.limit_bytes,
        held_bytes=settings.held_bytes,
        fraction=settings.memory_fraction,
        max_bytes=settings.max_memory_bytes,
        overcommit=settings.overcommit,
    )


def keep_weights(device: Device, settings: WorkerSettings) -> None:
    """Keep a model, or the part of it that was loaded, from being paged out, if the settings want that."""
    if device == "metal" and settings.wire_weights:
        device_memory.wire_weights(device, mlx_device.describe().limit_bytes)


def load(settings: WorkerSettings, device: Device, report: Callable[[Loading], None]) -> Loaded:
    """Verify, read, warm up and measure.

    Raises:
        ModelCorrupt, ModelRefused: from ``verify``; ModelCorrupt also for files that libraries cannot use.
        ModelUnsupported: an architecture that mlx-lm does not have, or that needs something else.
        OutOfMemory: refused before reading.
    """
    begun = time.monotonic()
    path = Path(settings.path)
    config = verified_config(settings, report)
    room = memory_budget(device, settings)
    stats = manifest.part_stats(path)
    model, tokenizer = _read(settings, config, device, room, report)
    report(Loading("warming up"))
    sizes = _warm_up(model)
    vocabulary, context = _vocabulary(config, tokenizer), context_tokens(config)
    key = VerdictKey.now(_digest(settings), device, accelerator_name(device), versions())
    findings = FindingsKey.now(key)

    def basis() -> bytes:
        # Files that were replaced since are hashed like any, and are not those of this model.
        digest = key.digest or (_digest(settings) if manifest.part_stats(path) == stats else "")
        known_by = msgspec.structs.replace(findings, model=msgspec.structs.replace(key, digest=digest))
        return block_basis(known_by, sharable.arithmetic if sharable else None)

    cached = findings.cached(Path(settings.cache))
    known = cached.find()
    if known is None:
        report(Loading("measuring"))
    sparse, dense_reason = _sparse(model, known)
    sharable, unshareable = _sharable(model, device, known)
    if known is None:
        known = LoadFindings(
            together=decodes_together(model),
            dense_reason=dense_reason,
            arithmetic=sharable.arithmetic if sharable else None,
            speeds=calibrate(model, device, vocabulary, context),
            vocabulary=_vocabulary_hash(tokenizer),
        )
        cached.keep(known)
    found = known

    def keep_speeds(better: Speeds) -> None:
        cached.keep(msgspec.structs.replace(found, speeds=better))

    together, speeds = known.together, known.speeds
    verdict = _verdict(model, settings, key, vocabulary, context, speeds.decode_tok_s, report)
    keep_weights(device, settings)
    weights = sum(int(array.nbytes) for _, array in tree_flatten(model.parameters()))
    left = max(0, room.usable_bytes - weights - WORKING_BYTES)
    prefix_bytes = settings.prefix_cache_bytes or int(left * PREFIX_SHARE)
    search = ProfileSearch(
        model=model,
        tokenizer=tokenizer,
        context_tokens=context,
        known=ProfileStore.in_home(Path(settings.cache)) if settings.cache else ProfileStore(),
        digest=key.digest or digests.remembered(path, Path(settings.record) if settings.record else None),
        device=device,
    )
    facts = Ready(
        architecture=str(config.get("model_type", "unknown")),
        device=device,
        dtype=_dtype(model),
        layers=(layers := sharable.stage.prefilled if sharable else len(model.layers)),
        vocab_size=vocabulary,
        context_tokens=context,
        weights_bytes=weights,
        kv_bytes_per_token=sizes.token_bytes,
        kv_budget_bytes=max(0, left - prefix_bytes),
        has_chat_template=bool(tokenizer.has_chat_template),
        tool_calls=bool(tokenizer.has_tool_calling),
        tool_format=str(tokenizer.init_kwargs.get("tool_parser_type") or ""),
        reasoning=has_reasoning(tokenizer),
        load_s=time.monotonic() - begun,
        versions=versions(),
        prefill_tok_s=speeds.prefill_tok_s,
        decode_tok_s=speeds.decode_tok_s,
        prefill_context_s=speeds.prefill_context_s,
        prefill_fixed_s=speeds.prefill_fixed_s,
        doubt=speeds.doubt,
        state_bytes=sizes.state_bytes,
        window_bytes_per_token=sizes.window_bytes,
        window_tokens=sizes.window,
        last_layer=layers,
        unshareable=unshareable,
        speculation=verdict.text,
        speculation_width=verdict.width,
        speculation_context=verdict.context,
        sparse=dense_reason,
        sparse_tail=sparse.tail if sparse else 0,
        scoring=search.state,
        vocabulary=known.vocabulary,
    )
    if sharable is not None:
        facts = _with_sharing(facts, sharable)
    return Loaded(
        model,
        tokenizer,
        facts,
        prefix_bytes,
        _defaults(path),
        together,
        verdict,
        sharable,
        sparse,
        search,
        keep_speeds,
        speeds.chunk_s,
        LateBasis(basis),
        checkpoints.needed(make_prompt_cache(model)),
    )


def _read(
    settings: WorkerSettings,
    config: dict[str, Any],
    device: Device,
    room: MemoryBudget,
    report: Callable[[Loading], None],
) -> tuple[Any, Any]:
    """The model and its tokenizer. Raises OutOfMemory before reading what does not fit."""
    path = Path(settings.path)
    # Hub caches hold links; the size that counts is the target's.
    files = sorted(path.glob("model*.safetensors"))
    on_disk = sum(f.stat().st_size for f in files)
    expected = weights_in_memory(path, on_disk, config, device)
    admit_weights(settings.name, expected, room)
    report(Loading("reading", 0, on_disk))
    with (
        little_besides(path, expected, device),
        ThreadPoolExecutor(1, "tokenizer") as aside,
    ):
        reading = aside.submit(_tokenizer, path, config)
        model = lazy_model(path, config)
        admit_weights(settings.name, memory_bytes(model, device), room)
        if device == "cpu":
            cpu.to_float32(model)
        mx.eval(model.parameters())
        report(Loading("reading", on_disk, on_disk))
        report(Loading("reading the tokenizer"))
        return model, reading.result()


def _with_sharing(facts: Ready, sharable: Sharable) -> Ready:
    """Add what other machines need to know to help with prompts."""
    stage = sharable.stage
    return msgspec.structs.replace(
        facts,
        hidden_bytes=sharable.layout.hidden_bytes(1),
        hidden_width=stage.hidden_width,
        outside_bytes=stage.outside_bytes,
        layer_bytes=stage.layer_bytes,
        arithmetic=sharable.arithmetic,
    )


def versions() -> dict[str, str]:
    """Versions of the libraries that compute and that make prompts."""
    return {name: importlib.metadata.version(name) for name in ("mlx", "mlx-lm", "transformers")}


def _sharable(model: Any, device: Device, known: LoadFindings | None) -> tuple[Sharable | None, str]:
    """What other machines can help with, or why they cannot."""
    try:
        return Sharable.of(Stage.of(model), device, versions(), known.arithmetic if known else None), ""
    except ModelUnsupported as error:
        return None, error.message
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        # What a stage takes a model to be is not what this one is: it still runs whole.
        reason = f"Its layers cannot be run apart ({type(error).__name__}: {error})."
        return None, reason[: limits.CARD_TEXT_CHARS]


def _sparse(model: Any, known: LoadFindings | None) -> tuple[Sparse | None, str]:
    """How prompts are prefilled in part, or why they cannot be. Wraps the model's ropes."""
    if known is not None and known.dense_reason:
        return None, known.dense_reason
    try:
        return Sparse.of(model, checked=known is not None), ""
    except ModelUnsupported as error:
        return None, error.message


def _verdict(
    model: Any,
    settings: WorkerSettings,
    key: VerdictKey,
    vocabulary: int,
    context: int,
    decode_tok_s: float,
    report: Callable[[Loading], None],
) -> ExactnessVerdict:
    if settings.speculation == "off":
        return ExactnessVerdict(text="off: speculation.mode is off")
    if key.device == "cpu" and not cpu.exact():
        return ExactnessVerdict(
            text="declined: without MKL a CPU's numbers depend on how many are computed at once"
        )
    step_s = 1 / decode_tok_s
    cached = key.cached(Path(settings.cache))
    if (known := cached.find()) is not None:
        return known.at_pace(step_s)
    report(Loading("probing for exactness"))
    plan = ProbePlan.of(key.device, step_s)
    found = probe(model, vocab_size=vocabulary, context_tokens=context, plan=plan)
    cached.keep(found)
    return found


@contextmanager
def little_besides(path: Path, weights_bytes: int, device: Device) -> Iterator[None]:
    """Bound what a load takes besides the weights. Raises ModelCorrupt for files that make it more."""
    more = build_bytes(weights_bytes)
    try:
        with address_space.at_most(more, device):
            yield
    except MemoryError as error:
        raise ModelCorrupt(
            f"Building {path.name} takes {human(more)} and more; its weights take {human(weights_bytes)}.",
            hint="Its config does not fit its weights; choose another copy of the model.",
        ) from error


def _digest(settings: WorkerSettings) -> str:
    """The model's digest, under which results are stored; "" if nothing is stored."""
    record = Path(settings.record) if settings.record else None
    return digests.remembered(Path(settings.path), record) if settings.cache else ""


def verified_config(settings: WorkerSettings, report: Callable[[Loading], None]) -> dict[str, Any]:
    """The config of a model whose files are what they should be; as ``load`` raises."""
    path = Path(settings.path)
    report(Loading("verifying"))
    record = Path(settings.record) if settings.record else None
    verify(path, record=record, progress=lambda done, total: report(Loading("verifying", done, total)))
    with over_files(f"The config of {path.name} cannot be read"):
        config: dict[str, Any] = load_config(path)
    return config


@over_files("The length of the model's context cannot be read from its config")
def context_tokens(config: dict[str, Any]) -> int:
    """The longest context the model was trained for, from its config (or its text part)."""
    for part in (config, config.get("text_config") or {}):
        for key in ("max_position_embeddings", "max_sequence_length", "seq_length", "n_positions"):
            value = part.get(key)
            if isinstance(value, int) and value > 0:
                return value
    return FALLBACK_CONTEXT


def lazy_model(path: Path, config: dict[str, Any]) -> Any:
    """The model with none of its weights read yet: each is when something is computed from it."""
    with over_files(f"The model in {path.name} cannot be built from its config and weights"):
        try:
            model, _ = load_model(path, lazy=True)
        except ValueError as error:
            if "not supported" not in str(error):
                raise
            raise ModelUnsupported(
                f"The engine has no code for models of type {config.get('model_type')!r}.",
                hint="Update mlx-lm, or choose another model (fleetctl models).",
            ) from error
    return model


def memory_bytes(weights: nn.Module, device: Device) -> int:
    """Bytes of the weights once they are read: as on disk, except on a CPU, where everything becomes f32."""
    if device == "cpu":
        return cpu.float32_bytes(weights)
    return sum(int(array.nbytes) for _, array in tree_flatten(weights.parameters()))


def _tokenizer(path: Path, config: dict[str, Any]) -> Any:
    with over_files(f"The tokenizer in {path.name} cannot be read"):
        return with_format(load_tokenizer(path, eos_token_ids=config.get("eos_token_id")))


# A device that has no memory left raises RuntimeError.
@over_files("The model cannot compute anything", RuntimeError)
def _warm_up(model: Any) -> StateSizes:
    """A short prefill and one decode step compile the kernels, and show what a sequence takes."""
    cache = make_prompt_cache(model)
    odd = {type(part).__name__ for part in all_parts(cache) if not _sized(part)}
    if odd:
        raise ModelUnsupported(
            f"This architecture keeps its context in a {', '.join(sorted(odd))}, whose size cannot be told.",
            hint="Choose another model (fleetctl models).",
        )
    mx.eval(model(mx.array([[1] * 8]), cache=cache))
    mx.eval(model(mx.array([[1]]), cache=cache))
    return sizes_of(cache)


def _sized(part: Any) -> bool:
    """True if it can be told how much memory a cache takes for each token: its kind is known, or has rows."""
    return type(kind_of(part)) is not StateKind or hasattr(part, "keys")


@over_files("The model cannot decode two answers", RuntimeError)
def decodes_together(model: Any) -> bool:
    """True if two answers of unequal length can be one batch and say in it what each says alone.

    Some of mlx-lm's models cannot: gemma2's own attention takes the mask of a batch for one of its heads, and
    fails or, where there happen to be as many heads as answers, computes something else. Others keep what
    cannot be put into a batch. Costs some tokens.
    """
    caches = [make_prompt_cache(model) for _ in _UNEQUAL]
    if not all(hasattr(layer, "merge") for layer in caches[0]):
        return False
    one = mx.array([[1]])
    for tokens, cache in zip(_UNEQUAL, caches, strict=True):
        mx.eval(model(mx.array([tokens]), cache=cache))
    try:
        batch = batches.merged(caches)
        together = model(mx.concatenate([one, one]), cache=batch).astype(mx.float32)
        mx.eval(together)
    except ValueError:
        return False
    alone = mx.concatenate([model(one, cache=cache) for cache in caches]).astype(mx.float32)
    return bool(mx.abs(together - alone).max() <= _ROUNDING * mx.abs(alone).max())


def _defaults(path: Path) -> SamplingDefaults:
    """The sampling that the model's makers recommend, for requests that leave it open."""
    try:
        found = json.loads((path / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return SamplingDefaults()
    return SamplingDefaults.of_model(found) if isinstance(found, dict) else SamplingDefaults()


def _dtype(model: Any) -> str:
    counts: dict[str, int] = {}
    for _, array in tree_flatten(model.parameters()):
        name = str(array.dtype).removeprefix("mlx.core.")
        counts[name] = counts.get(name, 0) + array.nbytes
    return max(counts, key=lambda name: counts[name])


@over_files("The size of the vocabulary cannot be read")
def _vocabulary(config: dict[str, Any], tokenizer: Any) -> int:
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return int(size) if size else len(tokenizer)


def _vocabulary_hash(tokenizer: Any) -> str:
    """A short hash of every id and its text, special tokens included: equal if two models mean the same by
    each token id, which is all that a drafter and a verifier must share."""
    state = hashlib.sha256()
    for text, number in sorted(tokenizer.get_vocab().items(), key=lambda entry: (entry[1], entry[0])):
        data = text.encode(errors="surrogatepass")
        state.update(_ENTRY.pack(number, len(data)) + data)
    return state.hexdigest()[:32]
