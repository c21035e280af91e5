"""The other machines of a group have promised memory for all that the one that answers admits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from group_machines import group_of
from mirrored_ranks import ranks_of
from mlx_lm.models.cache import make_prompt_cache
from turned_scheduler import TinyFamily, Turned, drawn, family

from fleetd.control.daemon_status import MemoryBudget
from fleetd.control.model_facts import StateSizes
from fleetd.engine.groups.promised_rows import divided, promised_bytes
from fleetd.engine.groups.remote_rows import KeptThere
from fleetd.engine.layers.stage import Stage
from fleetd.engine.load.loading import MemoryShares
from fleetd.engine.measure.memory import KvBudget, RowBound
from fleetd.engine.prefixes.prefix_cache import PrefixCache
from fleetd.engine.protocol import Finished
from fleetd.engine.sequence_state.parts import sizes as sizes_of
from fleetd.engine.settings import GroupMember, WorkerSettings

STREAMS = 4
PROMISED = 1536


def sizes_there(stage: Stage) -> StateSizes:
    """What a sequence takes in these layers."""
    caches = stage.make_caches()
    stage.run(mx.zeros((1, 8, stage.width)), caches, stage.inputs(mx.zeros((1, 8), mx.int32), 0))
    return sizes_of(caches)


def answering(model: Any, of: TinyFamily) -> Turned:
    """The machine that answers, as a worker divides its memory, of which it has plenty."""
    cache = make_prompt_cache(model)
    model(mx.array([[1] * 8]), cache)
    sizes = sizes_of(cache)
    settings = WorkerSettings(
        name="m", path="/m", max_streams=STREAMS, group=(GroupMember(1, 4, "s"),), group_tokens=PROMISED
    )
    room, running = MemoryBudget(usable_bytes=1 << 40), KeptThere.of(cache).running
    shares = MemoryShares.of(0, sizes, room, settings, running=running)
    return Turned(
        TinyFamily(model, of.tokenizer, of.sharable),
        max_streams=STREAMS,
        budget=KvBudget(shares.sequences, sizes, rows=shares.rows),
        prefix=PrefixCache(shares.prefix, rows=shares.prefix_rows),
    )


def asked_at_random(bench: Turned, seed: int) -> list[Any]:
    """How prompts end that come four at once, some as those before and longer, while others are answered."""
    dice, asked = random.Random(seed), 0
    for turn in range(2):
        for prompt in range(STREAMS):
            tokens = drawn(dice.randrange(20, 350), seed=prompt) + drawn(10 * turn, seed=turn)
            bench.ask(f"r{asked}", tokens, max_tokens=dice.choice([1, 10, 20]))
            asked += 1
        bench.turn(dice.randrange(1, 30))
    bench.finish()
    return [bench.of(f"r{number}")[-1] for number in range(asked)]


def test_both_bounds_together_are_what_was_promised() -> None:
    """A sequence takes up to 256 rows besides its tokens; where it has a running state it counts as 1024."""
    assert divided(3000, 1000, running=False) == (RowBound(2256, 256), RowBound(1256, 256))
    assert divided(3000, 1000, running=True) == (RowBound(3024, 1024), RowBound(2024, 1024))
    # Of sequences with running states 2 run at most and 1 is kept; 4 states are promised.
    sizes = StateSizes(token_bytes=10, state_bytes=7)
    assert promised_bytes(3000, sizes) == (3000 + 2 * 256) * 10 + 4 * 7


@pytest.mark.usefixtures("on_cpu", "cpu_installed")
@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("llama", 2),
        # The machine that answers has a window and no rows, or most of the windows.
        ("gemma3_text", 1),
        ("gemma3_text", 3),
        # It has a running state and no rows.
        ("qwen3_next", 1),
    ],
)
def test_no_member_refuses_what_was_admitted(tmp_path: Path, name: str, cut: int) -> None:
    tiny = family(tmp_path, name)
    there = sizes_there(Stage.of(tiny.model).part(cut, len(tiny.model.layers)))
    group = group_of(tiny.model, cut, most_bytes=promised_bytes(PROMISED, there))
    ends = asked_at_random(answering(group.model, tiny), seed=cut)
    assert [type(end) for end in ends] == [Finished] * len(ends), ends


@pytest.mark.usefixtures("on_cpu", "cpu_installed")
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_no_rank_refuses_what_was_admitted(tmp_path: Path, name: str) -> None:
    tiny = family(tmp_path, name)
    most = promised_bytes(PROMISED, sizes_there(Stage.of(tiny.model)))
    model, _ = ranks_of(tiny.model, 2, most)
    ends = asked_at_random(answering(model, tiny), seed=7)
    assert [type(end) for end in ends] == [Finished] * len(ends), ends
