"""What a shared prefill leaves behind of models that cannot be cut at a token: states at earlier ones, as a
prefill here alone has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from disk_worker import ROOM, restored, tier, written
from mlx_lm.models.cache import make_prompt_cache
from shared_runs import LAYERS, SharedRun, as_bytes, prefilled
from sharing_lies import Fixed, Frames, opposite
from tiny_architectures import VOCAB, tiny

from fleetd import limits
from fleetd.cache.settings import DiskCacheSettings
from fleetd.engine.layers.architectures import CUT
from fleetd.engine.prefixes.prefix_cache import DENSE, PrefixCache
from fleetd.engine.sequence_state import checkpoints
from fleetd.engine.sequence_state.kinds import kind_of
from fleetd.engine.sequence_state.rings import RingState
from fleetd.engine.streams.frames import FrameHeader, Kind
from fleetd.errors import InvalidValue, PeerWrong
from fleetd.plan.prefill.split import Split, checked

pytestmark = pytest.mark.usefixtures("cpu_installed")
TOKENS, CHUNK, BLOCK = 560, 200, limits.CHECKPOINT_BLOCK_TOKENS
# The end of the last message, and where it begins.
BORDERS = [550, 431]
# A gated delta rule beside attention; windows that have moved; both kinds of states in one part each.
SAMPLE = {"qwen3_5", "gemma3_text"}
CUTS = {
    "layers": ("layers", (0, 2, 4)),
    "layers of three helpers": ("layers", (0, 1, 2, 3, 4)),
    "all elsewhere": ("layers", (0, 4, 4)),
    "tokens": ("tokens", (0, 400, 559)),
    "tokens of two helpers": ("tokens", (0, 200, 400, 559)),
}


def shared(model: Any, cut: str, *, cached: int = 0, sent: int | None = None, **options: Any) -> SharedRun:
    kind, cuts = CUTS[cut]
    if kind == "tokens":
        cuts = (cached, *(cached + at for at in cuts[1:-1] if cached + at < TOKENS - 1), TOKENS - 1)
    # A model that can be cut at any token keeps no states, and its chunks end nowhere else than alone.
    kept = checkpoints.needed(make_prompt_cache(model))
    places = tuple(checkpoints.places(TOKENS, BORDERS, cached)) if kept else ()
    split = Split(
        kind,  # type: ignore[arg-type]
        cuts,
        LAYERS,
        cached,
        TOKENS - 1,
        CHUNK,
        places=places,
        sent=len(places) if sent is None else sent,
    )
    return SharedRun(model, checked(split), borders=BORDERS, **options)


def bytes_of(state: list[Any]) -> list[Any]:
    parts = [part for each in state for part in (each if isinstance(each, list) else [each])]
    return [
        None
        if part is None
        else (
            RingState.of(part) if kind_of(part).window(part) else None,
            [as_bytes(array) for array in kind_of(part).arrays(part)],
        )
        for part in parts
    ]


def check(name: str, cut: str, *, cached: int = 0) -> None:
    model = tiny(name)
    run = shared(model, cut, cached=cached)
    home = run.finish()
    run.check(home.cache)
    states, alone = home.states, run.local()
    if not checkpoints.needed(home.cache):
        assert not states, "what can be cut at any token keeps none"
        return
    assert sorted(states) == sorted(alone.states)
    assert {BORDERS[0], BORDERS[1], 2 * BLOCK} <= set(states)
    for at, state in states.items():
        assert bytes_of(state) == bytes_of(alone.states[at]), f"the states after {at} tokens differ"
    # A message that is edited from its beginning, and one that is edited further on.
    for border in BORDERS:
        prefix, others = PrefixCache(ROOM), PrefixCache(ROOM)
        prefix.store(run.tokens[:-1], home.cache, states=states)
        others.store(run.tokens[:-1], alone.cache, states=alone.states)
        edited = run.tokens[:border] + [(token + 1) % VOCAB for token in run.tokens[border:]]
        kept, expected = prefix.fetch(edited), others.fetch(edited)
        assert kept.tokens == expected.tokens == border
        answers = []
        for hit in (kept, expected):
            assert hit.cache is not None
            further = prefilled(model, edited, CHUNK, hit.cache, border)
            answers.append(as_bytes(model(mx.array([edited[-1:]]), cache=further.cache)))
        assert answers[0] == answers[1]


@pytest.mark.parametrize("name", sorted(SAMPLE))
@pytest.mark.parametrize("cut", ["layers", "tokens"])
def test_an_edited_last_message_is_all_that_is_read_again_after_a_shared_prefill(name: str, cut: str) -> None:
    check(name, cut)


@pytest.mark.long
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", sorted(CUT))
def test_an_edited_last_message_is_all_that_is_read_again_in_every_family(name: str, cut: str) -> None:
    check(name, cut)


@pytest.mark.parametrize("cut", ["all elsewhere", "tokens of two helpers"])
def test_states_are_kept_of_what_comes_after_a_prefix(cut: str) -> None:
    """What is begun from is kept too: it may leave memory before this prompt does."""
    check("qwen3_5", cut, cached=BLOCK)


def test_where_few_are_sent_the_chunks_are_the_same() -> None:
    model = tiny("gemma3_text")
    run = shared(model, "layers", sent=2)
    home = run.finish()
    run.check(home.cache)
    assert sorted(home.states) == list(run.split.places[-2:])


def test_the_disk_has_a_snapshot_of_a_shared_prompt(tmp_path: Path) -> None:
    settings = DiskCacheSettings(str(tmp_path / "kv"), str(tmp_path / "identity" / "kv.key"), ROOM)
    model = tiny("qwen3_5")
    run = shared(model, "layers")
    home = run.finish()
    disk = tier(model, settings)
    disk.store(run.tokens[:-1], home.cache, DENSE, home.states, local_only=False)
    written(disk)
    assert restored(model, settings, run.tokens).tokens == 2 * BLOCK


def lie_at(token: int, lie: Any) -> Any:
    def tamper(head: FrameHeader, data: bytes) -> Frames:
        if head.kind is not Kind.STATE or head.end != token:
            return [(head, data)]
        numbers = np.frombuffer(data, np.float32).copy()
        lie(numbers)
        return [(head, numbers.tobytes())]

    return tamper


class Numbered(Fixed):
    """Draws this one of the chunks, and a chunk where single tokens could be drawn, too."""

    number = 0

    def choice(self, found: Any) -> Any:
        return found[self.number % len(found)] if isinstance(found[0], range) else found[-1]


@pytest.mark.parametrize("name", sorted(SAMPLE))
@pytest.mark.parametrize("cut", ["all elsewhere", "tokens"])
def test_attack_states_that_later_prompts_would_go_on_from_are_wrong(name: str, cut: str) -> None:
    """The chunk behind them is one of those that may be drawn."""
    model = tiny(name)
    place = 256
    run = shared(model, cut)
    assert place in run.split.states_of(0)
    found = []
    for number in range(len(run.split.states_of(0))):
        draw = Numbered(1)
        draw.number = number
        tampers = {(0, "home"): lie_at(place, opposite)}
        try:
            shared(model, cut, tampers=tampers, draw=draw).finish()
        except PeerWrong:
            found.append(number)
    assert found


@pytest.mark.parametrize(
    "places", [(0,), (9,), (5, 4), (4, 4), (12,)], ids=["start", "end", "order", "twice", "behind"]
)
def test_places_that_are_not_within_the_new_tokens_are_refused(places: tuple[int, ...]) -> None:
    split = Split("layers", (0, 2, 4), LAYERS, 0, 9, 9, places=places)
    with pytest.raises(InvalidValue, match="are not of this prompt"):
        checked(split)


def test_no_more_places_are_sent_than_there_are() -> None:
    with pytest.raises(InvalidValue, match="are not of this prompt"):
        checked(Split("layers", (0, 2, 4), LAYERS, 0, 9, 9, places=(4,), sent=2))
