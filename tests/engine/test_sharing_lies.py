"""A helper whose first tokens are right and whose later ones are not: found, given up, and answered here."""

from __future__ import annotations

import random
from collections.abc import Callable
from pipes import Clock
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from shared_runs import LAYERS, SharedRun
from sharing_lies import Fixed, Frames, opposite
from tiny_architectures import tiny

from fleetd import limits
from fleetd.engine.sequence_state.shapes import KvShape
from fleetd.engine.shared_prefill import frame_payloads, kv_layout
from fleetd.engine.shared_prefill.spot_check import drawn
from fleetd.engine.streams.frames import Frame, FrameHeader, Kind
from fleetd.errors import FleetError, PeerWrong
from fleetd.plan.prefill.split import Split

pytestmark = pytest.mark.usefixtures("cpu_installed")

HALF = Split("layers", (0, 2, 4), LAYERS, 0, 97, 40)
CHAIN = Split("layers", (0, 1, 3, 4), LAYERS, 17, 97, 40)
ELSEWHERE = Split("layers", (0, 4, 4), LAYERS, 17, 97, 40)
TOKENS = Split("tokens", (0, 64, 97), LAYERS, 0, 97, 32)
TOKEN_CHAIN = Split("tokens", (17, 49, 81, 97), LAYERS, 17, 97, 32)
SPLITS = {
    "layers": HALF,
    "a chain by layers": CHAIN,
    "all elsewhere": ELSEWHERE,
    "tokens": TOKENS,
    "a chain by tokens": TOKEN_CHAIN,
}
FIRST = limits.SHARE_SPOT_TOKENS

Lie = Callable[[FrameHeader, np.ndarray[Any, Any], np.ndarray[Any, Any]], None]


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("llama")


def later(lie: Lie, *, layers: tuple[int, ...] = (0, 1, 2, 3)) -> Callable[[FrameHeader, bytes], Frames]:
    """Of some layers, change the rows of tokens after those that the first check compares."""
    begun: dict[int, int] = {}

    def tamper(head: FrameHeader, data: bytes) -> Frames:
        if head.kind is not Kind.ROWS or head.layer not in layers:
            return [(head, data)]
        right = max(0, begun.setdefault(head.layer, head.start) + FIRST - head.start)
        if right >= head.count:
            return [(head, data)]
        numbers = np.frombuffer(data, np.float32).copy()
        keys, values = np.split(numbers, [head.sizes[0] // 4])
        # (heads, count, width), of heads of 32 numbers in the tiny model.
        shape = (-1, head.count, 32)
        keys, values = keys.reshape(shape), values.reshape(shape)
        lie(head, keys[:, right:], values[:, right:])
        return [(head, keys.tobytes() + values.tobytes())]

    return tamper


def noise(head: FrameHeader, keys: Any, values: Any) -> None:
    rng = np.random.default_rng(head.start + head.layer)
    keys[...], values[...] = rng.standard_normal(keys.shape), rng.standard_normal(values.shape)


def wrong_values(head: FrameHeader, keys: Any, values: Any) -> None:
    values[...] = values[:, ::-1].copy() * 2


def other_tokens(head: FrameHeader, keys: Any, values: Any) -> None:
    """As an honest machine has them, of the tokens in another order."""
    for rows in (keys, values):
        rows[...] = np.roll(rows, 1, axis=1).copy()


def a_little(head: FrameHeader, keys: Any, values: Any) -> None:
    """Found only where bytes have to be the same."""
    values[...] *= np.float32(1.0001)


LIES: dict[str, Lie] = {"noise": noise, "wrong values": wrong_values, "rows of other tokens": other_tokens}


def given_up(run: SharedRun) -> FleetError:
    """The error with which sharing ends; home goes on alone, to the local bytes, with nothing of the lie."""
    with pytest.raises(FleetError) as ended:
        run.finish()
    run.home.close()
    done, caches = run.home.verified
    assert done == run.split.cached
    run.check(run.local(caches, done).cache)
    return ended.value


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_attack_right_at_first_and_wrong_later(llama: Any, split: Split, lie: Lie) -> None:
    """Even where rows need only be alike."""
    last = split.helpers - 1
    run = SharedRun(llama, split, exact=False, tampers={(last, "home"): later(lie)}, draw=Fixed())
    error = given_up(run)
    assert isinstance(error, PeerWrong)
    assert str(error).startswith(f"helper{last}: it computes other ")


@pytest.mark.parametrize("layer", range(2))
def test_attack_one_layer_is_wrong(llama: Any, layer: int) -> None:
    tampers = {(0, "home"): later(wrong_values, layers=(layer,))}
    error = given_up(SharedRun(llama, HALF, exact=False, tampers=tampers, draw=Fixed()))
    assert f"values of layer {layer}" in str(error)


def test_attack_a_last_bit_is_wrong_where_bytes_must_be_equal(llama: Any) -> None:
    tampers = {(0, "home"): later(a_little, layers=(1,))}
    assert isinstance(given_up(SharedRun(llama, HALF, tampers=tampers, draw=Fixed())), PeerWrong)


def test_attack_tokens_that_are_not_drawn_show_in_those_that_attend_to_them(llama: Any) -> None:
    """Bytes must be equal, and everything after a wrong row attends to it."""

    def one_row(head: FrameHeader, keys: Any, values: Any) -> None:
        if head.start <= 20 < head.end:
            values[:, 20 - head.start - FIRST] *= 3

    run = SharedRun(llama, HALF, tampers={(0, "home"): later(one_row, layers=(0,))}, draw=Fixed())
    assert "of layer 1" in str(given_up(run)), "where the lie was about layer 0"


@pytest.mark.parametrize("split", [HALF, CHAIN])
def test_attack_hidden_states_are_wrong_later(llama: Any, split: Split) -> None:
    """Home computes its own layers from them: their rows give it away."""

    def tamper(head: FrameHeader, data: bytes) -> Frames:
        if head.kind is not Kind.HIDDEN or head.start == split.cached:
            return [(head, data)]
        rng = np.random.default_rng(head.start)
        return [(head, rng.standard_normal(len(data) // 4).astype(np.float32).tobytes())]

    last = split.helpers - 1
    error = given_up(SharedRun(llama, split, exact=False, tampers={(last, "out"): tamper}, draw=Fixed()))
    assert isinstance(error, PeerWrong)
    assert str(error).startswith(f"helper{last}: ")


@pytest.mark.parametrize(
    ("name", "lie"), [("gemma3n", (384, 512)), ("hunyuan_3", (128, 192)), ("kimi_k3", (128, 256))]
)
def test_attack_one_of_several_hidden_states_is_wrong(name: str, lie: tuple[int, int]) -> None:
    """Or the keys that travel with one: wrong by two fifths, which is little of all that a token has."""

    def tamper(head: FrameHeader, data: bytes) -> Frames:
        if head.kind is not Kind.HIDDEN:
            return [(head, data)]
        numbers = np.frombuffer(data, np.float32).reshape(head.count, -1).copy()
        numbers[:, slice(*lie)] *= np.float32(0.6)
        return [(head, numbers.tobytes())]

    run = SharedRun(tiny(name), HALF, exact=False, tampers={(0, "out"): tamper}, draw=Fixed())
    assert "helper0: it computes other hidden states before layer 2" in str(given_up(run))


@pytest.mark.parametrize(
    ("split", "value"), [(HALF, np.nan), (CHAIN, np.inf), (TOKENS, -np.inf), (TOKEN_CHAIN, np.nan)]
)
def test_attack_a_later_number_is_none(llama: Any, split: Split, value: float) -> None:
    """Refused on receipt, before anything is computed from it."""

    def spoil(head: FrameHeader, keys: Any, values: Any) -> None:
        values[-1, -1, -1] = value

    last = split.helpers - 1
    run = SharedRun(llama, split, exact=False, tampers={(last, "home"): later(spoil)})
    with pytest.raises(PeerWrong, match=f"helper{last}: It sent numbers that are none"):
        run.finish()
    run.home.close()
    done, caches = run.home.verified
    run.check(run.local(caches, done).cache)


def test_attack_a_hidden_state_is_not_a_number(llama: Any) -> None:
    def tamper(head: FrameHeader, data: bytes) -> Frames:
        if head.kind is not Kind.HIDDEN or not head.start:
            return [(head, data)]
        return [(head, data[:-4] + np.float32(np.nan).tobytes())]

    run = SharedRun(llama, HALF, exact=False, tampers={(0, "out"): tamper})
    with pytest.raises(PeerWrong, match="helper0: It sent numbers that are none"):
        run.finish()


@pytest.mark.parametrize("split", [HALF, TOKENS], ids=["layers", "tokens"])
def test_attack_a_hybrids_keys_are_wrong_from_the_first_token(split: Split) -> None:
    """They rest on the states of the layers below, which is how these are compared."""

    def tamper(head: FrameHeader, data: bytes) -> Frames:
        if head.kind is not Kind.ROWS:
            return [(head, data)]
        return [(head, (np.frombuffer(data, np.float32) + np.float32(1)).tobytes())]

    model = tiny("qwen3_5")
    run = SharedRun(model, split, exact=False, tampers={(0, "home"): tamper})
    with pytest.raises(PeerWrong, match="helper0: it computes other keys of layer 1"):
        run.finish()
    done, caches = run.home.verified
    assert done == split.cached
    run.check(run.local(caches, done).cache)


@pytest.mark.parametrize("split", [HALF, TOKENS], ids=["layers", "tokens"])
def test_attack_a_running_state_is_not_a_number(split: Split) -> None:
    def tamper(head: FrameHeader, data: bytes) -> Frames:
        if head.kind is not Kind.STATE:
            return [(head, data)]
        return [(head, data[:-4] + np.float32(np.nan).tobytes())]

    run = SharedRun(tiny("qwen3_5"), split, tampers={(0, "home"): tamper})
    with pytest.raises(PeerWrong, match="helper0: It sent numbers that are none"):
        run.finish()
    done, caches = run.home.verified
    run.check(run.local(caches, done).cache)


HYBRID = tiny("qwen3_5")


def state_lie(split: Split, rank: int, lie: Callable[[Any], None], *, last: bool = True) -> Any:
    """Change the states that a helper sends last, or those before its last chunk."""
    end = split.tokens_of(rank).stop if last else split.snapshot_of(rank)

    def tamper(head: FrameHeader, data: bytes) -> Frames:
        if head.kind is not Kind.STATE or head.end != end:
            return [(head, data)]
        numbers = np.frombuffer(data, np.float32).copy()
        lie(numbers)
        return [(head, numbers.tobytes())]

    return tamper


def nearly(numbers: Any) -> None:
    numbers *= np.float32(1.0001)


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_attack_running_states_are_wrong(split: Split) -> None:
    """Even where numbers need only be alike; each helper that lies is the one that is named."""
    # Of divided tokens, the next helper's first ones are compared with what rests on these states.
    for rank in range(split.helpers) if split.kind == "layers" else [split.helpers - 1]:
        tampers = {(rank, "home"): state_lie(split, rank, opposite)}
        error = given_up(SharedRun(HYBRID, split, exact=False, tampers=tampers, draw=Fixed()))
        assert isinstance(error, PeerWrong)
        assert str(error).startswith(f"helper{rank}: it computes other ")


@pytest.mark.parametrize("split", [HALF, TOKENS], ids=["layers", "tokens"])
def test_attack_running_states_are_nearly_right_where_bytes_must_be_equal(split: Split) -> None:
    tampers = {(0, "home"): state_lie(split, 0, nearly)}
    error = given_up(SharedRun(HYBRID, split, tampers=tampers, draw=Fixed()))
    assert str(error).startswith("helper0: it computes other running states of layer 0 ")


@pytest.mark.parametrize("split", [HALF, CHAIN], ids=["layers", "a chain by layers"])
def test_attack_a_hybrids_last_hidden_states_are_wrong(split: Split) -> None:
    last = split.helpers - 1

    def tamper(head: FrameHeader, data: bytes) -> Frames:
        if head.kind is not Kind.HIDDEN or head.start != split.snapshot_of(last):
            return [(head, data)]
        return [(head, (-np.frombuffer(data, np.float32)).tobytes())]

    run = SharedRun(HYBRID, split, exact=False, tampers={(last, "out"): tamper}, draw=Fixed())
    assert str(given_up(run)).startswith(f"helper{last}: it computes other hidden states ")


@pytest.mark.parametrize("split", [HALF, TOKENS], ids=["layers", "tokens"])
def test_attack_a_hybrids_rows_of_its_last_chunk_are_wrong(split: Split) -> None:
    begun = split.snapshot_of(0)
    assert begun is not None

    def tamper(head: FrameHeader, data: bytes) -> Frames:
        if head.kind is not Kind.ROWS or head.end <= begun:
            return [(head, data)]
        heads = -1, head.count, 32
        rows = [half.reshape(heads) for half in np.split(np.frombuffer(data, np.float32).copy(), 2)]
        for half in rows:
            half[:, max(0, begun - head.start) :] *= -1
        return [(head, b"".join(half.tobytes() for half in rows))]

    run = SharedRun(HYBRID, split, exact=False, tampers={(0, "home"): tamper}, draw=Fixed())
    assert str(given_up(run)).startswith("helper0: it computes other keys of layer 1 ")


def test_an_honest_helper_whose_numbers_round_otherwise_is_not_blamed_for_its_states() -> None:
    """As another accelerator does."""

    def round_otherwise(numbers: Any) -> None:
        numbers *= 1 + np.random.default_rng(2).uniform(-0.02, 0.02, numbers.shape).astype(np.float32)

    for split in (HALF, TOKENS):
        for last in (True, False):
            tampers = {(0, "home"): state_lie(split, 0, round_otherwise, last=last)}
            run = SharedRun(HYBRID, split, exact=False, tampers=tampers, draw=Fixed())
            assert run.finish().remaining == 0


class Never(Fixed):
    def random(self) -> float:
        return 1.0


def test_the_check_of_states_is_made_as_seldom_as_its_tokens_are_many() -> None:
    """By a clock of seconds: the first check takes one, the last chunk of 17 tokens a little longer."""
    tampers = {(0, "home"): state_lie(HALF, 0, opposite)}
    for predicted_s, found in ((10_000.0, True), (1.0, False)):
        run = SharedRun(
            HYBRID, HALF, tampers=tampers, draw=Never(), clock=Clock(tick=1.0), predicted_s=predicted_s
        )
        if found:
            assert isinstance(given_up(run), PeerWrong)
        else:
            run.finish()


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_numbers_are_told_from_what_is_none_in_every_dtype(llama: Any, dtype: mx.Dtype) -> None:
    shape = KvShape(1, 4, 4, dtype)
    layout = kv_layout.KvLayout(0, ((shape,),), 4, dtype)
    largest = mx.finfo(dtype).max
    for kind in (Kind.ROWS, Kind.STATE, Kind.HIDDEN):
        for spoilt in (None, float("nan"), float("inf"), float("-inf")):
            numbers = mx.array([0.0, -1.0, largest, -largest, 1e-40, 1.0, 2.0, 3.0]).astype(dtype)
            if spoilt is not None:
                numbers[7] = spoilt
            data = np.array(numbers.view(mx.uint8)).tobytes()
            parts = [memoryview(data[: len(data) // 2]), memoryview(data[len(data) // 2 :])]
            frame = Frame(FrameHeader(kind, 0, 0, 1, (len(data), 0)), parts)
            assert frame_payloads.finite(frame, layout) is (spoilt is None)
    tokens = Frame(FrameHeader(Kind.TOKENS), [memoryview(b"\xff" * 8)])
    assert frame_payloads.finite(tokens, layout)


def test_attack_lies_and_then_breaks_off(llama: Any) -> None:
    """What home would go on from is checked, too."""
    run = SharedRun(llama, HALF, exact=False, tampers={(0, "home"): later(noise)}, draw=Fixed())
    run.clock.tick = 1.0
    turns = run.turns()
    while run.home.done < 40:
        next(turns)
    # The daemon gives the helper up: home was not asked.
    done, caches = run.home.verified
    assert done == 0
    run.home.close()
    run.check(run.local(caches, done).cache)


def test_a_helper_that_was_right_until_it_broke_off_is_not_computed_again(llama: Any) -> None:
    run = SharedRun(llama, HALF, exact=True, draw=Fixed(), clock=Clock(tick=1.0))
    turns = run.turns()
    while run.home.done < 40:
        next(turns)
    done, caches = run.home.verified
    assert done >= 40
    run.home.close()
    run.check(run.local(caches, done).cache)


# ---- Chance and cost -------------------------------------------------------------------------------------


def test_which_tokens_are_checked_is_not_to_be_foreseen() -> None:
    """Each of the later ones may be, and about as often as the others."""
    draw, seen = random.Random(3), [0] * 200
    for _ in range(4000):
        found = drawn(range(100, 200), FIRST, draw)
        assert len(found) == FIRST
        for token in found:
            seen[token] += 1
    assert sum(seen[: 100 + FIRST]) == 0, "the first ones are checked already"
    assert min(seen[100 + FIRST :]) > 0
    assert drawn(range(5, 9), FIRST, draw) == range(5, 9)
    assert drawn(range(20), FIRST, draw) == range(4, 20)


def within(first: int, last: int, lie: Lie) -> Lie:
    """The lie about these tokens only."""

    def changed(head: FrameHeader, keys: Any, values: Any) -> None:
        start = head.end - keys.shape[1]
        of = slice(max(0, first - start), max(0, last - start))
        lie(head, keys[:, of], values[:, of])

    return changed


@pytest.mark.parametrize(("start", "is_found"), [(16, False), (24, False), (25, True), (44, True)])
def test_a_lie_that_no_later_token_shows_is_found_where_tokens_of_it_are_drawn(
    llama: Any, start: int, is_found: bool
) -> None:
    """Nothing rests on the last layer. Where rows need only be alike, more than a quarter of the drawn tokens
    have to be wrong."""

    class At(Fixed):
        def randint(self, a: int, b: int) -> int:
            assert a <= start <= b or a == b
            return b if a == b else start

    tampers = {(0, "home"): later(within(36, 52, noise), layers=(3,))}
    run = SharedRun(llama, TOKENS, exact=False, tampers=tampers, draw=At())
    if is_found:
        assert isinstance(given_up(run), PeerWrong)
    else:
        run.finish()


class Unlucky(Fixed):
    def random(self) -> float:
        return 1.0


@pytest.mark.parametrize(("predicted_s", "is_checked"), [(100 * 1000.0, True), (1.0, False)])
def test_a_check_that_takes_more_than_a_hundredth_is_made_less_often(
    llama: Any, predicted_s: float, is_checked: bool
) -> None:
    """By a clock on which each step of the first check takes a second. That of the end is always made, and
    does not show this lie."""

    tampers = {(0, "home"): later(within(36, 52, a_little), layers=(3,))}
    run = SharedRun(
        llama, TOKENS, tampers=tampers, draw=Unlucky(), clock=Clock(tick=1.0), predicted_s=predicted_s
    )
    if is_checked:
        assert isinstance(given_up(run), PeerWrong)
    else:
        run.finish()


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_attack_the_last_tokens_are_wrong_and_none_of_them_is_drawn(family: str, split: Split) -> None:
    """Even where the check of drawn ones takes too long to be made."""
    last = split.helpers - 1
    stop = split.tokens_of(last).stop
    tampers = {(last, "home"): later(within(stop - 8, stop, noise))}
    run = SharedRun(tiny(family), split, exact=False, tampers=tampers, draw=Unlucky(), predicted_s=1e-9)
    error = given_up(run)
    assert isinstance(error, PeerWrong)
    assert str(error).startswith(f"helper{last}: it computes other ")


# ---- Windows that slide ----------------------------------------------------------------------------------

# The last chunk is one token: what adds it writes over the oldest row.
ONE_MORE = Split("layers", (0, 2, 4), LAYERS, 0, 97, 32)
WINDOWED = {**SPLITS, "one token in the last chunk": ONE_MORE}


def in_the_end(head: FrameHeader, data: bytes) -> Frames:
    """Change what a window keeps of its last tokens."""
    if head.kind is not Kind.STATE:
        return [(head, data)]
    keys, values = np.split(np.frombuffer(data, np.float32).copy(), [head.sizes[0] // 4])
    # Of two heads of 32 numbers.
    keys, values = (x.reshape(2, -1, 32) for x in (keys, values))
    noise(head, keys[:, -FIRST:], values[:, -FIRST:])
    return [(head, keys.tobytes() + values.tobytes())]


@pytest.mark.parametrize("split", WINDOWED.values(), ids=WINDOWED)
def test_attack_a_window_is_wrong_in_its_last_tokens(split: Split) -> None:
    last = split.helpers - 1
    error = given_up(SharedRun(tiny("mistral"), split, tampers={(last, "home"): in_the_end}, draw=Fixed()))
    assert isinstance(error, PeerWrong)
    assert str(error).startswith(f"helper{last}: it computes other ")


@pytest.mark.parametrize("split", [HALF, TOKENS], ids=["layers", "tokens"])
def test_attack_windows_are_right_and_later_rows_beside_them_are_not(split: Split) -> None:
    tampers = {(0, "home"): later(noise)}
    error = given_up(SharedRun(tiny("gemma3_text"), split, tampers=tampers, draw=Fixed()))
    assert "it computes other keys of layer 1" in str(error), "the layers with windows are 0 and 2"


@pytest.mark.parametrize("split", WINDOWED.values(), ids=WINDOWED)
@pytest.mark.parametrize("name", ["gemma3_text", "mistral", pytest.param("gpt_oss", marks=pytest.mark.long)])
def test_an_honest_helper_with_windows_is_never_blamed(name: str, split: Split) -> None:
    for draw in (Fixed(), random.Random(1)):
        assert SharedRun(tiny(name), split, draw=draw).finish().done == split.tokens
