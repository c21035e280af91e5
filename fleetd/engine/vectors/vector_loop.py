"""The loop of a worker for vectors: requests in, a pass over some of their texts per turn, vectors out.

    read request ──► task: its texts by length ──► passes of several tasks' texts ──► one message a task

A pass takes texts of all requests in turn, up to as many tokens as the load has measured to be quick: so a
cancel, and a request with one short text, never wait for more than one pass. Requests in the background are
taken from only while there are no others.

While another worker of this machine reads a chat's prompt, one pass a second begins, half as long as usual:
the chat has the machine, and vectors do not come to a stop. A long pass that is under way then is held up for
a second between two of its layers: at the low priority of its process it would take a part of a core until
the prompt is read, and the prompt waits for its slowest core.
"""

from __future__ import annotations

import math
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx

from fleetd import limits
from fleetd.engine.failures import failed
from fleetd.engine.protocol import (
    Accepted,
    Cancel,
    Finished,
    FreeMemory,
    Heartbeat,
    PromptsRead,
    Report,
    StreamTag,
    Usage,
)
from fleetd.engine.vectors.token_rows import Pass
from fleetd.engine.vectors.vector_model import VectorModel, VectorRequest

# How far the pace of one pass moves what is expected of the next.
_LEARNED = 0.2

Item = VectorRequest | Cancel | FreeMemory | PromptsRead | object


class VectorTask:
    """A request's texts, sorted by length, and what came of them."""

    def __init__(self, asked: VectorRequest) -> None:
        self.asked = asked
        # Longest last, where the next ones are taken from: the passes at the end are the small ones.
        self.pending = sorted(range(len(asked.rows)), key=self.length)
        self._results: dict[int, bytes] = {}

    @property
    def id(self) -> str:
        return self.asked.id

    @property
    def is_over(self) -> bool:
        return len(self._results) == len(self.asked.rows)

    @property
    def results(self) -> list[bytes]:
        """The results in the order of the texts, once it is over."""
        return [self._results[index] for index in range(len(self.asked.rows))]

    def take_texts(self, most_tokens: int) -> list[int]:
        """The longest texts left that have no more tokens together."""
        taken: list[int] = []
        while self.pending and (most_tokens := most_tokens - self.length(self.pending[-1])) >= 0:
            taken.append(self.pending.pop())
        return taken

    def take_one(self) -> list[int]:
        """The longest text left, of whatever length; [] if none is."""
        return [self.pending.pop()] if self.pending else []

    def length(self, index: int) -> int:
        return len(self.asked.rows[index].tokens)

    def put(self, index: int, result: bytes) -> None:
        """Keep what came of a text."""
        self._results[index] = result


@dataclass
class _Holding:
    """Holds one pass up, once, if prompts are read that were not when it began.

    ``held_s``: for how many seconds; None if it was not.
    """

    alone: threading.Event
    wait: Callable[[threading.Event, float], object]
    held_s: float | None = None

    def between(self, states: mx.array) -> None:
        # What is not computed yet would be computed meanwhile.
        mx.eval(states)
        if self.held_s is not None or self.alone.is_set():
            return
        begun = time.perf_counter()
        self.wait(self.alone, limits.VECTOR_YIELD_S)
        self.held_s = time.perf_counter() - begun


@dataclass(kw_only=True)
class VectorLoop:
    """Everything here runs on one thread, but for ``tell``, ``put_stream`` and ``stop``.

    ``wait``: waits for an event for so many seconds at most.
    """

    model: VectorModel
    # How many the model reads in a second, as measured at its load; passes correct it.
    tokens_per_s: float
    emit: Callable[[Report], None]
    monotonic: Callable[[], float] = time.monotonic
    wait: Callable[[threading.Event, float], object] = threading.Event.wait
    steps: int = field(default=0, init=False)
    _tasks: list[VectorTask] = field(default_factory=list, init=False)
    _items: queue.SimpleQueue[Item | None] = field(default_factory=queue.SimpleQueue, init=False)
    _heartbeat_at: float = field(default=0.0, init=False)
    # Set unless other workers read prompts of chats; and when the last pass ended.
    _alone: threading.Event = field(default_factory=threading.Event, init=False)
    _passed_at: float = field(default=-math.inf, init=False)

    def __post_init__(self) -> None:
        self._alone.set()

    # ---- from other threads ----------------------------------------------------------------------------

    def tell(self, item: Item) -> None:
        if isinstance(item, PromptsRead):  # which a pass that is under way has to know
            self._tell_of_prompts(item.reading)
        self._items.put(item)

    def _tell_of_prompts(self, reading: bool) -> None:
        if reading:
            self._alone.clear()
        else:
            self._alone.set()

    def put_stream(self, tag: StreamTag, sock: socket.socket) -> None:
        """No stream leads here."""
        sock.close()

    def stop(self) -> None:
        self._tell_of_prompts(False)
        self._items.put(None)

    # ---- the loop --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Turn until ``stop``. What goes wrong in a pass fails the requests whose texts it had."""
        while self.turn():
            self.heartbeat()

    def turn(self) -> bool:
        """Take what has arrived, then a pass, if there is work. False once the loop is to stop."""
        for item in self._arrived():
            if item is None:
                return False
            self._take_item(item)
        if self._tasks and not self._waits_s:
            self._pass()
            self._passed_at = self.monotonic()
            if not self._tasks:
                # Passes are of all sizes: what was kept of their buffers fits no later one.
                mx.clear_cache()
        return True

    def heartbeat(self) -> None:
        """Report the figures, if it is time for that."""
        now = self.monotonic()
        if now >= self._heartbeat_at:
            self._heartbeat_at = now + limits.ENGINE_BEAT_S
            memory = mx.get_active_memory()
            self.emit(Heartbeat(self.steps, prefilling=len(self._tasks), memory_bytes=memory))

    def _arrived(self) -> list[Item | None]:
        """All that has arrived; if no pass may begin, what arrives first before one may or the next
        heartbeat."""
        found: list[Item | None] = []
        idle_s = self._waits_s if self._tasks else limits.ENGINE_BEAT_S
        try:
            if idle_s:
                found.append(self._items.get(timeout=min(idle_s, limits.ENGINE_BEAT_S)))
            while True:
                found.append(self._items.get_nowait())
        except queue.Empty:
            return found

    @property
    def _waits_s(self) -> float:
        """Seconds until a pass may begin."""
        if self._alone.is_set():
            return 0.0
        return max(0.0, self._passed_at + limits.VECTOR_YIELD_S - self.monotonic())

    def _take_item(self, item: Item) -> None:
        match item:
            case VectorRequest():
                self.emit(Accepted(item.id, item.tokens))
                task = VectorTask(item)
                self._tasks.append(task)
                if task.is_over:
                    self._end(task)
            case Cancel(request_id):
                for task in [task for task in self._tasks if task.id == request_id]:
                    self._tasks.remove(task)
                    self.emit(Finished(request_id, "cancelled"))
            case FreeMemory():
                mx.clear_cache()
                self._heartbeat_at = 0.0
            case _:
                pass  # what only had to end a wait, or is for workers that write text

    def _pass(self) -> None:
        texts = self._next_texts()
        rows = [task.asked.rows[index] for task, index in texts]
        tokens = sum(len(row.tokens) for row in rows)
        # A short one is over sooner than it is held up, and would only take longer for being stopped between.
        long = tokens >= self.tokens_per_s * limits.VECTOR_PASS_S / 2
        holding = _Holding(self._alone, self.wait)
        group = Pass(rows, holding.between) if long and self._alone.is_set() else Pass(rows)
        begun = time.perf_counter()
        try:
            results = self.model.results(group)
        except Exception as error:
            for task in {id(task): task for task, _ in texts}.values():
                self._tasks.remove(task)
                self.emit(failed(task.id, error, "The texts could not be computed"))
            return
        finally:
            self.steps += 1
        pace = tokens / max(time.perf_counter() - begun - (holding.held_s or 0), 1e-6)
        self.tokens_per_s += _LEARNED * (pace - self.tokens_per_s)
        for (task, index), result in zip(texts, results, strict=True):
            task.put(index, result)
            if task.is_over:
                self.emit(self.model.report(task.asked, task.results))
                self._end(task)

    @property
    def pass_tokens(self) -> int:
        """Tokens of a pass that takes about ``limits.VECTOR_PASS_S``, beside a prompt half of that."""
        least, most = limits.VECTOR_PASS_TOKENS
        seconds = limits.VECTOR_PASS_S if self._alone.is_set() else limits.VECTOR_PASS_S / 2
        return min(most, max(least, int(self.tokens_per_s * seconds)))

    def _next_texts(self) -> list[tuple[VectorTask, int]]:
        """Texts of one pass, the shorter ones first. The requests take turns in being the first."""
        urgent = [task for task in self._tasks if not task.asked.request.background] or list(self._tasks)
        left = self.pass_tokens
        found: list[tuple[VectorTask, int]] = []
        for task in urgent:
            for index in task.take_texts(left) or (task.take_one() if not found else []):
                found.append((task, index))
                left -= task.length(index)
        self._tasks.remove(urgent[0])
        self._tasks.append(urgent[0])
        return sorted(found, key=lambda pair: pair[0].length(pair[1]))

    def _end(self, task: VectorTask) -> None:
        self._tasks.remove(task)
        self.emit(Finished(task.id, "stop", Usage(prompt_tokens=task.asked.tokens)))
