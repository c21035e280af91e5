"""An engine worker: the child process that owns the accelerator and one model, or some of its layers.

    main thread      loads the model, then runs the scheduler: the only thread that computes with MLX
    reader thread    socket → commands; at end of file the daemon is gone and so is this process
    prompt threads   chat templates and tokenization, so that a long prompt does not hold up decoding; one for
                     short prompts and one for long ones, so that it does not hold up a short one either
    writer thread    reports → socket, those that it does not take at once
    channel thread   sockets to other machines' workers, as the daemon hands them over

Started by ``supervisor.py`` as ``python -m fleetd.engine.worker --fd N --streams-fd N --settings JSON``.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from fleetd import limits
from fleetd.engine import protocol
from fleetd.engine.cpu import address_space, openmp_file, products
from fleetd.engine.failures import MemberLost, failed, typed
from fleetd.engine.measure.chunk_size import Chunks, FixedChunks, MeasuredChunks, PacedChunks
from fleetd.engine.measure.pass_progress import PassProgress
from fleetd.engine.protocol import (
    AssistPrefill,
    Cancel,
    DraftFor,
    EmbedTexts,
    Failed,
    FetchBlocks,
    ForgetOrigins,
    FreeMemory,
    Generate,
    IdleTime,
    LoadFailed,
    PrefillAlone,
    PrefillWithHelpers,
    PromptsRead,
    Ready,
    Report,
    RerankTexts,
    Score,
    ServeStage,
    Shutdown,
    TakenElsewhere,
    WriteNow,
)
from fleetd.engine.settings import RingPlace, WorkerSettings
from fleetd.engine.streams.channel import ChannelThread
from fleetd.errors import EngineError, FleetError, ModelUnsupported
from fleetd.models.memory_need import WORKING_BYTES
from fleetd.process import priority
from fleetd.startup import collector, import_index
from fleetd.text.decoding import from_json

if TYPE_CHECKING:
    import mlx.core as mx

    from fleetd.cache.pricing import PrefillCost
    from fleetd.engine.groups.member_guests import PartDisks
    from fleetd.engine.layers.stage import Stage
    from fleetd.engine.load.group_members import GroupMembers
    from fleetd.engine.load.loading import Loaded
    from fleetd.engine.load.model_reading import Device
    from fleetd.engine.load.stage_loading import LoadedPart
    from fleetd.engine.loop.compute_loop import HelperLoop
    from fleetd.engine.loop.scheduler import Scheduler
    from fleetd.engine.prefixes.disk_tier import DiskTier
    from fleetd.engine.prompt.prompt_encoding import PreparedPrompt
    from fleetd.engine.scoring.scoring_layout import ScoringLayout
    from fleetd.engine.speculation.speculation import WorkerSpeculation
    from fleetd.engine.vectors.vector_loop import VectorLoop
    from fleetd.engine.vectors.vector_model import VectorModel, VectorRequest

    Loop = Scheduler | HelperLoop | VectorLoop
    Prepared = PreparedPrompt | ScoringLayout | VectorRequest

# Requests whose texts are prepared on threads of their own.
PreparedRequest = Generate | Score | EmbedTexts | RerankTexts

EXIT_OK, EXIT_LOAD_FAILED, EXIT_CRASHED, EXIT_ORPHANED = 0, 3, 4, 5
# A writable socket takes so much at once everywhere; macOS does not promise to heed MSG_DONTWAIT.
EAGER_BYTES = limits.KIB
# Of what waits for the writer thread, at most so much is copied for one write.
_WRITE_BYTES = 1 << 16


def _exit_orphaned() -> None:
    """End at once, without waiting for the compute thread, which may be deep in a kernel."""
    openmp_file.remove(os.getpid())
    os._exit(EXIT_ORPHANED)


class DaemonSocket:
    """The socket to the daemon. ``send`` never blocks the caller.

    What the socket takes at once is written by the caller: waking another thread for each token takes longer.
    The writer thread writes the rest.
    """

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._writable = select.poll()
        self._writable.register(self._socket, select.POLLOUT)
        self._changed = threading.Condition()
        # Frames that wait for the writer. It takes nothing out before that is written, so that while there is
        # something nobody else writes.
        self._unsent = bytearray()
        self._ended = False
        self._writer = threading.Thread(target=self._write, name="writer", daemon=True)
        self._writer.start()

    def send(self, report: Report) -> None:
        frame = memoryview(protocol.encode(report))
        with self._changed:
            if self._ended:
                return
            if not self._unsent:
                frame = frame[self._send_at_once(frame) :]
            if frame:
                self._unsent += frame
                self._changed.notify()

    def flush(self) -> None:
        """Send what is queued and stop sending."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._writer.join(timeout=2.0)

    def receive(self) -> bytes:
        """Bytes, or b"" when the daemon has gone."""
        try:
            return self._socket.recv(1 << 16)
        except OSError:
            return b""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Meanwhile, which is while a model is loaded, the process ends if the daemon goes or tells it to.

        Nothing else is sent to a worker that is not ready, so any byte before then is a Shutdown.
        """
        over, ours = socket.socketpair()
        watch = threading.Thread(target=self._watch, args=(over,), name="watch", daemon=True)
        with over:
            watch.start()
            try:
                with ours:
                    yield
            finally:
                watch.join()

    def _watch(self, over: socket.socket) -> None:
        readable, _, _ = select.select([self._socket, over], [], [])
        if over not in readable:
            _exit_orphaned()

    def _send_at_once(self, frame: memoryview) -> int:
        """Bytes that the socket took, 0 if it is full or the daemon has gone: the writer will find out."""
        if len(frame) > EAGER_BYTES or not self._writable.poll(0):
            return 0
        try:
            return self._socket.send(frame, socket.MSG_DONTWAIT)
        except OSError:
            return 0

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unsent or self._ended)
                if not self._unsent:
                    return
                # Under load several reports wait: one write for all of them.
                frames = bytes(self._unsent[:_WRITE_BYTES])
            try:
                self._socket.sendall(frames)
            except OSError:
                self._ended = True  # the daemon has gone, as the reader thread notices
                return
            with self._changed:
                del self._unsent[: len(frames)]


class _NotWanted(Exception):
    """A request was cancelled while its prompt is prepared."""


class Front:
    """The reader thread: hands commands to the compute thread. Without ``loaded`` only guest work is done."""

    def __init__(
        self,
        link: DaemonSocket,
        compute: Loop,
        loaded: Loaded | VectorModel | None,
        model: str = "This model",
    ) -> None:
        self._link = link
        self._model = model
        self._compute = compute
        self._loaded = loaded
        self._prompts = ThreadPoolExecutor(1, thread_name_prefix="prompt")
        self._long_prompts = ThreadPoolExecutor(1, thread_name_prefix="long-prompt")
        self._lock = threading.Lock()
        # Requests whose prompt is being prepared; True once they were cancelled meanwhile.
        self._preparing: dict[str, bool] = {}

    def read(self, decoder: protocol.MessageDecoder) -> None:
        """Read until the daemon is gone or sends what cannot be decoded; then end the process."""
        try:
            self._read(decoder)
        except Exception:
            traceback.print_exc()
        finally:
            _exit_orphaned()

    def _read(self, decoder: protocol.MessageDecoder) -> None:
        while data := self._link.receive():
            for command in decoder.feed(data):
                match command:
                    case Generate() | Score() | EmbedTexts() | RerankTexts():
                        with self._lock:
                            self._preparing[command.id] = False
                        self._thread_for(command).submit(self._prepare, command)
                    case Cancel(request_id):
                        with self._lock:
                            if request_id in self._preparing:
                                self._preparing[request_id] = True
                                continue
                        self._compute.tell(command)
                    case PrefillWithHelpers() | PrefillAlone() | FetchBlocks() | AssistPrefill() | DraftFor():
                        self._compute.tell(command)
                    case ServeStage():
                        self._compute.tell(command)
                    case IdleTime() | FreeMemory() | TakenElsewhere() | ForgetOrigins() | WriteNow():
                        self._compute.tell(command)
                    case PromptsRead():
                        cast("VectorLoop", self._compute).tell(command)
                    case Shutdown():
                        self._compute.stop()

    def _thread_for(self, request: PreparedRequest) -> ThreadPoolExecutor:
        """What prepares a request, in the order in which those of its kind came."""
        prompt = request.prompt if isinstance(request, Generate) else None
        if isinstance(prompt, protocol.ChatPrompt) and prompt.images:
            return self._long_prompts  # a small file may have many pixels
        size = len(msgspec.msgpack.encode(request))
        return self._prompts if size <= limits.SHORT_PROMPT_BYTES else self._long_prompts

    def _prepare(self, request: PreparedRequest) -> None:
        outcome: Prepared | None = None
        failure: Failed | None = None
        try:
            with self._lock:
                cancelled = self._preparing[request.id]
            if not cancelled:
                outcome = self._prepared(request)
        except _NotWanted:
            pass
        except (Exception, SystemExit) as error:
            failure = failed(request.id, error, "The prompt could not be prepared")
            self._link.send(failure)
        counts = isinstance(request, Generate) and request.count_only
        with self._lock:
            cancelled = self._preparing.pop(request.id)
            if outcome is not None and not cancelled and not counts:
                if isinstance(request, Generate):
                    known = cast("PreparedPrompt", outcome)
                    told = protocol.Tokenized(request.id, len(known.tokens), known.tools_by_grammar)
                    self._link.send(told)
                cast("Scheduler", self._compute).tell(cast("PreparedPrompt", outcome))
        if cancelled and failure is None:
            self._link.send(protocol.Finished(request.id, "cancelled"))
        elif counts and outcome is not None:
            self._link.send(protocol.Accepted(request.id, len(cast("PreparedPrompt", outcome).tokens)))
            self._link.send(protocol.Finished(request.id, "stop"))

    def _image_seen(self, request_id: str) -> None:
        """Note that an image of a prompt is prepared. Raises _NotWanted if the rest of it need not be."""
        cast("Scheduler", self._compute).note_prepared()
        with self._lock:
            if self._preparing[request_id]:
                raise _NotWanted

    def _prepared(self, request: PreparedRequest) -> Prepared:
        if self._loaded is None:
            raise EngineError(
                "This worker has only some of the model's layers: it helps, and answers nothing."
            )
        if isinstance(request, EmbedTexts | RerankTexts):
            return self._read_texts(request)
        loaded = self._writer(request)
        if isinstance(request, Score):
            return self._laid_out(request, loaded)
        return self._encoded(request, loaded)

    def _read_texts(self, request: EmbedTexts | RerankTexts) -> VectorRequest:
        read = getattr(self._loaded, "read", None)
        if read is None:
            raise ModelUnsupported(
                f"{self._model} writes text; it makes no vectors and reranks nothing.",
                hint="Choose a model for embeddings or for reranking (fleetctl models).",
                param="model",
            )
        found: VectorRequest = read(request)
        return found

    def _writer(self, request: Generate | Score) -> Loaded:
        """The model, if it writes text."""
        loaded = cast("Loaded", self._loaded)
        if getattr(loaded, "purpose", "chat") != "chat":
            raise ModelUnsupported(
                f"{self._model} reads texts for vectors or reranking, and writes none.",
                hint="Choose a model for chat (fleetctl models).",
                param="model",
            )
        return loaded

    def _laid_out(self, request: Score, loaded: Loaded) -> ScoringLayout:
        from fleetd.engine.prompt.prompt_encoding import check_ids
        from fleetd.engine.scoring.scoring_layout import lay_out

        layout = lay_out(request, loaded.tokenizer, loaded.facts.shape.context_tokens)
        check_ids((token for each in layout.passes for token in each.tokens), loaded.facts.vocab_size)
        return layout

    def _encoded(self, request: Generate, loaded: Loaded) -> PreparedPrompt:
        from fleetd.engine.loop.sequence import check_fits
        from fleetd.engine.prompt.prompt_encoding import prepare

        facts = loaded.facts
        # Meanwhile the compute thread may fill what the model has for keys and values. A template's own bound
        # is narrower; tokenizing a long prompt takes more, by code that no publisher has written.
        meanwhile = facts.kv_budget_bytes + WORKING_BYTES
        with address_space.at_most(meanwhile + limits.RENDER_BYTES, facts.device):
            prepared = prepare(
                request,
                loaded.tokenizer,
                facts.vocab_size,
                borders=loaded.keeps_states and not request.count_only,
                model=self._model,
                grammars=loaded.grammars,
                images=loaded.images,
                imageless=loaded.imageless,
                image_seen=partial(self._image_seen, request.id),
            )
        # Files that fleetd did not pull are hashed while their model is in use already.
        loaded.basis.look()
        if not request.count_only:
            # Here and not first where it is scheduled: that waits for the step under way.
            check_fits(
                prepared, loaded.sparse, cast("Scheduler", self._compute).budget, facts.shape.context_tokens
            )
        return prepared


def main() -> int:
    parser = argparse.ArgumentParser(prog="fleetd-engine")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--streams-fd", type=int, required=True)
    parser.add_argument("--settings", required=True)
    parser.add_argument("--progress-fd", type=int, default=-1)
    arguments = parser.parse_args()
    settings = from_json(arguments.settings, WorkerSettings)
    # The daemon decides when a worker ends; a Ctrl-C in the terminal reaches the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = DaemonSocket(arguments.fd)
    try:
        with link.watched():
            channel = socket.socket(fileno=arguments.streams_fd)
            compute, loaded, facts = _started(settings, link.send, channel, arguments.progress_fd)
    except (Exception, SystemExit, MemberLost) as error:
        known = error.error if isinstance(error, MemberLost) else error
        return _failed(link, typed(known, f"{settings.name} could not be loaded: {known}"))
    front = Front(link, compute, loaded, settings.name)
    threading.Thread(target=front.read, args=(protocol.commands(),), name="reader", daemon=True).start()
    link.send(facts)
    try:
        compute.run()
    except MemberLost as lost:
        return _failed(link, lost.error)
    except Exception:
        traceback.print_exc()
        link.flush()
        return EXIT_CRASHED
    link.flush()
    return EXIT_OK


def _failed(link: DaemonSocket, error: FleetError) -> int:
    """Tell the daemon why the worker ends; returns its exit status."""
    link.send(LoadFailed(error.code, error.message, error.hint))
    link.flush()
    return EXIT_LOAD_FAILED


def _started(
    settings: WorkerSettings, emit: Callable[[Report], None], channel: socket.socket, progress_fd: int
) -> tuple[Loop, Loaded | VectorModel | None, Ready]:
    """Load what the settings name. Returns the loop, the model if it is whole, and Ready."""
    if settings.purpose != "chat":
        return _start_vectors(settings, emit, channel)
    return start(settings, emit, channel, progress_fd)


def _prepared_process(
    settings: WorkerSettings, emit: Callable[[Report], None], channel: socket.socket
) -> ChannelThread:
    """What comes before the first import of MLX."""
    if settings.threads:
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(settings.threads)
        os.environ["OPENBLAS_NUM_THREADS"] = str(settings.threads)
    # The daemon waits until a socket is taken: not for imports.
    handed_over = ChannelThread(channel)
    emit(protocol.Loading("starting"))
    keep_kernels(settings.cache)
    products.preload_blas()
    return handed_over


def start(
    settings: WorkerSettings,
    emit: Callable[[Report], None],
    channel: socket.socket,
    progress_fd: int = -1,
) -> tuple[Scheduler | HelperLoop, Loaded | None, Ready]:
    """Load into this process. Returns the loop, the model if it is whole, and Ready.

    ``progress_fd``: a file of ``PassProgress``, of a rank that is looked at; -1: none.
    """
    handed_over = _prepared_process(settings, emit, channel)
    import_libraries(settings.cache)
    from fleetd.engine.load import loading, model_reading, stage_loading

    device = model_reading.pick_device(settings.device)
    if device == "cpu":
        from fleetd.engine.cpu import mlx_functions

        mlx_functions.install()
    compute: Scheduler | HelperLoop
    loaded: Loaded | None = None
    members = _members(settings, device, progress_fd)
    if members is not None:
        handed_over.give_to(members.put)
    if settings.ring is not None and settings.ring.rank:
        compute, facts = _rank_loop(settings, settings.ring, device, progress_fd, emit)
    elif settings.last_layer:
        part = stage_loading.load_part(settings, device, emit)
        compute, facts = _helper_loop(settings, part, emit), part.facts
    else:
        loaded = loading.load(settings, device, emit, members)
        compute, facts = _scheduler(settings, loaded, device, emit), loaded.facts
    if members is not None:
        members.others, members.wake = compute.put_stream, compute.inbox.wake
    else:
        handed_over.give_to(compute.put_stream)
    return compute, loaded, facts


def _members(settings: WorkerSettings, device: Device, progress_fd: int) -> GroupMembers | None:
    """The other machines of a group for which this worker answers; None without one."""
    from fleetd.engine.load.group_members import GroupMembers

    if settings.ring is not None:
        from fleetd.engine.load.rank_members import RankMembers

        prepare_rank(device)
        if not settings.ring.rank:
            return RankMembers(settings.group, settings.ring, _progress(progress_fd))
    return GroupMembers(settings.group) if settings.group else None


def prepare_rank(device: Device) -> None:
    """What layers that are divided need of a CPU."""
    if device == "cpu":
        from fleetd.engine.ranks import ring

        ring.keep_rows_stable()


def _progress(fd: int) -> PassProgress:
    return PassProgress(fd) if fd >= 0 else PassProgress.alone()


def _rank_loop(
    settings: WorkerSettings,
    place: RingPlace,
    device: Device,
    progress_fd: int,
    emit: Callable[[Report], None],
) -> tuple[HelperLoop, Ready]:
    """The loop of a rank that answers nothing."""
    from fleetd.engine.load.rank_loading import load_rank
    from fleetd.engine.loop.rank_loop import RankLoop
    from fleetd.engine.measure.memory import KvBudget

    progress = _progress(progress_fd)
    rank = load_rank(settings, place, progress, device, emit)
    facts = rank.facts
    loop = RankLoop(
        stage=rank.stage,
        ring=rank.ring,
        progress=progress,
        context_tokens=facts.shape.context_tokens,
        budget=KvBudget(facts.kv_budget_bytes, rank.sizes),
        emit=emit,
    )
    return loop, facts


def _start_vectors(
    settings: WorkerSettings, emit: Callable[[Report], None], channel: socket.socket
) -> tuple[VectorLoop, VectorModel, Ready]:
    """Load a model for vectors or for reranking."""
    handed_over = _prepared_process(settings, emit, channel)
    quiet_libraries()
    with collector.paused_for_imports(), _indexed(settings.cache):
        from fleetd.engine.load.model_reading import pick_device
        from fleetd.engine.vectors.vector_loading import load_vectors
        from fleetd.engine.vectors.vector_loop import VectorLoop
    device = pick_device(settings.device)
    if device == "cpu":
        from fleetd.engine.cpu import mlx_functions

        mlx_functions.install()
        # Work that can wait: on the same cores, an answer that is written goes first.
        priority.yield_cores(limits.VECTOR_NICE)
    loaded = load_vectors(settings, device, emit)
    loop = VectorLoop(model=loaded.model, tokens_per_s=loaded.facts.speed.prefill_tok_s, emit=emit)
    handed_over.give_to(loop.put_stream)
    return loop, loaded.model, loaded.facts


def _indexed(cache: str) -> AbstractContextManager[object]:
    """Quicker imports, by what is stored in the home's folder; "" stores nothing."""
    return import_index.stored(Path(cache)) if cache else nullcontext()


def keep_kernels(cache: str) -> None:
    """Have MLX and CUDA's driver keep the kernels that they compile in the home's cache folder.

    MLX keeps them in the system's folder for temporary files, which is empty after a start, or after each
    start of the service, and then a model's first steps take minutes. Where they lie can be told elsewise.
    """
    if cache:
        folder = Path(cache) / "kernels"
        os.environ.setdefault("MLX_PTX_CACHE_DIR", str(folder / importlib.metadata.version("mlx")))
        os.environ.setdefault("CUDA_CACHE_PATH", str(folder / "driver"))


def import_libraries(cache: str) -> None:
    """Import all that a worker uses, which takes seconds: late, so that a refusal to start is quick.

    Args:
        cache: the home's folder for what can be found out again; "" if there is none.
    """
    quiet_libraries()
    with collector.paused_for_imports(), _indexed(cache):
        # The first stream or block must not wait for these.
        from cryptography.hazmat.primitives.ciphers import aead  # noqa: F401
        from cryptography.hazmat.primitives.kdf import hkdf  # noqa: F401

        from fleetd.engine.load import loading, stage_loading  # noqa: F401
        from fleetd.engine.loop import compute_loop, scheduler  # noqa: F401


def _helper_loop(settings: WorkerSettings, part: LoadedPart, emit: Callable[[Report], None]) -> HelperLoop:
    """The loop of a worker that has some layers of a model, and helps with prompts."""
    from fleetd.engine.loop.compute_loop import HelperLoop
    from fleetd.engine.measure.idle_calibration import IdleCalibration
    from fleetd.engine.measure.memory import KvBudget
    from fleetd.engine.shared_prefill.part_speeds import PartCalibration

    facts, sharable = part.facts, part.sharable

    def calibration() -> PartCalibration:
        return PartCalibration(
            sharable.stage,
            sharable.layout,
            facts.shape.context_tokens,
            limits.CALIBRATE_S,
            device=facts.device,
        )

    return HelperLoop(
        sharable=sharable,
        context_tokens=facts.shape.context_tokens,
        budget=KvBudget(facts.kv_budget_bytes, facts.shape.sizes),
        emit=emit,
        part_disks=_part_disks(settings, facts),
        idle=IdleCalibration(calibration, facts, emit),
    )


def _scheduler(
    settings: WorkerSettings, loaded: Loaded, device: Device, emit: Callable[[Report], None]
) -> Scheduler:
    """The loop of a worker that answers requests with a whole model."""
    from fleetd.engine.loop.scheduler import Scheduler
    from fleetd.engine.measure.calibrate import calibration
    from fleetd.engine.measure.idle_calibration import IdleCalibration
    from fleetd.engine.measure.memory import KvBudget
    from fleetd.engine.prefixes.prefix_cache import PrefixCache

    facts = loaded.facts
    # Other machines of a group have no more room besides kept prompts.
    most = min(facts.shape.context_tokens, loaded.shares.rows.alone)
    again = partial(calibration, loaded.model, device, facts.vocab_size, most)
    return Scheduler(
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        context_tokens=facts.shape.context_tokens,
        chunks=_chunks(settings, loaded),
        max_streams=settings.max_streams if loaded.together else 1,
        budget=KvBudget(
            facts.kv_budget_bytes, facts.shape.sizes, address_space.promised, rows=loaded.shares.rows
        ),
        prefix=PrefixCache(loaded.shares.prefix, rows=loaded.shares.prefix_rows),
        emit=emit,
        idle=IdleCalibration(again, facts, emit, keep=loaded.keep_measured),
        defaults=loaded.defaults,
        sharable=loaded.sharable,
        part_disks=_part_disks(settings, facts) if loaded.sharable is not None else None,
        speculation=_speculation(settings, loaded),
        sparse=loaded.sparse,
        vocab_size=facts.vocab_size,
        search=loaded.search,
        disk=_disk(settings, loaded),
    )


def quiet_libraries() -> None:
    """No telemetry, no network, no advertising on stderr; before transformers is imported."""
    os.environ.update(
        HF_HUB_OFFLINE="1",
        HF_HUB_DISABLE_TELEMETRY="1",
        TRANSFORMERS_OFFLINE="1",
        TRANSFORMERS_VERBOSITY="error",
        TRANSFORMERS_NO_ADVISORY_WARNINGS="1",
        TOKENIZERS_PARALLELISM="false",
    )


def _speculation(settings: WorkerSettings, loaded: Loaded) -> WorkerSpeculation:
    from fleetd.engine.speculation.speculation import WorkerSpeculation

    return WorkerSpeculation(
        loaded.verdict,
        loaded.facts.vocab_size,
        settings.speculation,
        computes_ahead=loaded.facts.device != "cpu",
        ahead=settings.blocks_ahead,
        head=loaded.head,
    )


def _disk(settings: WorkerSettings, loaded: Loaded) -> DiskTier | None:
    """What keeps prompts on the disk; None if nothing does, or the model's caches are of other kinds."""
    from mlx_lm.models.cache import make_prompt_cache

    from fleetd.engine.groups.group_model import GroupModel
    from fleetd.engine.groups.group_tier import GroupTier, LayersAlone
    from fleetd.engine.prefixes.disk_tier import DiskTier
    from fleetd.engine.sequence_state.blocks import can_be_blocks

    model = loaded.model
    several = isinstance(model, GroupModel)
    divided = settings.ring is not None
    if settings.blocks is None or divided:
        return None
    if not can_be_blocks(model.empty if several else make_prompt_cache(model)):
        return None
    fields: dict[str, Any] = {
        "settings": settings.blocks,
        "model_name": settings.name,
        "basis": loaded.basis,
        "cost": _cost(loaded.facts),
        # No more than the prefix cache may hold: it is the same memory as a rule.
        "most_queued_bytes": loaded.shares.prefix,
    }
    if several:
        return GroupTier(model=LayersAlone(model.front, model.dtype), members=model.members, **fields)
    return DiskTier(model=model, **fields)


def _part_disks(settings: WorkerSettings, facts: Ready) -> PartDisks | None:
    """What keeps prompts of other machines' models, of which layers run here; None if nothing does."""
    from fleetd.cache.block_names import LateBasis
    from fleetd.engine.groups.group_tier import LayersAlone
    from fleetd.engine.groups.member_disk import PartDisk
    from fleetd.engine.load.load_findings import part_basis
    from fleetd.engine.prefixes.disk_tier import DiskTier

    blocks, arithmetic = settings.blocks, facts.arithmetic
    basis = part_basis(facts.device, arithmetic) if arithmetic is not None else b""
    if blocks is None or not basis:
        return None

    def disk(command: ServeStage, stage: Stage, dtype: mx.Dtype, most_bytes: int) -> PartDisk | None:
        if not command.kept_for or not command.origin:
            return None
        tier = DiskTier(
            settings=blocks,
            model=LayersAlone(stage, dtype),
            model_name=settings.part_of or settings.name,
            basis=LateBasis(lambda: basis),
            cost=_cost(facts),
            most_queued_bytes=most_bytes,
        )
        whose = msgspec.json.encode([command.kept_for, command.first, command.last])
        return PartDisk(tier, hashlib.sha256(basis + whose).digest(), frozenset({command.origin}))

    return disk


def _cost(facts: Ready) -> PrefillCost:
    from fleetd.cache.pricing import PrefillCost

    return PrefillCost.of(facts.speed.prefill_tok_s, facts.speed.prefill_context_s)


def _chunks(settings: WorkerSettings, loaded: Loaded) -> Chunks:
    if settings.prefill_chunk_tokens:
        return FixedChunks(settings.prefill_chunk_tokens, max(1, settings.prefill_chunk_tokens // 4))
    if loaded.facts.device == "cpu":
        return PacedChunks()
    return MeasuredChunks(loaded.chunk_s, loaded.facts.speed.prefill_context_s)


if __name__ == "__main__":
    sys.exit(main())
