"""Prompts on the disk: what a restored beginning gives is what computing gives, and nothing is in the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from mlx_lm.tokenizer_utils import load as load_tokenizer

from fleetd.cache.pricing import PrefillCost
from fleetd.cache.settings import DiskCacheSettings
from fleetd.engine.disk_tier import DiskTier
from fleetd.engine.memory import KvBudget
from fleetd.engine.prefix_cache import DENSE, PrefixCache
from fleetd.engine.prompt_encoding import prepare
from fleetd.engine.protocol import Delta, Failed, Finished, Generate, Report, Sampling, TokenPrompt
from fleetd.engine.scheduler import Scheduler

pytestmark = pytest.mark.usefixtures("on_cpu")
SLOW = PrefillCost(token_s=1.0)
PROMPT = tiny_models.prompt(1100)
BLOCK = 256


class Turns:
    def size(self, *, shared: bool, context: int = 0) -> int:
        return 128

    def took(self, tokens: int, seconds: float) -> None:
        pass


class Worker:
    """A scheduler of one worker's life, with blocks in a folder that outlives it."""

    def __init__(self, model: Any, tokenizer: Any, settings: DiskCacheSettings, **options: Any) -> None:
        self.events: list[Report] = []
        self.tokenizer = tokenizer
        self.tier = DiskTier(
            settings=settings,
            model=model,
            model_name="tiny",
            basis=options.pop("basis", b"this model on this machine"),
            cost=options.pop("cost", SLOW),
            most_queued_bytes=1 << 30,
        )
        self.scheduler = Scheduler(
            model=model,
            tokenizer=tokenizer,
            context_tokens=4096,
            chunks=Turns(),
            max_streams=4,
            budget=KvBudget.of(1 << 30, 1024),
            prefix=PrefixCache(1 << 30),
            emit=self.events.append,
            disk=self.tier,
            **options,
        )

    def ask(self, name: str, tokens: list[int], **fields: Any) -> Finished:
        request = Generate(name, TokenPrompt(tokens), Sampling(temperature=0.0), 8, **fields)
        self.scheduler.inbox.put(prepare(request, self.tokenizer, tiny_models.VOCAB))
        while not (ended := [e for e in self.events if isinstance(e, Finished | Failed) and e.id == name]):
            assert self.scheduler.turn()
            self.scheduler.validate()
        assert isinstance(ended[0], Finished), ended[0]
        return ended[0]

    def text(self, name: str) -> str:
        return "".join(e.text for e in self.events if isinstance(e, Delta) and e.id == name)

    def stop(self) -> None:
        """As a worker ends: what is queued is written."""
        self.scheduler._close()


@pytest.fixture(scope="module")
def tokenizer(chain_path: Path) -> Any:
    return load_tokenizer(chain_path)


@pytest.fixture
def settings(tmp_path: Path) -> DiskCacheSettings:
    return DiskCacheSettings(str(tmp_path / "kv"), str(tmp_path / "identity" / "kv.key"), 1 << 30)


@pytest.mark.parametrize("make", [tiny_models.smollm2, tiny_models.qwen3_06b])
def test_a_restored_beginning_gives_the_bytes_of_a_computed_one(
    make: Callable[[], Any], tokenizer: Any, settings: DiskCacheSettings
) -> None:
    model = make()
    first = Worker(model, tokenizer, settings)
    cold = first.ask("cold", PROMPT)
    assert (cold.usage.cached_tokens, cold.timings.restored_tokens) == (0, 0)
    first.stop()

    second = Worker(model, tokenizer, settings)
    warm = second.ask("warm", PROMPT)
    assert (warm.usage.cached_tokens, warm.timings.restored_tokens) == (1024, 1024)
    assert second.text("warm") == first.text("cold")
    computed, restored = (w.scheduler.prefix.fetch([*PROMPT, 0], DENSE) for w in (first, second))
    assert computed.tokens == restored.tokens == len(PROMPT)
    for ours, theirs in zip(computed.cache or [], restored.cache or [], strict=True):
        assert bytes(memoryview(ours.keys)) == bytes(memoryview(theirs.keys))
        assert bytes(memoryview(ours.values)) == bytes(memoryview(theirs.values))
    second.stop()
