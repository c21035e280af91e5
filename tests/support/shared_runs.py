"""A whole shared prefill in one thread: home, its helpers, streams in memory; and the local one beside it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pipes import Clock, Streams
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, RotatingKVCache, make_prompt_cache
from tiny_architectures import VOCAB

from fleetd.engine.layers.prefill import Prefiller
from fleetd.engine.layers.stage import Stage
from fleetd.engine.prefixes.prefix_cache import PrefixCache
from fleetd.engine.protocol import AssistPrefill, PrefillWithHelpers
from fleetd.engine.sequence_state.copies import copy_on_write
from fleetd.engine.sequence_state.parts import parts
from fleetd.engine.shared_prefill.fingerprint import any_chunks
from fleetd.engine.shared_prefill.helper_prefill import HelperPrefill
from fleetd.engine.shared_prefill.home_prefill import SharedPrefill
from fleetd.engine.shared_prefill.kv_layout import KvLayout
from fleetd.engine.shared_prefill.warm_store import WarmCaches
from fleetd.errors import FleetError
from fleetd.plan.prefill.split import Split

LAYERS = 4


@cache
def prompt(n: int) -> tuple[int, ...]:
    """``n`` random tokens, the last of which is left to decoding."""
    return tuple(mx.random.randint(0, VOCAB, (n,), key=mx.random.key(3)).tolist())


def as_bytes(array: mx.array) -> bytes:
    return np.array(mx.contiguous(array).view(mx.uint8)).tobytes()


def prefilled(
    model: Any,
    tokens: Sequence[int],
    chunk: int,
    caches: Any = None,
    done: int = 0,
    borders: Sequence[int] | None = None,
) -> Prefiller:
    """As one machine alone does it. ``borders``: of the prompt, if states are kept at some of its tokens."""
    room = 0 if borders is None else 1 << 40
    caches = caches or make_prompt_cache(model)
    alone = Prefiller(model, list(tokens), caches, done, state_bytes=room, borders=borders or ())
    while alone.remaining:
        alone.step(chunk)
    return alone


# Of models that are kept here as well, so that their ids stay their own.
_stages: dict[int, tuple[Any, Stage, KvLayout]] = {}
_stores: dict[tuple[int, tuple[int, ...]], tuple[Any, PrefixCache]] = {}


def staged(model: Any) -> tuple[Stage, KvLayout]:
    """As a worker knows it from the time it was loaded."""
    if id(model) not in _stages:
        stage = Stage.of(model)
        _stages[id(model)] = model, stage, KvLayout.of(stage)
    return _stages[id(model)][1:]


def keep_prefix(model: Any, tokens: Sequence[int], cache: list[Any]) -> None:
    """What ``prefix_of`` gives for these tokens from now on."""
    store = PrefixCache(1 << 30)
    store.store(list(tokens), cache)
    _stores[id(model), tuple(tokens)] = model, store


def prefix_of(model: Any, tokens: Sequence[int], cached: int) -> Any:
    """The first ``cached`` tokens' caches as the prefix cache gives them; None for none."""
    if not cached:
        return None
    key = id(model), tuple(tokens[:cached])
    if key not in _stores:
        keep_prefix(model, tokens[:cached], prefilled(model, tokens[: cached + 1], 29).cache)
    hit = _stores[key][1].fetch(list(tokens))
    assert hit.tokens == cached
    return hit.cache


@dataclass
class SharedRun:
    """``model`` is home's; ``theirs`` the helpers', where it is another."""

    model: Any
    split: Split
    theirs: Any = None
    exact: bool = True
    predicted_s: float = 10.0
    clock: Clock = field(default_factory=Clock)
    tampers: dict[tuple[int, str], Any] = field(default_factory=dict)
    fatal: int = -1
    device: str = "cpu"
    # Of which the split's places are, where it has some.
    borders: Sequence[int] | None = None
    # Every helper has the weights of its own layers only.
    stages: bool = False
    # Of a longer prompt than the split's, its first tokens.
    begins: Sequence[int] | None = None
    # By helper, what it has of an earlier turn.
    warm: Sequence[WarmCaches | None] = ()
    # In how many bits helpers send rows; None: as ``wire_bits`` says, which home knows.
    wire_bits: Any = 0
    helper_wire_bits: Any = None
    # Of the tokens that are checked later; by itself the same ones in every run.
    draw: random.Random = field(default_factory=lambda: random.Random(1))

    def __post_init__(self) -> None:
        split = self.split
        # By helper, what it can keep for the next turn.
        self.left: list[WarmCaches] = []
        self.tokens = list(self.begins or prompt(split.tokens + 1))[: split.tokens + 1]
        self.streams = Streams(split.helpers, tampers=self.tampers)
        self.streams.events.fatal = self.fatal
        stage, layout = staged(self.model)
        self.home = SharedPrefill(
            stage,
            layout,
            self.tokens,
            prefix_of(self.model, self.tokens, split.cached),
            PrefillWithHelpers(
                "a",
                split,
                self.predicted_s,
                self.exact,
                warm=[one.rows if one is not None else None for one in self.warm],
                wire_bits=self.wire_bits,
            ),
            self.streams.of(-1),
            any_chunks=any_chunks(stage, layout, self.device),
            draw=self.draw,
            clock=self.clock,
        )
        self.helpers = [self._helper(rank) for rank in range(split.helpers)]

    def _helper(self, rank: int) -> HelperPrefill:
        stage, layout = staged(self.theirs or self.model)
        if self.stages:
            own = self.split.layers_of(rank)
            stage = stage.part(own.start, own.stop)
            layout = KvLayout.of(stage)
        warm = self.warm[rank] if self.warm else None
        bits = self.wire_bits if self.helper_wire_bits is None else self.helper_wire_bits
        assist = AssistPrefill(
            "a",
            self.split,
            rank,
            home="home",
            warm=warm.rows if warm is not None else None,
            wire_bits=bits,
            exact=self.exact,
        )
        return HelperPrefill(stage, layout, assist, self.streams.of(rank), warm=warm, clock=self.clock)

    def turns(self, order: Callable[[int], Sequence[int]] | None = None) -> Iterator[None]:
        """One turn of everybody at a time, until the prompt is prefilled. Raises what home's step raises.

        ``order`` may choose who has a turn, by numbers of which the last is home. A helper that fails stops.
        """
        workers: list[Any] = [*self.helpers, self.home]
        failed: list[Any] = []
        idle = 0
        while self.home.remaining:
            for number in order(len(workers)) if order else range(len(workers)):
                worker = workers[number]
                if worker not in failed and worker.ready:
                    idle = 0
                    try:
                        worker.step()
                    except FleetError:
                        if worker is self.home:
                            raise
                        worker.close()
                        failed.append(worker)
            idle += 1
            assert idle < 100, "everybody waits for everybody else"
            yield

    def finish(self, order: Callable[[int], Sequence[int]] | None = None) -> SharedPrefill:
        for _ in self.turns(order):
            pass
        for helper in self.helpers:
            while not helper.finished:
                helper.step()
            self.left.append(helper.warm)
            helper.close()
        self.home.close()
        return self.home

    def local(self, caches: Any = None, done: int = 0) -> Prefiller:
        """The same prompt here alone, from what is given on, with the same chunks."""
        if caches is None:
            caches, done = prefix_of(self.model, self.tokens, self.split.cached), self.split.cached
        borders = self.borders if self.split.places else None
        return prefilled(self.model, self.tokens, self.split.chunk, caches, done, borders)

    def check(self, cache: list[Any]) -> None:
        """``cache`` has the bytes of local prefill, and so has what is decoded from it."""
        expected, logits = local(self)
        assert_same_caches(cache, expected, self.split.tokens)
        assert self.decoded(cache) == logits, "logits differ"

    def decoded(self, cache: list[Any]) -> bytes:
        """The logits of the prompt's last token, which ``cache`` then holds, too."""
        return as_bytes(self.model(mx.array([self.tokens[-1:]]), cache=cache))


# By model and by what decides the bytes.
_known: dict[tuple[Any, ...], tuple[Any, list[Any], bytes]] = {}


def local(run: SharedRun) -> tuple[list[Any], bytes]:
    """The caches of the prompt prefilled here alone, and the logits of its last token."""
    split = run.split
    key = (id(run.model), tuple(run.tokens), split.cached, split.chunk, split.places)
    if key not in _known:
        cache = run.local().cache
        logits = run.decoded([copy_on_write(layer) for layer in cache])
        _known[key] = run.model, cache, logits  # the model kept: its id stays its own
    return _known[key][1:]


def assert_same_caches(mine: list[Any], theirs: list[Any], tokens: int) -> None:
    for layer, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert type(a) is type(b)
        for one, other in zip(parts(a), parts(b), strict=True):
            assert_same_cache(one, other, tokens, layer)


def assert_same_cache(a: Any, b: Any, tokens: int, layer: int) -> None:
    assert type(a) is type(b)
    if isinstance(a, ArraysCache):
        assert [as_bytes(x) for x in a.cache] == [as_bytes(x) for x in b.cache], f"state of {layer} differs"
        return
    assert a.offset == b.offset == tokens
    if isinstance(a, RotatingKVCache):
        assert (a._idx, a.keep, a.max_size) == (b._idx, b.keep, b.max_size)
    assert a.keys.dtype == b.keys.dtype
    for name, x, y in zip(("keys", "values"), a.keys_and_values(), b.keys_and_values(), strict=True):
        assert x.shape == y.shape
        assert as_bytes(x) == as_bytes(y), f"{name} of layer {layer} differ"
