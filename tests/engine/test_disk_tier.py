"""Prompts on the disk: what a restored beginning gives is what computing gives, and nothing is in the way."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from disk_worker import BLOCK, Worker, blocks_of, bytes_of, settings_in
from mlx_lm.models.cache import ChunkedKVCache, KVCache, RotatingKVCache

from fleetd import limits
from fleetd.cache.block_names import LateBasis
from fleetd.cache.block_store import BlockStore
from fleetd.cache.index import FoundBlocks
from fleetd.cache.pricing import PrefillCost
from fleetd.cache.settings import DiskCacheSettings
from fleetd.engine.layers.stage import Stage
from fleetd.engine.prefixes.disk_tier import DiskTier
from fleetd.engine.prefixes.prefix_cache import DENSE
from fleetd.engine.protocol import (
    Accepted,
    Cancel,
    Finished,
    PrefillAlone,
)
from fleetd.engine.sequence_state.blocks import ArrivingSnapshot, can_be_blocks
from fleetd.engine.shared_prefill.sharable import Sharable

pytestmark = pytest.mark.usefixtures("on_cpu", "patient")
# Two blocks and more.
PROMPT = tiny_models.prompt(2 * BLOCK + 88)


@pytest.fixture
def settings(tmp_path: Path) -> DiskCacheSettings:
    return settings_in(tmp_path)


def kept(model: Any, tokenizer: Any, settings: DiskCacheSettings, prompt: list[int], **fields: Any) -> str:
    """The answer of a worker that ended after it, so that its prompt is on the disk."""
    worker = Worker(model, tokenizer, settings)
    worker.ask("kept", prompt, **fields)
    worker.stop()
    return worker.text("kept")


def test_a_restored_beginning_gives_the_bytes_of_a_computed_one(
    model: Any, tokenizer: Any, settings: DiskCacheSettings
) -> None:
    first = Worker(model, tokenizer, settings)
    cold = first.ask("cold", PROMPT)
    assert (cold.usage.cached_tokens, cold.timings.restored_tokens) == (0, 0)
    first.stop()

    second = Worker(model, tokenizer, settings)
    warm = second.ask("warm", PROMPT)
    assert (warm.usage.cached_tokens, warm.timings.restored_tokens) == (2 * BLOCK, 2 * BLOCK)
    assert second.text("warm") == first.text("cold")
    computed, restored = (w.scheduler.prefix.fetch([*PROMPT, 0], DENSE) for w in (first, second))
    assert computed.tokens == restored.tokens == len(PROMPT)
    assert bytes_of(computed.cache) == bytes_of(restored.cache)
    second.stop()


def test_what_the_answer_added_is_kept_too(model: Any, tokenizer: Any, settings: DiskCacheSettings) -> None:
    prompt = tiny_models.prompt(2 * BLOCK - 3)
    answer = kept(model, tokenizer, settings, prompt)
    assert len(blocks_of(settings)) == 2
    # The next turn: what was answered, as tokens, is not known here; its block is there all the same.
    worker = Worker(model, tokenizer, settings)
    assert worker.ask("again", prompt).timings.restored_tokens == BLOCK
    assert worker.text("again") == answer
    worker.stop()


def test_the_rest_of_what_memory_has_comes_from_the_disk(
    model: Any, tokenizer: Any, settings: DiskCacheSettings
) -> None:
    answer = kept(model, tokenizer, settings, PROMPT)
    worker = Worker(model, tokenizer, settings)
    # Shorter than a block of its own, so that only memory has it.
    worker.ask("short", PROMPT[: BLOCK + 44])
    assert worker.ask("long", PROMPT).usage.cached_tokens == 2 * BLOCK
    ended = [e for e in worker.events if isinstance(e, Finished)]
    assert [e.timings.restored_tokens for e in ended] == [BLOCK, BLOCK]
    assert worker.text("long") == answer
    # And all of it is in memory now.
    assert worker.ask("once more", PROMPT).timings.restored_tokens == 0
    assert worker.text("once more") == answer
    worker.stop()


def test_nothing_is_read_where_computing_is_predicted_sooner(
    model: Any, tokenizer: Any, settings: DiskCacheSettings
) -> None:
    kept(model, tokenizer, settings, PROMPT)
    worker = Worker(model, tokenizer, settings, cost=PrefillCost(token_s=1e-9))
    assert worker.ask("quick", PROMPT).usage.cached_tokens == 0
    worker.stop()


@pytest.mark.parametrize("harm", ["a damaged block", "all files gone", "another key", "no folder"])
def test_whatever_is_wrong_with_the_disk_the_answer_is_the_same(
    model: Any, tokenizer: Any, settings: DiskCacheSettings, harm: str
) -> None:
    answer = kept(model, tokenizer, settings, PROMPT)
    match harm:
        case "a damaged block":
            data = blocks_of(settings)[1].read_bytes()
            blocks_of(settings)[1].write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        case "all files gone":
            for block in blocks_of(settings):
                block.unlink()
        case "another key":
            Path(settings.key_file).write_bytes(b"x" * 32)
        case "no folder":
            settings = DiskCacheSettings("/proc/no-such-folder", settings.key_file)
    worker = Worker(model, tokenizer, settings)
    ended = worker.ask("again", PROMPT)
    assert ended.usage.cached_tokens < 2 * BLOCK
    assert worker.text("again") == answer
    worker.stop()
    if harm == "no folder":
        assert worker.tier.figures.dropped


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True)])
def test_prompts_that_stay_here_are_kept_apart(
    model: Any, tokenizer: Any, settings: DiskCacheSettings, first: bool, second: bool
) -> None:
    answer = kept(model, tokenizer, settings, PROMPT, local_only=first)
    worker = Worker(model, tokenizer, settings)
    assert worker.ask("other", PROMPT, local_only=second).timings.restored_tokens == 0
    assert worker.text("other") == answer
    worker.stop()
    again = Worker(model, tokenizer, settings)
    assert again.ask("same", PROMPT, local_only=first).timings.restored_tokens == 2 * BLOCK
    again.stop()


def test_another_basis_is_another_prompt(model: Any, tokenizer: Any, settings: DiskCacheSettings) -> None:
    kept(model, tokenizer, settings, PROMPT)
    worker = Worker(model, tokenizer, settings, basis=LateBasis(lambda: b"another version of a library"))
    assert worker.ask("new", PROMPT).timings.restored_tokens == 0
    worker.stop()


def test_several_prompts_are_restored_beside_answers_that_run(
    model: Any, tokenizer: Any, settings: DiskCacheSettings
) -> None:
    prompts = {f"p{seed}": tiny_models.prompt(2 * BLOCK + 88 + seed, seed) for seed in range(3)}
    answers = {name: kept(model, tokenizer, settings, prompt) for name, prompt in prompts.items()}
    worker = Worker(model, tokenizer, settings)
    for name, prompt in prompts.items():
        worker.put(name, prompt)
    ended = [worker.finish(name) for name in prompts]
    assert [e.timings.restored_tokens for e in ended] == [2 * BLOCK] * 3
    assert {name: worker.text(name) for name in prompts} == answers
    worker.stop()


def test_a_prompt_that_is_cancelled_while_it_is_restored_leaves_nothing(
    model: Any, tokenizer: Any, settings: DiskCacheSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(model, tokenizer, settings, PROMPT)
    go_on, real = threading.Event(), BlockStore.read

    def waiting(self: BlockStore, *args: Any) -> Any:
        assert go_on.wait(30)
        return real(self, *args)

    monkeypatch.setattr(BlockStore, "read", waiting)
    worker = Worker(model, tokenizer, settings)
    worker.put("gone", PROMPT)
    while not (known := worker.scheduler._prefilling) or (r := known[0].restoring) is None or not r.reads:
        worker.turn()
    worker.scheduler.inbox.put(Cancel("gone"))
    assert worker.finish("gone").reason == "cancelled"
    assert not worker.scheduler.busy
    assert worker.scheduler.budget.used_bytes == 0
    go_on.set()
    assert worker.ask("next", PROMPT).usage.prompt_tokens == len(PROMPT)
    worker.stop()


def test_a_disk_that_hangs_costs_a_bounded_wait(
    model: Any, tokenizer: Any, settings: DiskCacheSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = kept(model, tokenizer, settings, PROMPT)
    go_on = threading.Event()
    monkeypatch.setattr(limits, "CACHE_LOOKUP_S", 0.01)
    monkeypatch.setattr(BlockStore, "find", lambda self, *names: go_on.wait(30) and FoundBlocks(0, 0, 0.0))
    worker = Worker(model, tokenizer, settings)
    assert worker.ask("first", PROMPT).usage.cached_tokens == 0
    assert worker.text("first") == answer
    go_on.set()
    worker.stop()


@pytest.mark.parametrize("failing", [(DiskTier, "layout"), (ArrivingSnapshot, "cache")])
def test_a_restore_that_fails_is_a_miss_and_no_failed_request(
    model: Any,
    tokenizer: Any,
    settings: DiskCacheSettings,
    monkeypatch: pytest.MonkeyPatch,
    failing: tuple[type, str],
) -> None:
    answer = kept(model, tokenizer, settings, PROMPT)
    worker, failed = Worker(model, tokenizer, settings), []

    def fails(*args: Any) -> Any:
        failed.append(args)
        raise RuntimeError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(*failing, fails)
        # Where nothing is known of the model's states, other machines are not asked either.
        done = worker.ask("missed", PROMPT, fetches=failing[1] == "layout")
    assert failed
    assert (done.usage.cached_tokens, done.timings.restored_tokens) == (0, 0)
    assert worker.text("missed") == answer
    assert worker.scheduler.budget.used_bytes == 0
    worker.stop()
    again = Worker(model, tokenizer, settings)
    assert again.ask("again", PROMPT).timings.restored_tokens == 2 * BLOCK
    again.stop()


def test_a_model_whose_states_are_of_an_unknown_kind_is_not_kept() -> None:
    assert can_be_blocks([KVCache(), RotatingKVCache(32)])
    assert not can_be_blocks([KVCache(), ChunkedKVCache(32)])
    assert not can_be_blocks([])


def test_a_prompt_that_others_may_help_with_is_restored_before_they_are_asked(
    model: Any, tokenizer: Any, settings: DiskCacheSettings
) -> None:
    prompt = PROMPT
    answer = kept(model, tokenizer, settings, prompt)
    sharable = Sharable.of(Stage.of(model), "cpu", {"mlx-lm": "1"})
    worker = Worker(model, tokenizer, settings, sharable=sharable)
    worker.put("shared", [*prompt, *prompt], shared=True)
    while not (accepted := [e for e in worker.events if isinstance(e, Accepted)]):
        worker.turn()
    assert (accepted[0].cached, accepted[0].waits, accepted[0].exact) == (2 * BLOCK, True, True)
    worker.scheduler.inbox.put(PrefillAlone("shared"))
    assert worker.finish("shared").usage.cached_tokens == 2 * BLOCK
    # One too short to be shared is accepted once, and computed here.
    worker.put("short", prompt, shared=True)
    worker.finish("short")
    assert worker.text("short") == answer
    assert [e.id for e in worker.events if isinstance(e, Accepted)] == ["shared", "short"]
    worker.stop()
