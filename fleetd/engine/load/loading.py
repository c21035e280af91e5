"""From a verified folder to a model that can run, and the facts the daemon needs about it."""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
from mlx_lm.models.cache import make_prompt_cache

from fleetd import limits
from fleetd.cache.block_names import LateBasis
from fleetd.control.daemon_status import MemoryBudget
from fleetd.control.model_facts import ModelShape, StateSizes
from fleetd.engine.answer.tool_formats import has_reasoning
from fleetd.engine.cpu import products
from fleetd.engine.failures import over_files
from fleetd.engine.grammar.grammars import Grammars
from fleetd.engine.groups.group_model import GroupModel
from fleetd.engine.groups.promised_rows import divided
from fleetd.engine.groups.remote_rows import KeptThere
from fleetd.engine.groups.sparse_rows import sparse_of
from fleetd.engine.groups.taps_price import TapsPrice
from fleetd.engine.heads.assistant import Assistant
from fleetd.engine.heads.block_drafter import BlockDrafter
from fleetd.engine.heads.mtp_head import MtpHead
from fleetd.engine.layers.stage import Stage
from fleetd.engine.load.group_members import GroupMembers
from fleetd.engine.load.load_findings import FindingsKey, LoadFindings, block_basis, versions
from fleetd.engine.load.model_reading import (
    Device,
    HiddenDrafter,
    ReadModel,
    keep_weights,
    memory_budget,
    read_model,
    verified_config,
)
from fleetd.engine.measure.calibrate import Measurement, calibrate
from fleetd.engine.measure.memory import NO_BOUND, RowBound
from fleetd.engine.protocol import Arithmetic, Loading, Ready, ScoringState
from fleetd.engine.ranks.rank_model import RankModel
from fleetd.engine.sampling.parameters import SamplingDefaults
from fleetd.engine.scoring.known_profiles import ProfileStore
from fleetd.engine.scoring.profile_search import ProfileSearch
from fleetd.engine.sequence_state import batches, checkpoints
from fleetd.engine.settings import WorkerSettings
from fleetd.engine.shared_prefill.sharable import Sharable, accelerator_name
from fleetd.engine.sparse_prefill.sparse import Sparse
from fleetd.engine.speculation.assistant_source import WorkerAssistant
from fleetd.engine.speculation.block_source import WorkerBlocks
from fleetd.engine.speculation.exactness_probe import ExactnessVerdict, ProbePlan, most_context, probe
from fleetd.engine.speculation.hidden_source import WorkerDrafter
from fleetd.engine.speculation.mtp_source import WorkerHead
from fleetd.engine.speculation.verdicts import VerdictKey
from fleetd.engine.vision.image_reader import ImageReader
from fleetd.errors import ModelCorrupt, ModelUnsupported
from fleetd.models import digest as digests
from fleetd.models import hub_parts, manifest
from fleetd.models.json_files import read_json
from fleetd.models.memory_need import WORKING_BYTES
from fleetd.storage.cached_results import CachedResult

# Prompts of unequal length to try a batch with, and how far rounding may move its numbers, as a share of the
# largest.
_UNEQUAL, _ROUNDING = ([3, 4, 5, 6, 7], [8]), 0.03
# Why neither tokens of a prompt can be left out of a model's prefill nor parts of it be shared.
_SEVERAL = "Its layers are on several machines."
_SEVERAL_HAVE_IT = (GroupModel, RankModel)
# A token's id and the length of its text.
_ENTRY = struct.Struct("<iI")


class MemoryShares(msgspec.Struct, frozen=True):
    """How a worker divides its memory, in bytes: the weights, the prefix cache, and what sequences take.

    ``rows``, ``prefix_rows``: how it divides what other machines of a group have promised.
    """

    weights: int
    prefix: int
    sequences: int
    rows: RowBound = NO_BOUND
    prefix_rows: RowBound = NO_BOUND

    @classmethod
    def of(
        cls,
        weights: int,
        sizes: StateSizes,
        room: MemoryBudget,
        settings: WorkerSettings,
        unpacking_bytes: int = 0,
        *,
        running: bool = False,
    ) -> MemoryShares:
        """``sizes``: of a sequence. ``unpacking_bytes``: what each of its tokens takes besides, for a
        while. ``running``: layers have running states, on this machine or on others of a group."""
        left = max(0, room.usable_bytes - weights - WORKING_BYTES)
        if settings.group:
            # More rows than other machines have room for are of no use. Running states are this machine's
            # own: for all that run, and as often in kept prompts.
            states = 2 * settings.max_streams * sizes.state_bytes
            left = min(left, settings.group_tokens * sizes.row_bytes + states)
        # However much the owner gives to old prompts, new ones get the part that old ones have otherwise.
        most = left - int(left * limits.PREFIX_SHARE)
        prefix = min(settings.prefix_cache_bytes, most) or int(left * limits.PREFIX_SHARE)
        rows = max(1, sizes.token_bytes)
        sequences = (left - prefix) * rows // (rows + unpacking_bytes)
        if not settings.group:
            return cls(weights, prefix, sequences)
        kept = settings.group_tokens * prefix // max(1, left)
        return cls(weights, prefix, sequences, *divided(settings.group_tokens, kept, running=running))


class _FoundOut(msgspec.Struct, frozen=True):
    """What computing with a model showed; ``findings`` are stored for the next load.

    ``sparse``: None if prompts must be prefilled whole, as ``dense_reason`` says. ``sharable``: None if no
    other machine can help, as ``unshareable`` says.
    """

    findings: LoadFindings
    sparse: Sparse | None
    dense_reason: str
    sharable: Sharable | None
    unshareable: str


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    model: Any
    tokenizer: Any
    facts: Ready
    shares: MemoryShares
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
    keep_measured: Callable[[Measurement], None]
    # Seconds of a chunk of prompt, by its tokens.
    chunk_s: dict[int, float]
    # What decides the bytes of keys and values besides the tokens.
    basis: LateBasis
    # Whether some layers cannot be taken back to an earlier token, so that states are kept at some.
    keeps_states: bool
    # What holds answers to their form.
    grammars: Grammars
    # What drafts from the model's hidden states; None if nothing does.
    head: WorkerDrafter | None
    # What it reads images with; None if it reads none, for the reason ``imageless`` if there is one.
    images: ImageReader | None
    imageless: str


def load(
    settings: WorkerSettings,
    device: Device,
    report: Callable[[Loading], None],
    members: GroupMembers | None = None,
) -> Loaded:
    """Verify, read, warm up and measure. ``members``: the other machines that have layers of it; None: none.

    Raises:
        ModelCorrupt, ModelRefused: from ``verify``; ModelCorrupt also for files that libraries cannot use.
        ModelUnsupported: an architecture that mlx-lm does not have, or that needs something else.
        OutOfMemory: refused before reading.
    """
    begun = time.monotonic()
    config = verified_config(settings, report)
    room = memory_budget(device, settings)
    stats = manifest.part_stats(Path(settings.path))
    read = read_model(settings, config, device, room, report, members)
    key = FindingsKey.now(
        VerdictKey.now(
            _digest(settings),
            device,
            accelerator_name(device),
            _versions(read, settings),
            members=settings.group,
        )
    )
    cached = key.cached(Path(settings.cache))
    found = _find_out(read, cached, report)

    def keep_measured(better: Measurement) -> None:
        cached.keep(msgspec.structs.replace(found.findings, measured=better))

    verdict = _verdict(read, settings, key.model, found.findings.measured.speed.decode_tok_s, report)
    head, head_text = _head(read, verdict, always=settings.speculation == "on")
    keep_weights(device, settings)
    shares = MemoryShares.of(
        read.weights_bytes,
        read.sizes,
        room,
        settings,
        read.held.unpacking_bytes,
        running=KeptThere.of(make_prompt_cache(read.model)).running,
    )
    search = _profile_search(read, settings, key.model.digest)
    return Loaded(
        model=read.model,
        tokenizer=read.tokenizer,
        facts=_ready(read, found, verdict, shares, search, head_text, load_s=time.monotonic() - begun),
        shares=shares,
        defaults=_defaults(Path(settings.path)),
        together=found.findings.together,
        verdict=verdict,
        sharable=found.sharable,
        sparse=found.sparse,
        search=search,
        keep_measured=keep_measured,
        chunk_s=found.findings.measured.chunk_s,
        basis=_basis(settings, stats, key, found.sharable),
        keeps_states=checkpoints.needed(make_prompt_cache(read.model)),
        grammars=Grammars(read.tokenizer, read.vocab_size),
        head=head,
        images=read.images,
        imageless=read.imageless,
    )


def _versions(read: ReadModel, settings: WorkerSettings) -> dict[str, str]:
    """What computes. Divided layers have other products, and another speed, than whole ones; and what
    attends to quantised rows has other numbers than what attends to all of them."""
    ranks = {} if settings.ring is None else {"ranks": str(settings.ring.size)}
    kept = {"kv_bits": str(read.held.bits)} if read.held.bits else {}
    return versions(read.arithmetic) | ranks | kept


def _head(
    read: ReadModel, verdict: ExactnessVerdict, *, always: bool = False
) -> tuple[WorkerDrafter | None, str]:
    """What drafts from the model's hidden states, and what is said of it: "" if there is no head. ``always``:
    also if that does not pay."""
    if read.head is None:
        return None, read.headless
    if not verdict.exact:
        return None, "off: drafts cannot be verified here"
    try:
        found = _measured(read.head)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return None, f"off: it cannot be computed ({error})"[: limits.CARD_TEXT_CHARS]
    if isinstance(read.head, BlockDrafter) and isinstance(read.model, GroupModel):
        taps = TapsPrice.measured(read.model, read.head.config.target_layer_ids)
        if not always and not taps.worth(verdict, found.source()):
            return None, f"off: {taps.text}"
        found.taps_s = taps.seconds
    return found, f"{found.text}. {read.headless}".removesuffix(". ")


def _measured(head: HiddenDrafter) -> WorkerDrafter:
    """``head`` once it has drafted."""
    match head:
        case MtpHead():
            return WorkerHead.measured(head)
        case BlockDrafter():
            return WorkerBlocks.measured(head)
        case Assistant():
            return WorkerAssistant.measured(head)


def _find_out(
    read: ReadModel, cached: CachedResult[LoadFindings], report: Callable[[Loading], None]
) -> _FoundOut:
    """Compute what is not stored, and store it. Wraps the model's ropes."""
    known = cached.find()
    if known is None:
        report(Loading("measuring"))
    sparse, dense_reason = _sparse(read.model, known)
    sharable, unshareable = _sharable(read, known)
    if known is None:
        known = LoadFindings(
            together=decodes_together(read.model),
            dense_reason=dense_reason,
            arithmetic=sharable.arithmetic if sharable else None,
            measured=calibrate(read.model, read.device, read.vocab_size, read.context_tokens),
            vocabulary=_vocabulary_hash(read.tokenizer),
        )
        cached.keep(known)
    return _FoundOut(known, sparse, dense_reason, sharable, unshareable)


def _ready(
    read: ReadModel,
    found: _FoundOut,
    verdict: ExactnessVerdict,
    shares: MemoryShares,
    search: ProfileSearch,
    head_text: str,
    *,
    load_s: float,
) -> Ready:
    """What the daemon is told of a whole model."""
    findings, sharable, tokenizer = found.findings, found.sharable, read.tokenizer
    shape = ModelShape(
        architecture=str(read.config.get("model_type", "unknown")),
        weights_bytes=shares.weights,
        context_tokens=read.context_tokens,
        dtype=read.dtype,
        cpu_arithmetic=read.arithmetic,
        layers=len(read.model.layers),
        sizes=read.sizes,
        unshareable=found.unshareable,
        kv_bits=read.held.bits,
        kv_held=read.held.text,
        sparse_tail=found.sparse.tail if found.sparse else 0,
        images=read.images is not None,
    )
    if sharable is not None:
        shape = sharable.described(shape)
    return Ready(
        device=read.device,
        shape=shape,
        vocab_size=read.vocab_size,
        kv_budget_bytes=shares.sequences,
        prefix_budget_bytes=shares.prefix,
        has_chat_template=bool(tokenizer.has_chat_template),
        tool_calls=bool(tokenizer.has_tool_calling),
        tool_format=str(tokenizer.init_kwargs.get("tool_parser_type") or ""),
        reasoning=has_reasoning(tokenizer),
        load_s=load_s,
        versions=versions(read.arithmetic),
        speed=findings.measured.speed,
        last_layer=shape.layers,
        speculation=verdict.text,
        speculation_width=verdict.width,
        speculation_context=verdict.context,
        draft_head=head_text,
        sparse=found.dense_reason,
        arithmetic=sharable.arithmetic if sharable is not None else _of_front(read),
        # It would have to see into layers of other machines.
        scoring=ScoringState("unable") if isinstance(read.model, _SEVERAL_HAVE_IT) else search.state,
        vocabulary=findings.vocabulary,
        sum_s=read.model.sum_s if isinstance(read.model, RankModel) else 0.0,
    )


def _of_front(read: ReadModel) -> Arithmetic | None:
    """What a group's other machines are held against: no layer of it is computed alone here."""
    if not isinstance(read.model, _SEVERAL_HAVE_IT):
        return None
    return Arithmetic(accelerator_name(read.device), read.dtype, versions(read.arithmetic))


def _sharable(read: ReadModel, known: LoadFindings | None) -> tuple[Sharable | None, str]:
    """What other machines can help with, or why they cannot."""
    found = known.arithmetic if known else None
    if isinstance(read.model, _SEVERAL_HAVE_IT):
        return None, _SEVERAL
    try:
        return Sharable.of(Stage.of(read.model), read.device, versions(read.arithmetic), found), ""
    except ModelUnsupported as error:
        reason = error.message
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        # What a stage takes a model to be is not what this one is: it still runs whole.
        reason = f"Its layers cannot be run apart ({type(error).__name__}: {error})."
    return None, reason[: limits.CARD_TEXT_CHARS]


def _sparse(model: Any, known: LoadFindings | None) -> tuple[Sparse | None, str]:
    """How prompts are prefilled in part, or why they cannot be. Wraps the model's ropes."""
    if known is not None and known.dense_reason:
        return None, known.dense_reason
    checked = known is not None
    if isinstance(model, RankModel):
        return None, _SEVERAL
    try:
        if isinstance(model, GroupModel):
            return sparse_of(model, checked=checked), ""
        return Sparse.of(model, checked=checked), ""
    except ModelUnsupported as error:
        return None, error.message


def _verdict(
    read: ReadModel,
    settings: WorkerSettings,
    key: VerdictKey,
    decode_tok_s: float,
    report: Callable[[Loading], None],
) -> ExactnessVerdict:
    """Whether blocks of tokens give the bytes of single steps: stored, or probed now."""
    if settings.speculation == "off":
        return ExactnessVerdict(text="off: speculation.mode is off")
    if read.device == "cpu" and not products.exact():
        return ExactnessVerdict(
            text="declined: without MKL a CPU's numbers depend on how many are computed at once"
        )
    step_s = 1 / decode_tok_s
    cached = key.cached(Path(settings.cache))
    if (known := cached.find()) is not None:
        return known.at_pace(step_s)
    report(Loading("probing for exactness"))
    plan, most = ProbePlan.of(read.device, step_s), read.context_tokens
    if settings.group:
        # Other machines have promised no more, and none of them may be lost to a probe.
        most = min(most, most_context(settings.group_tokens))
    found = probe(read.model, vocab_size=read.vocab_size, context_tokens=most, plan=plan)
    cached.keep(found)
    return found


def _profile_search(read: ReadModel, settings: WorkerSettings, digest: str) -> ProfileSearch:
    """The search for the model's scoring profile. ``digest``: "" if it is not known yet."""
    return ProfileSearch(
        model=read.model,
        tokenizer=read.tokenizer,
        context_tokens=read.context_tokens,
        known=ProfileStore.in_home(Path(settings.cache)) if settings.cache else ProfileStore(),
        # Profiles that travel with fleetd hold without a cache, too.
        digest=digest or digests.remembered(Path(settings.path), _record(settings)),
        device=read.device,
    )


def _basis(
    settings: WorkerSettings,
    stats: dict[str, tuple[int, int, int]],
    key: FindingsKey,
    sharable: Sharable | None,
) -> LateBasis:
    """What names the model's blocks, once its digest is known. ``stats``: of the files that were read."""

    def find() -> bytes:
        digest = key.model.digest
        # Files that were replaced since are hashed like any, and are not those of this model.
        if not digest and manifest.part_stats(Path(settings.path)) == stats:
            digest = _digest(settings)
        known = msgspec.structs.replace(key, model=msgspec.structs.replace(key.model, digest=digest))
        return block_basis(known, sharable.arithmetic if sharable else None)

    return LateBasis(find)


def _record(settings: WorkerSettings) -> Path | None:
    return Path(settings.record) if settings.record else None


def _digest(settings: WorkerSettings) -> str:
    """The model's digest, under which results are stored; "" if nothing is stored."""
    if not settings.cache:
        return ""
    path = Path(settings.path)
    record = _record(settings)
    models_dir = record.parent.parent if record is not None else None
    return hub_parts.digest_of(path, models_dir) or digests.remembered(path, record)


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
        found = read_json(path / "generation_config.json", limits.MODEL_CONFIG_BYTES)
    except ModelCorrupt:
        return SamplingDefaults()
    return SamplingDefaults.of_model(found)


def _vocabulary_hash(tokenizer: Any) -> str:
    """A short hash of every id and its text, special tokens included: equal if two models mean the same by
    each token id, which is all that a drafter and a verifier must share."""
    state = hashlib.sha256()
    for text, number in sorted(tokenizer.get_vocab().items(), key=lambda entry: (entry[1], entry[0])):
        data = text.encode(errors="surrogatepass")
        state.update(_ENTRY.pack(number, len(data)) + data)
    return state.hexdigest()[:32]
