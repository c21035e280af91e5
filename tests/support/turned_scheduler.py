"""A scheduler with a tiny model that a test turns by hand, so that it decides when what happens."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import sharing
from decoded_reports import DecodedReports
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.utils import load_model
from msgspec.structs import replace

from fleetd.engine.layers.stage import Stage
from fleetd.engine.loop.scheduler import Scheduler
from fleetd.engine.measure.chunk_size import FixedChunks
from fleetd.engine.measure.memory import KvBudget
from fleetd.engine.prefixes.prefix_cache import PrefixCache
from fleetd.engine.prompt.prompt_encoding import prepare
from fleetd.engine.protocol import Delta, Finished, TokenPrompt
from fleetd.engine.shared_prefill.sharable import Sharable

CHUNK = 32


@dataclass(frozen=True)
class TinyFamily:
    model: Any
    tokenizer: Any
    sharable: Sharable


def family(folder: Path, model_type: str) -> TinyFamily:
    """The tiny model of an architecture, on the CPU."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    path = sharing.write(folder, model_type)
    model, _ = load_model(path)
    found = TinyFamily(model, load_tokenizer(path), Sharable.of(Stage.of(model), "cpu", {}))
    mx.set_default_device(before)
    return found


class TurnedScheduler:
    """A scheduler that a test turns by hand, and what it reported."""

    def __init__(self, model: Any, tokenizer: Any, **options: Any) -> None:
        self.events = DecodedReports()
        self.tokenizer = tokenizer
        settings: dict[str, Any] = {
            "context_tokens": 2048,
            "chunks": FixedChunks(CHUNK, CHUNK),
            "max_streams": 4,
            "budget": KvBudget.of(1 << 30, 1024),
            "prefix": PrefixCache(1 << 30),
            **options,
        }
        self.scheduler = Scheduler(model=model, tokenizer=tokenizer, emit=self.events.take, **settings)

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def turn(self, turns: int = 1) -> None:
        for _ in range(turns):
            assert self.scheduler.turn()
            self.scheduler.validate()

    def of(self, name: str, kind: type[Any] = object) -> list[Any]:
        """What was reported of a request."""
        return [e for e in self.events if getattr(e, "id", None) == name and isinstance(e, kind)]

    def text(self, name: str) -> str:
        return "".join(delta.text for delta in self.of(name, Delta))

    def finish(self, turns: int = 3000) -> None:
        for _ in range(turns):
            if not self.busy:
                return
            self.turn()
        pytest.fail(f"not done: {self.events[-5:]}")


class Turned(TurnedScheduler):
    """One of a family's tiny model."""

    def __init__(self, family: TinyFamily, **options: Any) -> None:
        super().__init__(family.model, family.tokenizer, **{"max_streams": 8, **options})
        self.family = family

    def ask(self, name: str, tokens: list[int], kept: list[int] | None = None, **fields: Any) -> None:
        """``kept``: the tokens that are not left out."""
        settings = {"shared": False, "top_logprobs": 2, "max_tokens": 1, **fields}
        request = sharing.prompt(name, 1, prompt=TokenPrompt(tokens), **settings)
        prepared = prepare(request, self.family.tokenizer, sharing.VOCAB)
        self.scheduler.inbox.put(replace(prepared, kept=kept))

    def finish(self, turns: int = 2000) -> None:
        super().finish(turns)
        assert self.scheduler.budget.used_bytes == 0

    def answer(self, name: str) -> list[Any]:
        """Its text and the exact logprobs of its tokens, which depend on the whole prompt."""
        return [(event.text, event.logprobs) for event in self.of(name, Delta)]

    def computed(self, *names: str) -> int:
        """Prompt tokens that these computed themselves."""
        ends = [self.of(name, Finished)[-1].usage for name in names]
        return sum(usage.prompt_tokens - usage.cached_tokens for usage in ends)

    def turns_to(self, name: str) -> int:
        """Turns until its first token."""
        for count in range(2000):
            if self.of(name, Delta):
                return count
            self.turn()
        pytest.fail("not done")


def drawn(n: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(300), k=n)


def alone(family: TinyFamily, tokens: list[int]) -> list[Any]:
    bench = Turned(family)
    bench.ask("alone", tokens)
    bench.finish()
    return bench.answer("alone")
