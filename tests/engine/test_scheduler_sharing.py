"""Prompts that may be shared in the scheduler: they stand in nobody's way, and wait for nothing for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import sharing
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.utils import load_model
from turned_scheduler import TurnedScheduler

from fleetd import limits
from fleetd.engine.layers.stage import Stage
from fleetd.engine.measure.chunk_size import FixedChunks
from fleetd.engine.prefixes.prefix_cache import EQUIVALENT
from fleetd.engine.prompt.prompt_encoding import prepare
from fleetd.engine.protocol import (
    Accepted,
    AssistPrefill,
    Cancel,
    Delta,
    Failed,
    Finished,
    Heartbeat,
    PrefillAlone,
    PrefillReport,
    PrefillWithHelpers,
)
from fleetd.engine.shared_prefill.sharable import Sharable
from fleetd.plan.prefill.split import Split

pytestmark = pytest.mark.usefixtures("on_cpu")
SPLIT = Split("layers", (0, 2, 4), 4, 0, 399, sharing.CHUNK)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Sharable]:
    path: Path = sharing.write(tmp_path_factory.mktemp("tiny"))
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    model, _ = load_model(path)
    found = model, load_tokenizer(path), Sharable.of(Stage.of(model), "cpu", {})
    mx.set_default_device(before)
    return found


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SHARE_SETUP_S", 0.3)
    monkeypatch.setattr(limits, "TICKET_S", 0.3)
    monkeypatch.setattr(limits, "ENGINE_BEAT_S", 0.05)


class SharingBench(TurnedScheduler):
    """A scheduler whose prompts may be shared."""

    def __init__(self, parts: tuple[Any, Any, Sharable], **options: Any) -> None:
        model, tokenizer, sharable = parts
        chunks = FixedChunks(sharing.CHUNK, sharing.CHUNK)
        super().__init__(model, tokenizer, **{"chunks": chunks, "sharable": sharable, **options})

    def ask(self, name: str, tokens: int = 400, seed: int = 5, **fields: Any) -> None:
        request = sharing.prompt(name, tokens, seed, **fields)
        self.scheduler.inbox.put(prepare(request, self.tokenizer, sharing.VOCAB))

    def turn(self, turns: int = 1) -> None:
        for _ in range(turns):
            assert self.scheduler.turn()
            self.scheduler.heartbeat()
            self.scheduler.validate()

    def finish_all(self, *names: str) -> None:
        for _ in range(500):
            if all(self.of(name, Finished) or self.of(name, Failed) for name in names):
                break
            self.turn()
        else:
            pytest.fail(f"not done: {self.events[-5:]}")
        s = self.scheduler
        assert s.budget.used_bytes == len(s.guests[0]) == len(s.streams) == 0
        assert not s.busy
        s.validate()


def test_a_prompt_that_waits_for_word_lets_others_go_and_keeps_its_memory(
    parts: tuple[Any, Any, Sharable], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SHARE_SETUP_S", 600.0)
    bench = SharingBench(parts)
    bench.ask("waits")
    bench.ask("other", 300, 6, shared=False)
    while not bench.of("other", Finished):
        bench.turn()
    (accepted,) = bench.of("waits")
    assert accepted == Accepted("waits", 400, 0, sharing.CHUNK, waits=True)
    assert bench.scheduler.budget.used_bytes >= 400 * 1024
    bench.turn(3)
    heartbeats = [event for event in bench.events if isinstance(event, Heartbeat)]
    assert heartbeats[-1].blocked
    assert heartbeats[-1].prefilling == 1
    bench.scheduler.tell(PrefillAlone("waits"))
    bench.finish_all("waits")
    assert bench.of("waits", PrefillReport) == []
    assert bench.of("waits", Finished)[0].reason == "length"


def test_one_that_comes_in_the_same_moment_as_another_is_offered(parts: tuple[Any, Any, Sharable]) -> None:
    bench = SharingBench(parts)
    bench.ask("other", 300, 6, shared=False)
    bench.ask("long")
    bench.turn()
    assert bench.of("long", Accepted)[0].waits
    bench.finish_all("other", "long")


def test_without_word_or_streams_it_goes_on_alone(parts: tuple[Any, Any, Sharable]) -> None:
    bench = SharingBench(parts)
    bench.ask("no word")
    bench.ask("no streams", seed=6)
    bench.turn()
    bench.scheduler.tell(PrefillWithHelpers("no streams", SPLIT, 1.0))
    bench.finish_all("no word", "no streams")
    for name in ("no word", "no streams"):
        kinds = [type(event) for event in bench.of(name)]
        assert kinds.index(PrefillReport) < kinds.index(Delta)
        (shared,) = bench.of(name, PrefillReport)
        assert (shared.code, shared.verified) == ("peer_unreachable", 0)


@pytest.mark.parametrize("word", [None, PrefillWithHelpers("r", SPLIT, 1.0), PrefillAlone("r")])
def test_cancelled_while_it_waits(
    parts: tuple[Any, Any, Sharable], word: PrefillWithHelpers | PrefillAlone | None
) -> None:
    bench = SharingBench(parts)
    bench.ask("r")
    bench.turn()
    if word is not None:
        bench.scheduler.tell(word)
    bench.scheduler.tell(Cancel("r"))
    bench.finish_all("r")
    assert bench.of("r", Finished)[0].reason == "cancelled"
    assert bench.of("r", Delta) == []


def test_what_would_have_to_queue_or_cannot_be_cut_is_not_offered(parts: tuple[Any, Any, Sharable]) -> None:
    busy = SharingBench(parts, max_streams=1)
    busy.ask("running", 20, max_tokens=50, shared=False)
    busy.turn()
    busy.ask("queued")
    whole = SharingBench(parts, sharable=None)
    whole.ask("whole")
    whole.scheduler.tell(AssistPrefill("assist", SPLIT, 0))
    for bench, name in ((busy, "queued"), (whole, "whole")):
        bench.finish_all(name)
        assert bench.of(name)[0] == Accepted(name, 400)
    assert whole.of("assist")[0].code == "model_unsupported"


def test_assists_are_bounded_and_end_without_their_streams(
    parts: tuple[Any, Any, Sharable], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TICKET_S", 600.0)
    bench = SharingBench(parts)
    for name in ("one", "two", "three", "one"):
        bench.scheduler.tell(AssistPrefill(name, SPLIT, 0))
    bench.turn()
    assert [type(event) for event in bench.of("one")] == [Accepted, Failed]
    assert bench.of("three", Failed)[0].code == "overloaded"
    # Half of the layers: half of the memory.
    half = parts[2].layout.kept_bytes(SPLIT.layers_of(0), 399)
    assert half == parts[2].layout.kept_bytes(range(SPLIT.layers), 399) // 2
    assert bench.scheduler.budget.used_bytes == limits.ASSISTS * half
    bench.scheduler.tell(Cancel("two"))
    while not bench.of("two", Finished):
        bench.turn()
    (one,) = bench.scheduler.guests[0]._tasks
    one.until_s = 0.0
    while len(bench.of("one", Failed)) < 2:
        bench.turn()
    assert bench.of("one", Failed)[1].code == "peer_lost"
    bench.finish_all()


def test_cached_numbers_of_others_serve_only_what_may_be_shared(parts: tuple[Any, Any, Sharable]) -> None:
    bench = SharingBench(parts)
    bench.ask("first", 300, shared=False)
    bench.finish_all("first")
    entries = bench.scheduler.prefix._entries
    for key, entry in entries.items():
        entries[key] = type(entry)(EQUIVALENT, entry.tokens, entry.cache, entry.nbytes, entry.trimmable)
    bench.ask("shared", 700)
    bench.turn()
    (accepted,) = bench.of("shared", Accepted)
    assert (accepted.cached, accepted.exact) == (300, False)
    bench.scheduler.tell(PrefillAlone("shared"))
    bench.finish_all("shared")
    assert bench.of("shared", Finished)[0].usage.cached_tokens == 300
    # Also where so little is new that nobody would help: a conversation's next turn.
    bench.ask("turn", 710)
    bench.turn()
    (accepted,) = bench.of("turn", Accepted)
    assert (accepted.waits, accepted.cached, accepted.exact) == (True, 700, False)
    bench.scheduler.tell(PrefillAlone("turn"))
    bench.finish_all("turn")
    assert bench.of("turn", Finished)[0].usage.cached_tokens == 700
    # What rests on them is kept with them, and an answer of its own begins anew.
    assert {entry.namespace for entry in entries.values()} == {EQUIVALENT}
    bench.ask("own", 700, shared=False)
    bench.finish_all("own")
    assert bench.of("own", Finished)[0].usage.cached_tokens == 0
