"""From a verified folder to a model in memory that has computed its first tokens, and the device for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.utils import load_config, load_model
from msgspec.structs import replace

from fleetd import limits
from fleetd.control.daemon_status import MemoryBudget
from fleetd.control.model_facts import StateSizes
from fleetd.engine.answer.tool_formats import with_format
from fleetd.engine.cpu import address_space, packed_layers, products
from fleetd.engine.cpu.packed_layers import weights_bytes
from fleetd.engine.cpu.packed_product import kernels
from fleetd.engine.cpu.unread_logits import unread_logits
from fleetd.engine.failures import over_files
from fleetd.engine.groups.group_model import GroupModel
from fleetd.engine.heads.assistant import Assistant
from fleetd.engine.heads.block_drafter import BlockDrafter
from fleetd.engine.heads.drafter_files import read_drafter
from fleetd.engine.heads.head_files import read_head
from fleetd.engine.heads.mtp_head import MtpHead
from fleetd.engine.layers.stage import Stage
from fleetd.engine.load.group_members import GroupMembers
from fleetd.engine.load.quantised_rows import RowPrecision, quantise_rows
from fleetd.engine.load.rank_members import RankMembers
from fleetd.engine.load.readable_folder import forbid_absent, readable
from fleetd.engine.measure import device_memory
from fleetd.engine.measure.memory import admit_weights, human
from fleetd.engine.protocol import CONNECTING, Loading
from fleetd.engine.ranks import dividing
from fleetd.engine.ranks.rank_model import RankModel
from fleetd.engine.sequence_state.kinds import StateKind, kind_of
from fleetd.engine.sequence_state.parts import all_parts
from fleetd.engine.sequence_state.parts import sizes as sizes_of
from fleetd.engine.settings import WorkerSettings
from fleetd.engine.vision.image_reader import ImageReader
from fleetd.engine.vision.reader_files import read_image_reader
from fleetd.errors import ModelCorrupt, ModelRefused, ModelUnsupported, OutOfMemory
from fleetd.hardware import memory, mlx_device
from fleetd.hardware.device_facts import DeviceFacts
from fleetd.models import digest as digests
from fleetd.models.drafter_kinds import drafter_kind
from fleetd.models.heads import check_target
from fleetd.models.images import reads_images
from fleetd.models.memory_need import (
    TOKEN_TABLES,
    WeightRules,
    build_bytes,
    is_quantised,
    weight_need,
)
from fleetd.models.verify import verify

Device = Literal["cpu", "metal", "cuda"]
# A context can be huge and memory small; without a stated context this is what llama-family models had.
FALLBACK_CONTEXT = 4096
# What drafts from a model's hidden states.
HiddenDrafter = MtpHead | BlockDrafter | Assistant


class ReadModel(msgspec.Struct, frozen=True):
    """A model in memory that has computed its first tokens, with its tokenizer. ``sizes``: of a sequence."""

    model: Any
    tokenizer: Any
    config: dict[str, Any]
    device: Device
    # "float32" or "int8"; "" on a GPU.
    arithmetic: str
    sizes: StateSizes
    vocab_size: int
    context_tokens: int
    # Drafts from its hidden states: the drafter that the settings name, else the head that lies beside it.
    # None if there is none. ``headless`` says why one that there is cannot be used.
    head: HiddenDrafter | None = None
    headless: str = ""
    held: RowPrecision = RowPrecision()
    # What it reads images with; None if it reads none. ``imageless`` says why what there is cannot be used.
    images: ImageReader | None = None
    imageless: str = ""

    @property
    def weights_bytes(self) -> int:
        beside = (self.head, self.images)
        return weights_bytes(self.model) + sum(weights_bytes(each) for each in beside if each is not None)

    @property
    def dtype(self) -> str:
        return dtype_of(self.model)


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


def read_model(
    settings: WorkerSettings,
    config: dict[str, Any],
    device: Device,
    room: MemoryBudget,
    report: Callable[[Loading], None],
    members: GroupMembers | None = None,
) -> ReadModel:
    """Read a whole model and its tokenizer, and warm up. Of a model over several machines this one's part is
    read, and ``members`` gives the others.

    Raises:
        ModelCorrupt: its files cannot be used.
        ModelUnsupported: an architecture that mlx-lm does not have, or that needs something else.
        OutOfMemory: refused before reading.
    """
    # Hub caches hold links; the size that counts is the target's.
    on_disk = sum(file.stat().st_size for file in Path(settings.path).glob("model*.safetensors"))
    weights = HeldWeights.of(settings, config, device, room, on_disk)
    files = _read(settings, config, weights, room, report, members)
    model = files.model
    if members is not None:
        report(Loading(CONNECTING))
        members.join(model)
    report(Loading("warming up"))
    held = _held_rows(settings, model)
    sizes = warm_up(model)
    return ReadModel(
        model,
        files.tokenizer,
        config,
        device,
        weights.arithmetic,
        sizes,
        _vocab_size(model),
        context_tokens(config),
        files.head,
        files.headless,
        held,
        files.images,
        files.imageless,
    )


# A device that has no memory left raises RuntimeError.
@over_files("The model cannot compute anything", RuntimeError)
def _held_rows(settings: WorkerSettings, model: Any) -> RowPrecision:
    """How keys and values are held, by the settings. Has an effect on all caches that are made for it."""
    if not settings.kv_bits:
        return RowPrecision()
    if settings.group or settings.ring is not None:
        return RowPrecision(text="as computed: the model is over several machines")
    return quantise_rows(model, settings.kv_bits)


class HeldWeights(msgspec.Struct, frozen=True):
    """How a model's weights are held."""

    device: Device
    # "float32" or "int8"; "" on a GPU.
    arithmetic: str
    # Whether weights are quantised in the files.
    packed: bool
    # Bytes of the files.
    on_disk: int
    # Bytes in memory, by the files' headers.
    expected: int

    @classmethod
    def of(
        cls,
        settings: WorkerSettings,
        config: dict[str, Any],
        device: Device,
        room: MemoryBudget,
        on_disk: int,
    ) -> HeldWeights:
        """What ``settings`` choose for the files of a model, by its config and their headers."""
        path = Path(settings.path)
        # Divided layers have no packed products.
        arithmetic = settings.cpu_arithmetic if settings.ring is None else "float32"
        rules = WeightRules.of(device, arithmetic, room, available=True)
        need = weight_need(path, on_disk, config, rules)
        # To know the kernels takes a third of a second.
        if need.arithmetic == "int8" and not kernels():
            need = weight_need(path, on_disk, config, replace(rules, available=False))
        return cls(device, need.arithmetic, is_quantised(config), on_disk, need.n_bytes)

    def hold(self, model: nn.Module, *, drafts: bool = False) -> None:
        """Read the weights of a model, or of a head that only ``drafts``, in place, as they are held."""
        match self.arithmetic:
            case "int8":
                packed_layers.to_int8(model, plain=drafts or not self.packed)
            case "float32":
                products.to_float32(model)
        mx.eval(model.parameters())

    def bytes_of(self, model: nn.Module, *, tied: bool, drafts: bool = False) -> int:
        """Bytes that ``hold`` will take; reads none. ``tied``: the model's head is a table."""
        match self.arithmetic:
            case "int8":
                return packed_layers.int8_bytes(model, plain=drafts or not self.packed, tied=tied)
            case "float32":
                return products.float32_bytes(model)
        return weights_bytes(model)


class _ReadFiles(msgspec.Struct, frozen=True):
    """The model, its tokenizer, its head, what it reads images with, and why there is none of these two."""

    model: Any
    tokenizer: Any
    head: HiddenDrafter | None
    headless: str
    images: ImageReader | None
    imageless: str


def _read(
    settings: WorkerSettings,
    config: dict[str, Any],
    weights: HeldWeights,
    room: MemoryBudget,
    report: Callable[[Loading], None],
    members: GroupMembers | None,
) -> _ReadFiles:
    """What is in a model's files, in memory. Raises OutOfMemory before reading what does not fit."""
    path, on_disk = Path(settings.path), weights.on_disk
    if not settings.group:
        admit_weights(settings.name, weights.expected, room)
    report(Loading("reading", 0, on_disk))
    with (
        readable(path) as place,
        little_besides(path, weights.expected, weights.device),
        ThreadPoolExecutor(1, "tokenizer") as aside,
    ):
        reading = aside.submit(_tokenizer, place, config)
        model = lazy_model(place, config)
        # A head is built as a layer of the whole model, wherever that layer is.
        head, headless = _lazy_head(settings, place, model)
        images, imageless = _lazy_images(settings, place, config)
        if isinstance(members, RankMembers):
            model = members.divided(model)
        elif settings.group:
            model = GroupModel.front_of(model, settings.group[0].first, on_cpu=weights.device == "cpu")
        tied = not any(name.endswith("lm_head") for name, _ in model.named_modules())
        needed = weights.bytes_of(model, tied=tied)
        admit_weights(settings.name, needed, room)
        if images is not None:
            try:
                seen = products.float32_bytes(images) if weights.device == "cpu" else weights_bytes(images)
                admit_weights(settings.name, needed + seen, room)
                needed += seen
            except OutOfMemory:
                images, imageless = None, "There is no memory for what it reads images with."
        if head is not None:
            try:
                more = weights.bytes_of(head, tied=False, drafts=True)
                admit_weights(settings.name, needed + more, room)
            except OutOfMemory:
                head, headless = None, "off: there is no memory for it"
        if isinstance(model, RankModel):
            dividing.read_singly(model)
        weights.hold(model)
        if images is not None:
            if weights.device == "cpu":
                products.to_float32(images)
            mx.eval(images.parameters())
        if head is not None:
            weights.hold(head, drafts=True)
            head.attach(model.front if isinstance(model, GroupModel) else Stage.of(model))
        report(Loading("reading", on_disk, on_disk))
        report(Loading("reading the tokenizer"))
        return _ReadFiles(model, reading.result(), head, headless, images, imageless)


def _lazy_images(
    settings: WorkerSettings, place: Path, config: dict[str, Any]
) -> tuple[ImageReader | None, str]:
    """What the model reads images with, with none of its weights read yet, and why it cannot be used."""
    if not reads_images(config):
        return None, ""
    if settings.group or settings.ring is not None:
        return None, "Over several machines it reads text only."
    try:
        return read_image_reader(place, config), ""
    except (ModelCorrupt, ModelUnsupported) as error:
        return None, error.message[: limits.CARD_TEXT_CHARS]


def _lazy_head(settings: WorkerSettings, place: Path, model: Any) -> tuple[HiddenDrafter | None, str]:
    """What drafts from a model's hidden states, with none of its weights read yet, and why one that there is
    cannot be used."""
    why = ""
    if settings.speculation == "off" or settings.ring is not None:
        return None, why
    if settings.drafter:
        try:
            return _over_machines(read_drafter(Path(settings.drafter), model), settings), why
        except (ModelCorrupt, ModelRefused, ModelUnsupported) as error:
            why = f"off: {error.message}"[: limits.CARD_TEXT_CHARS]
    record = Path(settings.record) if settings.record else None
    try:
        check_target(place, digests.remembered_weights(Path(settings.path), record))
        return read_head(place, model), why
    except (ModelCorrupt, ModelUnsupported) as error:
        return None, why or f"off: {error.message}"[: limits.CARD_TEXT_CHARS]


def _over_machines(drafter: HiddenDrafter, settings: WorkerSettings) -> HiddenDrafter:
    """``drafter``, if what it reads can be had. Raises ModelUnsupported."""
    if settings.group and isinstance(drafter, Assistant):
        raise ModelUnsupported("It reads keys and values that are on another machine.")
    return drafter


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


def verified_config(settings: WorkerSettings, report: Callable[[Loading], None]) -> dict[str, Any]:
    """The config of a model whose files are what they should be; raises as ``loading.load``."""
    path = Path(settings.path)
    report(Loading("verifying"))
    record = Path(settings.record) if settings.record else None
    verify(path, record=record, progress=lambda done, total: report(Loading("verifying", done, total)))
    with readable(path) as place, over_files(f"The config of {path.name} cannot be read"):
        config: dict[str, Any] = load_config(place)
    if drafter_kind(config) is not None:
        raise ModelUnsupported(
            f"{path.name} answers nothing: it drafts for another model, from its hidden states.",
            hint="Name it in speculation.draft_model, and ask the other model.",
        )
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
    forbid_absent(path)
    return model


def _tokenizer(path: Path, config: dict[str, Any]) -> Any:
    with over_files(f"The tokenizer in {path.name} cannot be read"):
        return with_format(load_tokenizer(path, eos_token_ids=config.get("eos_token_id")))


# A device that has no memory left raises RuntimeError.
@over_files("The model cannot compute anything", RuntimeError)
def warm_up(model: Any) -> StateSizes:
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


def dtype_of(model: nn.Module) -> str:
    """The type of most of the weights, by their bytes."""
    counts: dict[str, int] = {}
    for _, array in tree_flatten(model.parameters()):
        name = str(array.dtype).removeprefix("mlx.core.")
        counts[name] = counts.get(name, 0) + array.nbytes
    return max(counts, key=lambda name: counts[name])


def known_tokens(model: nn.Module) -> int:
    """How many token ids the model has rows for; 0 if it has no table of them.

    By what was built: a config may say other numbers of its text part, and reading a row behind the table of
    embeddings ends the process.
    """
    tables = (
        packed_layers.table_rows(module)
        for name, module in model.named_modules()
        if isinstance(module, packed_layers.TABLES) and name.split(".")[-1] in TOKEN_TABLES
    )
    return max(tables, default=0)


@over_files("The size of the vocabulary cannot be found")
def _vocab_size(model: Any) -> int:
    """How many token ids the model can take and gives."""
    rows = known_tokens(model)
    # Only its shape is looked at, so that nothing is computed.
    with unread_logits():
        logits = int(model(mx.array([[0]])).shape[-1])
    return min(logits, rows or logits)
