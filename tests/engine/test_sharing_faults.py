"""Whatever a helper or a stream does: home has the local bytes, or goes on alone to the local bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pipes import Clock, Streams
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from family_params import in_turn
from msgspec.structs import replace
from shared_runs import LAYERS, SharedRun, prompt
from tiny_architectures import VOCAB, tiny

from fleetd import limits
from fleetd.engine.layers.stage import Stage
from fleetd.engine.protocol import AssistPrefill
from fleetd.engine.shared_prefill.helper_prefill import HelperPrefill
from fleetd.engine.shared_prefill.kv_layout import KvLayout
from fleetd.engine.streams.frames import FrameHeader, Kind
from fleetd.errors import FleetError, InvalidValue, PeerLate, PeerLost, PeerWrong, ProtocolError
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

Tamper = Callable[[FrameHeader, bytes], list[tuple[FrameHeader, bytes]]]


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("llama")


def gives_up(run: SharedRun) -> FleetError:
    """The error with which sharing ends; what is left of it leads to the local bytes."""
    with pytest.raises(FleetError) as ended:
        run.finish()
    assert run.home.ready, "an error is told at once"
    with pytest.raises(type(ended.value)):
        run.home.step()
    goes_on_alone(run)
    return ended.value


def goes_on_alone(run: SharedRun) -> None:
    run.home.close()
    run.home.close()
    done, caches = run.home.verified
    assert run.split.cached <= done <= run.split.tokens
    run.check(run.local(caches, done).cache)


def lost(turns: Iterator[None]) -> PeerLost | None:
    try:
        for _ in turns:
            pass
    except PeerLost as error:
        return error
    return None


def steps_of(helper: HelperPrefill) -> Iterator[None]:
    while helper.ready and not helper.finished:
        helper.step()
        yield


# ---- Lost ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("split", "every"),
    [
        pytest.param(split, every, id=way if every == 1 else f"{way}, some events", marks=marks)
        for way, split in SPLITS.items()
        # Of a single helper all events in the quick run, of the others every third.
        for every, marks in ([(1, ())] if split in (HALF, TOKENS) else [(3, ()), (1, pytest.mark.long)])
    ],
)
def test_a_stream_that_breaks_at_any_event(llama: Any, split: Split, every: int) -> None:
    """Each of the sends and receipts of a whole share is the one at which its stream is cut."""
    whole = SharedRun(llama, split, clock=Clock(tick=1.0), predicted_s=1e6)
    whole.finish()
    gave_up = 0
    events = range(0, whole.streams.events.count, every)
    for fatal in events:
        run = SharedRun(llama, split, clock=Clock(tick=1.0), predicted_s=1e6, fatal=fatal)
        error = lost(run.turns())
        assert error is None or str(error).startswith("helper")
        gave_up += error is not None
        goes_on_alone(run)
        for helper in run.helpers:
            helper.close()
    # But for those after which nothing more was to come.
    assert gave_up >= len(events) - 2 * split.helpers


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("gemma3_text", CHAIN),
        ("qwen3_5", TOKEN_CHAIN),
        pytest.param("mistral", TOKEN_CHAIN, marks=pytest.mark.long),
        pytest.param("qwen3_5", CHAIN, marks=pytest.mark.long),
        pytest.param("gemma3_text", TOKEN_CHAIN, marks=pytest.mark.long),
        pytest.param("mistral", CHAIN, marks=pytest.mark.long),
    ],
)
def test_a_stream_that_breaks_where_layers_keep_states(name: str, split: Split) -> None:
    model = tiny(name)
    whole = SharedRun(model, split, clock=Clock(tick=1.0), predicted_s=1e6)
    whole.finish()
    for fatal in range(3, whole.streams.events.count, 4):
        run = SharedRun(model, split, clock=Clock(tick=1.0), predicted_s=1e6, fatal=fatal)
        lost(run.turns())
        goes_on_alone(run)


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_home_that_goes_away_ends_the_assist(llama: Any, split: Split) -> None:
    run = SharedRun(llama, split, clock=Clock(tick=1.0), predicted_s=1e6)
    next(run.turns())
    run.home.close()
    for helper in run.helpers:
        error = lost(steps_of(helper))
        assert error is not None, "it goes on for nobody"
        assert str(error).startswith(("home", "out", "in"))
        helper.close()


# ---- Late ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_a_helper_that_never_answers_is_given_up_when_it_is_due(llama: Any, split: Split) -> None:
    run = SharedRun(llama, split, predicted_s=4.0)
    while run.home.ready:
        run.home.step()
    due = run.home.due_s
    assert due is not None
    assert limits.SHARE_GRACE_S < due <= limits.SHARE_GRACE_S + limits.SHARE_LATE * 4.0
    run.clock.now = due - 0.01
    assert run.home.step() == 0
    run.clock.now = due
    with pytest.raises(PeerLate, match="helper0"):
        run.home.step()
    goes_on_alone(run)


@pytest.mark.parametrize("split", [HALF, TOKENS])
def test_a_helper_that_stops_in_the_middle_is_given_up(llama: Any, split: Split) -> None:
    run = SharedRun(llama, split, clock=Clock(tick=0.001), predicted_s=1.0)
    first = run.helpers[0]
    run.clock.tick = 1.0
    assert first.ready
    first.step()
    run.clock.tick = 0.0
    while run.home.ready:
        run.home.step()
    assert run.home.due_s is not None
    run.clock.now = run.home.due_s
    with pytest.raises(PeerLate):
        run.home.step()
    if split is HALF:
        assert run.home.done == split.chunk
    goes_on_alone(run)


def test_time_in_which_home_was_busy_is_not_the_helpers_fault(llama: Any) -> None:
    run = SharedRun(llama, HALF, predicted_s=1.0)
    helper = run.helpers[0]
    while helper.ready and not helper.finished:
        helper.step()
    run.clock.now += 1000.0  # home computes for others; all that it needs is there
    assert run.home.ready
    assert run.home.due_s is None
    run.check(run.finish().cache)


def test_a_helper_that_hears_nothing_gives_up(llama: Any) -> None:
    stage, clock, streams = Stage.of(llama), Clock(), Streams(1)
    helper = HelperPrefill(stage, KvLayout.of(stage), AssistPrefill("a", HALF, 0), streams.of(0), clock=clock)
    assert not helper.ready
    assert helper.step() == 0
    assert helper.due_s == limits.SHARE_IDLE_S
    clock.now = limits.SHARE_IDLE_S
    with pytest.raises(PeerLost, match="home: nothing came"):
        helper.step()


# ---- Not due ---------------------------------------------------------------------------------------------


def only(kind: Kind, change: Tamper, number: int = 1) -> Tamper:
    """Of the frames of a kind the one with the number is changed."""
    seen = iter(range(1 << 30))

    def tamper(head: FrameHeader, data: bytes) -> list[tuple[FrameHeader, bytes]]:
        if head.kind is kind and next(seen) == number:
            return change(head, data)
        return [(head, data)]

    return tamper


def headed(**fields: Any) -> Tamper:
    return lambda head, data: [(replace(head, **fields), data)]


def longer(head: FrameHeader, data: bytes) -> list[tuple[FrameHeader, bytes]]:
    return [(replace(head, sizes=(head.sizes[0] + 8, head.sizes[1])), data + bytes(8))]


def shorter(head: FrameHeader, data: bytes) -> list[tuple[FrameHeader, bytes]]:
    return [(replace(head, sizes=(head.sizes[0] - 8, head.sizes[1])), data[8:])]


def shifted(head: FrameHeader, data: bytes) -> list[tuple[FrameHeader, bytes]]:
    """The same bytes in all, values made longer by what keys lose."""
    return [(replace(head, sizes=(head.sizes[0] - 8, head.sizes[1] + 8)), data)]


ATTACKS: dict[str, Tamper] = {
    "a frame of another layer": headed(layer=LAYERS + 3),
    "a frame that comes twice": lambda head, data: [(head, data), (head, data)],
    "a frame that is left out": lambda head, data: [],
    "a frame of other tokens": headed(prefix=b"\1" * 8),
    "a frame at another place": headed(start=5),
    "a frame of more tokens than are due": headed(count=2**31),
    "a frame of another kind": headed(kind=Kind.TOKENS),
    "a frame that ends everything too early": lambda head, data: [(FrameHeader(Kind.DONE), b"")],
    "a payload that is too long": longer,
    "a payload that is too short": lambda head, data: [
        (replace(head, sizes=(head.sizes[0] - 8, 0)), data[8:])
    ],
    "a payload divided otherwise": shifted,
    "an index where none is due": headed(index=1),
}


@pytest.mark.parametrize(("split", "attack"), in_turn({"layers": HALF, "tokens": TOKENS}, ATTACKS))
def test_rows_that_are_not_due(llama: Any, split: Split, attack: Tamper) -> None:
    run = SharedRun(llama, split, tampers={(0, "home"): only(Kind.ROWS, attack)})
    error = gives_up(run)
    assert isinstance(error, ProtocolError)
    assert "helper0" in str(error)


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_hidden_states_that_are_not_due(llama: Any, attack: Tamper) -> None:
    run = SharedRun(llama, CHAIN, tampers={(1, "out"): only(Kind.HIDDEN, attack, 0)})
    error = gives_up(run)
    assert isinstance(error, ProtocolError)
    assert "helper1" in str(error)


@pytest.mark.parametrize(
    ("chain", "attack"),
    in_turn({"layers": (CHAIN, Kind.HIDDEN), "tokens": (TOKEN_CHAIN, Kind.ROWS)}, ATTACKS),
)
def test_what_is_not_due_between_helpers_ends_their_part(
    llama: Any, chain: tuple[Split, Kind], attack: Tamper
) -> None:
    split, kind = chain
    run = SharedRun(llama, split, tampers={(0, "out"): only(kind, attack, 0)})
    assert isinstance(gives_up(run), PeerLost)


@pytest.mark.parametrize(("kind", "attack"), in_turn({"tokens": Kind.TOKENS, "rows": Kind.ROWS}, ATTACKS))
def test_a_prompt_that_is_not_due_ends_the_assist(llama: Any, kind: Kind, attack: Tamper) -> None:
    if kind is Kind.TOKENS and attack is ATTACKS["a frame of another kind"]:
        attack = headed(kind=Kind.ROWS)
    split = Split("layers", (0, 2, 4), LAYERS, 17, 97, 32)
    run = SharedRun(llama, split, tampers={(-1, "helper0"): only(kind, attack, 0)})
    with pytest.raises(ProtocolError, match="home"):
        run.helpers[0].step()
    run.helpers[0].close()
    assert isinstance(gives_up(run), PeerLost)


def state_of(field: str, change: Callable[[int], int]) -> Tamper:
    return lambda head, data: [(replace(head, **{field: change(getattr(head, field))}), data)]


STATES: dict[str, Tamper] = {
    "an index beyond the rows": state_of("index", lambda index: index + 1000),
    "an index within the rows": state_of("index", lambda index: index - 1),
    "half a row": lambda head, data: [(replace(head, sizes=(head.sizes[0] - 4, head.sizes[1])), data[4:])],
    "no rows": lambda head, data: [(replace(head, sizes=(0, 0)), b"")],
    "a row less": lambda head, data: [
        (replace(head, sizes=(head.sizes[0] - 256, head.sizes[1] - 256), index=head.index - 1), data[512:])
    ],
    "more rows than tokens": lambda head, data: [
        (replace(head, sizes=(256 * 400, 256 * 400)), bytes(2 * 256 * 400))
    ],
}


@pytest.mark.parametrize(("split", "attack"), in_turn({"layers": HALF, "tokens": TOKENS}, STATES))
def test_a_state_that_these_tokens_do_not_leave(split: Split, attack: Tamper) -> None:
    run = SharedRun(tiny("gemma3_text"), split, tampers={(0, "home"): only(Kind.STATE, attack, 0)})
    assert isinstance(gives_up(run), ProtocolError)


@pytest.mark.parametrize("token", [-1, VOCAB, 2**31 - 1])
def test_a_token_that_is_not_in_the_vocabulary(llama: Any, token: int) -> None:
    """An embedding reads whatever memory such a token leads to."""

    def foreign(head: FrameHeader, data: bytes) -> list[tuple[FrameHeader, bytes]]:
        return [(head, data[:-4] + np.int32(token).tobytes())]

    for split in (HALF, TOKENS):
        run = SharedRun(llama, split, tampers={(-1, "helper0"): only(Kind.TOKENS, foreign, 0)})
        with pytest.raises(ProtocolError, match=r"other tokens|vocabulary"):
            run.helpers[0].step()


# ---- Wrong -----------------------------------------------------------------------------------------------


def noise(head: FrameHeader, data: bytes) -> list[tuple[FrameHeader, bytes]]:
    rng = np.random.default_rng(len(data))
    return [(head, rng.standard_normal(len(data) // 4).astype(np.float32).tobytes())]


def zeros(head: FrameHeader, data: bytes) -> list[tuple[FrameHeader, bytes]]:
    return [(head, bytes(len(data)))]


def nans(head: FrameHeader, data: bytes) -> list[tuple[FrameHeader, bytes]]:
    return [(head, np.full(len(data) // 4, np.nan, np.float32).tobytes())]


def one_nan(head: FrameHeader, data: bytes) -> list[tuple[FrameHeader, bytes]]:
    return [(head, np.float32(np.nan).tobytes() + data[4:])]


def last_bit(head: FrameHeader, data: bytes) -> list[tuple[FrameHeader, bytes]]:
    return [(head, bytes([data[0] ^ 1]) + data[1:])]


GARBAGE = {"noise": noise, "zeros": zeros, "NaN": nans, "one NaN": one_nan}


ENDS = {
    "rows of layers": (HALF, (0, "home"), Kind.ROWS),
    "hidden states": (HALF, (0, "out"), Kind.HIDDEN),
    "rows of a chain": (CHAIN, (1, "home"), Kind.ROWS),
    "rows of all layers": (ELSEWHERE, (0, "home"), Kind.ROWS),
    "rows of tokens": (TOKENS, (0, "home"), Kind.ROWS),
    "rows of a chain of tokens": (TOKEN_CHAIN, (1, "home"), Kind.ROWS),
}


@pytest.mark.parametrize(("where", "garbage"), in_turn(ENDS, GARBAGE))
def test_garbage_from_a_helper_is_found_and_nothing_of_it_kept(
    llama: Any, where: tuple[Split, tuple[int, str], Kind], garbage: Tamper
) -> None:
    """Even where rows need only be alike."""
    split, end, kind = where
    run = SharedRun(llama, split, exact=False, tampers={end: only(kind, garbage, 0)})
    error = gives_up(run)
    assert isinstance(error, PeerWrong)
    assert str(error).startswith(f"helper{end[0]}: ")
    assert run.home.done == split.cached


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_a_bit_that_differs_is_found_where_bytes_must_be_equal(llama: Any, split: Split) -> None:
    flipped = {(0, "home"): only(Kind.ROWS, last_bit, 0)}
    assert isinstance(gives_up(SharedRun(llama, split, tampers=flipped)), PeerWrong)
    alike = SharedRun(llama, split, exact=False, tampers={(0, "home"): only(Kind.ROWS, last_bit, 0)})
    assert alike.finish().done == split.tokens


@pytest.mark.parametrize(("exact", "split"), in_turn([True, False], SPLITS))
def test_a_helper_with_other_weights_is_found(llama: Any, split: Split, exact: bool) -> None:
    other = tiny("llama")
    other.update({"model": {"layers": [{"mlp": {"up_proj": {"weight": mx.zeros((256, 128))}}}]}})
    run = SharedRun(llama, split, theirs=other, exact=exact)
    assert isinstance(gives_up(run), PeerWrong)


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_a_helper_whose_rounding_differs_is_none_the_worse_for_it(llama: Any, split: Split) -> None:
    """Its weights are rounded to bf16: as if it computed on another accelerator."""
    other = tiny("llama")
    other.set_dtype(mx.bfloat16)
    other.set_dtype(mx.float32)
    run = SharedRun(llama, split, theirs=other, exact=False)
    assert run.finish().done == split.tokens
    assert isinstance(gives_up(SharedRun(llama, split, theirs=other, exact=True)), PeerWrong)


@pytest.mark.parametrize(
    ("name", "split"),
    in_turn(
        ["gemma3_text", "mistral", "gpt_oss"],
        {"half": HALF, "chain": CHAIN, "tokens": TOKENS, "chain of tokens": TOKEN_CHAIN},
    ),
)
def test_garbage_is_found_where_caches_rotate(name: str, split: Split) -> None:
    model, other = tiny(name), tiny(name)
    other.update(
        {"model": {"layers": [{"self_attn": {"k_proj": {"weight": mx.ones((64, 128))}}} for _ in range(4)]}}
    )
    run = SharedRun(model, split, theirs=other)
    assert isinstance(gives_up(run), PeerWrong)


# ---- Refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("split", "rank"),
    [
        (HALF, 1),
        (HALF, -1),
        (Split("layers", (0, 3, 3, 4), LAYERS, 0, 97, 32), 0),
        (Split("layers", (0, 2, 5), 5, 0, 97, 32), 0),
        (Split("layers", (0, 3, 4), LAYERS, 0, 97, 32), 0),
        (TOKENS, 0),
    ],
)
def test_an_assist_that_is_not_for_this_worker_is_refused(llama: Any, split: Split, rank: int) -> None:
    """It holds layers 0 and 1 only."""
    stage = Stage.of(llama).part(0, 2)

    def opened(name: str, rank: Any) -> Any:
        raise AssertionError("no stream is opened for an assist that is refused")

    with pytest.raises(InvalidValue):
        HelperPrefill(stage, KvLayout.of(stage), AssistPrefill("a", split, rank), opened)


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_a_helper_waits_while_too_much_is_queued(
    llama: Any, split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SHARE_QUEUED_BYTES", 1000)
    run = SharedRun(llama, split, clock=Clock(tick=1.0), predicted_s=1e6)
    first = run.helpers[0]
    assert first.ready
    first.step()
    steps = 1
    while first.ready:
        first.step()
        steps += 1
        assert steps < 10
    assert first.progress < len(prompt(split.tokens))
    run.check(run.finish().cache)
