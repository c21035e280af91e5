"""4,000 tokens of the real default model: restored and fetched keys and values are the computed ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from disk_worker import BLOCK, Worker, bytes_of
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.utils import load_model
from two_disks import TwoMachines

from fleetd.engine.cpu import products
from fleetd.engine.prefixes.prefix_cache import DENSE
from fleetd.models.folder import ModelFolder

# Many gigaflops; tests/live asks real daemons the same.
pytestmark = [pytest.mark.model, pytest.mark.long, pytest.mark.timeout(1200)]
TOKENS, ANSWERED = 4000, 64
WHOLE = (TOKENS - 1) // BLOCK


@pytest.fixture
def machines(
    cpu_installed: None, patient: None, embedded_model: ModelFolder, tmp_path: Path
) -> Iterator[TwoMachines]:
    """One has read 4,000 tokens of this project's own words, the other one has not."""
    model, tokenizer = load_model(embedded_model.path)[0], load_tokenizer(embedded_model.path)
    products.to_float32(model)
    mx.eval(model.parameters())
    docs = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    text = "\n".join(page.read_text(encoding="utf-8") for page in docs)
    prompt = tokenizer.encode(text[: 8 * TOKENS])[:TOKENS]
    assert len(prompt) == TOKENS
    made = TwoMachines(model, tokenizer, tmp_path, prompt, max_tokens=ANSWERED)
    yield made
    made.close()


def kept(worker: Worker, prompt: list[int]) -> tuple[list[bytes], bytes]:
    """Keys and values of all tokens of the prompt but the last, and the logits that it gives after them."""
    found = worker.scheduler.prefix.fetch(prompt, DENSE)
    assert found.cache
    assert found.tokens == len(prompt) - 1
    rows = bytes_of(found.cache)
    logits: Any = worker.tier.model(mx.array([prompt[-1:]]), cache=found.cache)
    return rows, bytes(memoryview(logits))


def test_restored_and_fetched_keys_and_values_are_the_computed_ones(machines: TwoMachines) -> None:
    prompt, there = machines.prompt, machines.there
    computed = kept(there, prompt)
    assert len(computed[0]) == 2 * len(machines.model.layers)

    machines.ask()
    machines.send(machines.honest, WHOLE)
    done, _ = machines.finish()
    assert (done.usage.completion_tokens, done.timings.fetched_tokens) == (ANSWERED, WHOLE * BLOCK)
    assert kept(machines.here, prompt) == computed

    again = Worker(machines.model, machines.tokenizer, machines.settings)
    done = again.ask("again", prompt, max_tokens=ANSWERED)
    assert (done.usage.completion_tokens, done.timings.restored_tokens) == (ANSWERED, WHOLE * BLOCK)
    assert again.text("again") == machines.expected
    assert kept(again, prompt) == computed
    again.stop()
