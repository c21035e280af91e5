"""A coding session is read once: through its turns, a compaction, a restart, and on another machine."""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from disk_worker import Worker, settings_in

from bench.harness.agent_session import Piece, Session, Turn
from fleetd.cache import block_names, block_stream
from fleetd.cache.block_store import BlockStore
from fleetd.cache.settings import DiskCacheSettings
from fleetd.engine.protocol import BLOCKS, FetchBlocks, Finished, KvMissing, StreamTag
from fleetd.sealed.stream import SealedSender

pytestmark = pytest.mark.usefixtures("on_cpu", "patient")

SMALL = Session(system_tokens=600, scale=0.35)


class Replay:
    """Two machines, of which the second one may ask for what the first one's disk has."""

    def __init__(self, model: Any, tokenizer: Any, root: Path) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._disks = [settings_in(root / name) for name in ("first", "second")]
        self._workers: list[Worker | None] = [None, None]
        self.brought = [0, 0]  # tokens from the disk, from the other machine

    def ask(self, number: int, turn: Turn) -> tuple[Finished, str]:
        """The turn's answer, where it is asked; a machine that is left has written everything."""
        if turn.restarted or self._workers[1 - turn.machine] is not None:
            self.stop()
        worker = self._workers[turn.machine] = self._workers[turn.machine] or self._worker(turn.machine)
        name = f"r{number}"
        worker.put(name, tokens_of(turn), fetches=bool(turn.machine))
        answered = 0
        while not any(isinstance(event, Finished) and event.id == name for event in worker.events):
            worker.turn()
            lacking = [event for event in worker.events if isinstance(event, KvMissing)]
            for question in lacking[answered:]:
                self._send(worker, question)
            answered = len(lacking)
        done = worker.finish(name)
        self.brought[0] += done.timings.restored_tokens
        self.brought[1] += done.timings.fetched_tokens
        said = worker.text(name)
        worker.events.clear()
        return done, said

    def stop(self) -> None:
        for number, worker in enumerate(self._workers):
            if worker is not None:
                worker.stop()
                self._workers[number] = None

    def _worker(self, machine: int) -> Worker:
        return Worker(self._model, self._tokenizer, self._disks[machine])

    def _send(self, worker: Worker, question: KvMissing) -> None:
        """As the daemons do: as many blocks as the other disk has, from there."""
        names = [block_names.kept_as(name, local_only=False) for name in question.names]
        blocks = found(self._disks[0], names)
        if not blocks:
            worker.scheduler.tell(FetchBlocks(question.id))
            return
        near, far = socket.socketpair()
        key = os.urandom(32)
        worker.scheduler.put_stream(StreamTag(question.id, BLOCKS, key, "connector"), near)
        worker.scheduler.tell(FetchBlocks(question.id, blocks))

        def send() -> None:
            store = BlockStore(self._disks[0])
            with far:
                block_stream.send(SealedSender(far, key, "acceptor"), names[:blocks], store.read)
            store.close()

        threading.Thread(target=send).start()


def found(disk: DiskCacheSettings, names: list[bytes]) -> int:
    store = BlockStore(disk)
    try:
        return store.find(names).blocks
    finally:
        store.close()


@cache
def message(piece: Piece) -> list[int]:
    return tiny_models.prompt(piece.tokens, piece.seed)


def tokens_of(turn: Turn) -> list[int]:
    return [token for piece in turn.pieces for token in message(piece)]


def test_a_session_computes_little_more_than_what_is_new_in_it(
    model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    replay, computed, new = Replay(model, tokenizer, tmp_path), 0, 0
    answers = {}
    for number, turn in enumerate(SMALL):
        done, answers[number] = replay.ask(number, turn)
        assert done.usage.prompt_tokens == turn.tokens
        computed += turn.tokens - done.usage.cached_tokens
        new += turn.new_tokens
    replay.stop()
    assert new < turn.tokens * 2 < sum(each.tokens for each in SMALL) / 5, "it is no session of an agent"
    assert computed <= 1.1 * new
    # All of it came from somewhere: after the restart, and on the machine to which it moved.
    before = [list(SMALL)[at - 1].tokens for at in (SMALL.restart_at, SMALL.moves_at)]
    assert replay.brought[0] >= before[0] - 256
    assert replay.brought[1] >= before[1] - 256
    # The answers are those of a machine that computes everything.
    for at in (SMALL.restart_at, SMALL.moves_at):
        alone = Replay(model, tokenizer, tmp_path / f"alone {at}")
        assert alone.ask(at, replace(list(SMALL)[at], machine=0))[1] == answers[at]
        alone.stop()
