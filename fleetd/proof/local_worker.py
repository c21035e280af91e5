"""An engine worker inside this process, driven step by step: mlx-lm can run beside it on the same weights."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from fleetd.engine import worker
from fleetd.engine.protocol import (
    Accepted,
    Assisted,
    AssistPrefill,
    Delta,
    Failed,
    Finished,
    Generate,
    PrefillReport,
    PrefillWithHelpers,
    Report,
    Sampling,
    Speculate,
    StreamTag,
    TokenPrompt,
)
from fleetd.engine.settings import WorkerSettings
from fleetd.errors import EngineError, from_code
from fleetd.plan.prefill.split import Split

R = TypeVar("R", bound=Report)


class TimedAnswer(msgspec.Struct, frozen=True):
    """Seconds to the first token, and tokens per second from it to the last one."""

    first_s: float
    tokens: int
    tok_s: float


class LocalWorker:
    """``compute``, ``loaded`` and ``facts`` as a worker process has them."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._reports: list[tuple[float, Report]] = []
        # Streams are put in directly; the channel stays open and silent.
        self._daemon, channel = socket.socketpair()
        compute, loaded, self.facts = worker.start(settings, self._report, channel)
        if loaded is None:
            raise EngineError("Only some layers of the model were loaded.")
        # A Scheduler: the type's module cannot be imported before the accelerator's libraries are set up.
        self.compute: Any = compute
        self.loaded = loaded
        self._count = 0

    def _report(self, report: Report) -> None:
        self._reports.append((time.perf_counter(), report))

    def ask(
        self, tokens: Sequence[int], max_tokens: int, *, temperature: float = 0.0, drafts: bool = False
    ) -> TimedAnswer:
        """Answer a prompt alone. Raises the answer's own error."""
        begun = time.perf_counter()
        request = self._submit(
            tokens,
            max_tokens=max_tokens,
            sampling=Sampling(temperature=temperature, seed=1),
            speculate=None if drafts else Speculate(enabled=False),
        )
        self._until(Finished, request)
        times = [at for at, report in self._reports if isinstance(report, Delta) and report.id == request]
        finished = self._of(Finished, request)[0]
        count, decode_s = finished.usage.completion_tokens, finished.timings.decode_s
        rate = (count - 1) / decode_s if count > 1 and decode_s > 0 else 0.0
        return TimedAnswer((times[0] if times else time.perf_counter()) - begun, count, rate)

    def share(self, tokens: Sequence[int], make_split: Callable[[Accepted], Split]) -> Split:
        """Prefill a prompt in two parts, both computed by this worker, over a sealed stream on loopback.

        Its keys and values are then in the prefix cache. Raises EngineError if it was not shared to its end.
        """
        request = self._submit(tokens, max_tokens=1, shared=True)
        accepted = self._until(Accepted, request)
        if not accepted.waits:
            raise EngineError("The engine does not share this prompt.")
        split = make_split(accepted)
        part = f"{request}.0"
        # All of it before the next turn: the engine waits only seconds for a decision and its streams.
        self.compute.tell(AssistPrefill(part, split, 0))
        streams = {"home": "helper0"} | ({"out": "in"} if split.has_next(0) else {})
        for name, theirs in streams.items():
            near, far = _tcp_pair()
            key = os.urandom(32)
            self.compute.put_stream(StreamTag(part, name, key, "acceptor"), near)
            self.compute.put_stream(StreamTag(request, theirs, key, "connector"), far)
        self.compute.tell(PrefillWithHelpers(request, split, predicted_s=600.0, exact=True))
        self._until(Finished, request)
        self._until(Assisted, part)
        ended = self._of(PrefillReport, request)[0]
        if ended.code:
            raise from_code(ended.code, ended.reason)
        return split

    def _submit(self, tokens: Sequence[int], **fields: Any) -> str:
        from fleetd.engine.prompt.prompt_encoding import prepare

        self._count += 1
        self._reports.clear()
        request = Generate(f"proof-{self._count}", TokenPrompt(list(tokens)), **fields)
        self.compute.tell(prepare(request, self.loaded.tokenizer, self.facts.vocab_size))
        return request.id

    def _until(self, kind: type[R], request: str) -> R:
        """Turn until there is a report of this kind."""
        while not (found := self._of(kind, request)):
            for failed in (*self._of(Failed, request), *self._of(Failed, f"{request}.0")):
                raise from_code(failed.code, failed.message, hint=failed.hint)
            self.compute.turn()
        return found[0]

    def _of(self, kind: type[R], request: str) -> list[R]:
        return [r for _, r in self._reports if isinstance(r, kind) and getattr(r, "id", "") == request]


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far
