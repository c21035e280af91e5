"""Two schedulers that share prompts, both turned by hand: the worker that answers, and one that helps it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import pytest
import sharing
from msgspec.structs import replace
from turned_scheduler import TinyFamily, TurnedScheduler

from fleetd.engine.measure.chunk_size import FixedChunks
from fleetd.engine.prompt.prompt_encoding import prepare
from fleetd.engine.protocol import Accepted, AssistPrefill, PrefillReport, PrefillWithHelpers, StreamTag
from fleetd.engine.shared_prefill.frame_schedule import helper_streams
from fleetd.engine.shared_prefill.home_prefill import SharedPrefill
from fleetd.engine.sparse_prefill.sparse import Sparse


class TurnedPair:
    """``home`` answers; ``helper`` takes a part of its prompts."""

    def __init__(self, family: TinyFamily, **options: Any) -> None:
        self.family = family
        chunks = FixedChunks(sharing.CHUNK, sharing.CHUNK)
        sparse = Sparse.of(family.model)
        settings = {"chunks": chunks, "sharable": family.sharable, "sparse": sparse, **options}
        self.home = TurnedScheduler(family.model, family.tokenizer, **settings)
        self._closed: list[Any] = []
        self.helper = TurnedScheduler(family.model, family.tokenizer, chunks=chunks, sharable=family.sharable)

    def ask(
        self, name: str, tokens: int = 800, seed: int = 5, kept: list[int] | None = None, **fields: Any
    ) -> None:
        """``kept``: the tokens that are not left out."""
        request = sharing.prompt(name, tokens, seed, **{"max_tokens": 1, **fields})
        prepared = prepare(request, self.family.tokenizer, sharing.VOCAB)
        self.home.scheduler.inbox.put(replace(prepared, kept=kept))

    def share(self, name: str, kind: str, *, exact: bool = True) -> None:
        """From the acceptance of a prompt to the first turn of its shared prefill."""
        self.turn_until(lambda: bool(self.home.of(name, Accepted)))
        (accepted,) = self.home.of(name, Accepted)
        assert accepted.waits
        split = sharing.split_of(kind, accepted)
        job = f"{name} helped"
        self.helper.scheduler.tell(AssistPrefill(job, split, 0))
        self.turn_until(lambda: bool(self.helper.of(job, Accepted)))
        for stream in helper_streams(split, 0):
            near, far = socket.socketpair()
            key = os.urandom(32)
            theirs = "helper0" if stream == "home" else "in"
            self.helper.scheduler.put_stream(StreamTag(job, stream, key, "acceptor"), near)
            self.home.scheduler.put_stream(StreamTag(name, theirs, key, "connector"), far)
        self.home.scheduler.tell(PrefillWithHelpers(name, split, 60.0, exact))
        self.turn_until(lambda: self.shared(name) is not None)

    def shared(self, name: str) -> SharedPrefill | None:
        """The prefill of a prompt while helpers take part in it."""
        for sequence in self.home.scheduler._prefilling:
            if sequence.id == name and isinstance(sequence.prefiller, SharedPrefill):
                return sequence.prefiller
        return None

    def turn(self, *, helper: bool = True) -> None:
        self._turn(self.home)
        if helper:
            self._turn(self.helper)

    def _turn(self, end: TurnedScheduler) -> None:
        if not end.scheduler._occupied:
            end.scheduler.inbox.wake()  # or it would wait for work that the other one may have
        end.turn()

    def turn_until(self, done: Callable[[], bool], *, turns: int = 2000) -> None:
        for _ in range(turns):
            if done():
                return
            self.turn()
        pytest.fail(f"not done: {self.home.events[-5:]}")

    def finish(self, name: str) -> list[Any]:
        """The whole answer of a request, and how much of its prompt was there already."""
        self.turn_until(lambda: bool(self.home.of(name)) and not self.home.busy and not self.helper.busy)
        return self.home.of(name)

    def close(self) -> None:
        """As both workers end. Idempotent."""
        for end in (self.home, self.helper):
            if end.scheduler not in self._closed:
                self._closed.append(end.scheduler)
                end.scheduler._close()

    def gave_up(self, name: str) -> str:
        """The code with which sharing ended; "" if it went well."""
        (shared,) = self.home.of(name, PrefillReport)
        return str(shared.code)
