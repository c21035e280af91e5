"""Groups in one process, on real sockets with real threads: what one leaves, hundreds would add up."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable

import mlx.core as mx
import psutil
import tiny_architectures
from sharing import tcp_pair

from fleetd import limits
from fleetd.engine.groups.group_model import GroupModel
from fleetd.engine.groups.member_stage import MemberStage
from fleetd.engine.groups.remote_stage import RemoteStage
from fleetd.engine.layers.stage import Stage
from fleetd.engine.protocol import STAGE, StreamTag
from fleetd.engine.streams.handed_over import HandedOverStreams

GROUPS, TIMES, CUT = 50, 3, 2
# What so many groups may leave. Allocators take a large piece now and then and keep it, so the least of
# several times counts: what is left behind is left each time.
LEAST_BYTES = 8 << 20


class MemberThread:
    """A member's compute thread, which outlasts groups as in a worker. ``stage``: what it runs now."""

    def __init__(self) -> None:
        self.moved, self.over = threading.Event(), threading.Event()
        self.stage: MemberStage | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self.over.is_set():
            self.moved.wait()
            self.moved.clear()
            while (stage := self.stage) is not None and stage.ready:
                stage.step()

    def close(self) -> None:
        self.over.set()
        self.moved.set()
        self._thread.join()


def group(whole: Stage, thread: MemberThread, ask: Callable[[GroupModel], None]) -> None:
    """Form a group of two, ask it, and end it."""
    near, far = tcp_pair()
    key, asked = os.urandom(32), threading.Event()
    streams = HandedOverStreams(thread.moved.set, eager=True, beat_s=limits.GROUP_BEAT_S)
    theirs = HandedOverStreams(asked.set, eager=True)
    streams.put(StreamTag("member", STAGE, key, "acceptor"), near)
    theirs.put(StreamTag("front", STAGE, key, "connector"), far)
    member = MemberStage(whole.part(CUT, whole.total), mx.float32, 1 << 30, streams.connect("member"))
    thread.stage = member
    model = GroupModel(whole, CUT, mx.float32)
    remote = RemoteStage(
        theirs.connect("front"),
        asked,
        first=CUT,
        last=whole.total,
        width=model.width,
        dtype=mx.float32,
        kept=model.kept_by(CUT, whole.total),
        name="member",
    )
    model.join([remote])
    ask(model)
    thread.stage = None
    remote.close()
    member.close()


def test_groups_that_formed_and_ended_leave_no_thread_descriptor_or_memory(on_cpu: None) -> None:
    whole, process = Stage.of(tiny_architectures.tiny("llama")), psutil.Process()
    answers = []

    def ask(model: GroupModel) -> None:
        cache = model.make_cache()
        model.read(mx.array([[5, 7, 11, 13]]), cache)
        answers.append(mx.argmax(model(mx.array([[3]]), cache)).item())

    def held() -> tuple[int, int]:
        gc.collect()
        return threading.active_count(), process.num_fds()

    thread = MemberThread()
    group(whole, thread, ask)
    before, left = held(), []
    for _ in range(TIMES):
        resident = process.memory_info().rss
        for _ in range(GROUPS):
            group(whole, thread, ask)
        # Threads and descriptors of other tests may go meanwhile.
        assert all(now <= then for now, then in zip(held(), before, strict=True)), (held(), before)
        left.append(process.memory_info().rss - resident)
    assert len(set(answers)) == 1
    thread.close()
    assert min(left) < LEAST_BYTES, left
