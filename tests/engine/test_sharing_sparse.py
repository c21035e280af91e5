"""A prompt of which tokens are left out, prefilled together: what one machine makes of the same tokens."""

from __future__ import annotations

from pipes import Clock
from typing import Any

import numpy as np
import pytest
from shared_runs import LAYERS, SharedRun, kept_of, prompt, staged
from tiny_architectures import tiny

from fleetd.engine.layers.stage import Stage
from fleetd.engine.protocol import PrefillWithHelpers
from fleetd.engine.sequence_state.copies import copy_on_write
from fleetd.engine.shared_prefill import frame_schedule
from fleetd.engine.shared_prefill.home_prefill import SharedPrefill
from fleetd.engine.shared_prefill.sharable import Sharable
from fleetd.engine.shared_prefill.slots import Slots
from fleetd.engine.sparse_prefill.sparse import Sparse
from fleetd.engine.streams.frames import FrameHeader, Kind
from fleetd.errors import FleetError, InvalidValue, ProtocolError
from fleetd.plan.prefill.split import Split, checked

pytestmark = pytest.mark.usefixtures("cpu_installed")

SPLITS = {
    "half the layers": Split("layers", (0, 2, 4), LAYERS, 0, 97, 32, 300),
    "layers of two helpers after a prefix": Split("layers", (0, 1, 3, 4), LAYERS, 45, 150, 48, 400),
    "all elsewhere": Split("layers", (0, 4, 4), LAYERS, 33, 90, 64, 91),
    "half the tokens after a prefix": Split("tokens", (45, 93, 150), LAYERS, 45, 150, 48, 700),
    "tokens of two helpers": Split("tokens", (0, 40, 80, 121), LAYERS, 0, 121, 40, 1000),
    "all tokens elsewhere": Split("tokens", (33, 97, 130, 130), LAYERS, 33, 130, 64, 300),
}


def model_of(name: str) -> Any:
    model = tiny(name)
    Sparse.of(model)
    return model


@pytest.fixture(scope="module")
def llama() -> Any:
    return model_of("llama")


# Grouped queries, without and with norms of them; latents; layers without positions.
@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("llama", [*SPLITS]),
        ("qwen3", [*SPLITS]),
        ("deepseek_v3", ["layers of two helpers after a prefix", "tokens of two helpers"]),
        ("smollm3", ["layers of two helpers after a prefix", "tokens of two helpers"]),
    ],
)
def test_any_split_gives_the_bytes_of_local_sparse_prefill(name: str, kinds: list[str]) -> None:
    model = model_of(name)
    for split in map(SPLITS.__getitem__, kinds):
        run = SharedRun(model, checked(split))
        run.check(run.finish().cache)


def test_helpers_that_hold_their_own_layers_only(llama: Any) -> None:
    run = SharedRun(llama, SPLITS["layers of two helpers after a prefix"], stages=True)
    run.check(run.finish().cache)


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_what_is_verified_at_any_time_can_be_gone_on_from_alone(llama: Any, split: Split) -> None:
    run = SharedRun(llama, split, clock=Clock(tick=1.0), predicted_s=1e6)
    looked = set()
    for _ in run.turns():
        done, caches = run.home.verified
        if done not in looked:
            looked.add(done)
            # On copies: this prefill goes on.
            run.check(run.local([copy_on_write(cache) for cache in caches], done).cache)
    if split.kind == "layers":
        chunks = {chunk.stop for chunk in split.chunks_of(split.helpers)}
        assert looked >= chunks - {split.tokens}, "a chunk that was complete was not verified"


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_a_helper_that_is_lost_midway_changes_nothing(llama: Any, split: Split) -> None:
    whole = SharedRun(llama, split)
    whole.finish()
    events = whole.streams.events.count
    for fatal in range(1, events, max(1, events // 4)):
        run = SharedRun(llama, split, fatal=fatal)
        try:
            run.finish()
        except FleetError:
            done, caches = run.home.verified
            run.home.close()
            run.check(run.local(caches, done).cache)
        else:  # it was no longer needed
            run.check(run.home.cache)


# ---- What is refused -------------------------------------------------------------------------------------

SPLIT = SPLITS["half the tokens after a prefix"]


def payload(split: Split, **positions: int) -> Any:
    """What home sends, with some of the positions changed: ``at0=5`` is the first one."""
    kept = kept_of(split)
    assert kept is not None
    found = Slots.of(prompt(split.prompt_span + 1), kept).payload.copy()
    for at, position in positions.items():
        found[int(at.removeprefix("at")), 1] = position
    return found


def test_what_is_sent_of_it_arrives() -> None:
    sent = payload(SPLIT)
    arrived = Slots.arrived(memoryview(sent).cast("B"), SPLIT)
    assert np.array_equal(arrived.payload, sent)
    assert arrived.where(range(45, 50)) == kept_of(SPLIT)[45:50]  # type: ignore[index]
    assert Slots.of(prompt(5)).where(range(2)) is None
    head = next(frame_schedule.to_helper(SPLIT, 0, staged(tiny("llama"))[1]))
    assert head.nbytes == sent.nbytes == 8 * SPLIT.tokens


@pytest.mark.parametrize(
    ("positions", "said"),
    [
        ({"at0": -1}, "ascend"),
        ({"at100": 0}, "ascend"),
        ({"at149": 700}, "within"),
        ({"at149": 2**31 - 1}, "within"),
        # Ascending, and in the prompt, but not what a cached beginning is.
        ({f"at{i}": i + 1 for i in range(48)}, "cached"),
    ],
)
def test_positions_that_are_none_are_refused(positions: dict[str, int], said: str) -> None:
    sent = payload(SPLIT, **positions)
    with pytest.raises(ProtocolError, match=said):
        Slots.arrived(memoryview(sent).cast("B"), SPLIT)


def test_a_hash_stands_for_positions_too(llama: Any) -> None:
    before = frame_schedule.prefixes(SPLIT, payload(SPLIT).tobytes())
    after = frame_schedule.prefixes(SPLIT, payload(SPLIT, at149=699).tobytes())
    changed = {end for end in before if before[end] != after[end]}
    assert changed <= {150}  # and before that all are alike

    def elsewhere(head: FrameHeader, data: bytes) -> list[tuple[FrameHeader, bytes]]:
        """The prompt's tokens, one of them at another position."""
        if head.kind is Kind.TOKENS:
            numbers = np.frombuffer(data, "<i4").copy()
            numbers[-1] = 699
            data = numbers.tobytes()
        return [(head, data)]

    split = SPLITS["half the layers"]
    run = SharedRun(llama, split, tampers={(-1, "helper0"): elsewhere})
    with pytest.raises(FleetError):
        run.finish()
    done, caches = run.home.verified
    run.home.close()
    run.check(run.local(caches, done).cache)


@pytest.mark.parametrize("prompt_span", [97, 40])
def test_a_span_that_leaves_nothing_out_is_no_split(prompt_span: int) -> None:
    with pytest.raises(InvalidValue, match="left out"):
        checked(Split("layers", (0, 2, 4), LAYERS, 0, 97, 32, prompt_span))


def test_a_split_of_other_tokens_is_refused(llama: Any) -> None:
    stage, layout = staged(llama)
    tokens = list(prompt(301))
    split = SPLITS["half the layers"]
    kept = kept_of(split)
    assert kept is not None
    for wrong in (None, kept[1:], [*range(301)]):
        with pytest.raises(InvalidValue):
            SharedPrefill(
                stage, layout, tokens, None, PrefillWithHelpers("a", split, 1.0), opened, kept=wrong
            )


def opened(name: str, rank: Any) -> Any:
    raise AssertionError("no stream is opened for a split that is refused")


def test_sliding_windows_decline_by_name() -> None:
    model = model_of("gemma3_text")
    told = Sharable.of(Stage.of(model), "cpu", {}).arithmetic.sparse
    assert "sliding windows" in told
    stage, layout = staged(model)
    split = SPLITS["half the layers"]
    share, tokens = PrefillWithHelpers("a", split, 1.0), list(prompt(301))
    with pytest.raises(InvalidValue, match="windows"):
        SharedPrefill(stage, layout, tokens, None, share, opened, kept=kept_of(split))


def test_layers_say_whether_their_tokens_can_be_left_out(llama: Any) -> None:
    """Those of a machine that has no others find it out for themselves."""
    whole = Stage.of(llama)
    assert Sharable.of(whole, "cpu", {}).arithmetic.sparse == ""
    inner = Stage.of(tiny("qwen3")).part(1, 3)
    assert Sharable.of(inner, "cpu", {}).arithmetic.sparse == ""
    odd = Stage.of(tiny("llama")).part(1, 2)
    for layer in odd.weights.layers:
        # As where positions are no module of a layer's: nothing can stand in its place.
        layer.self_attn.rope = layer.self_attn.rope.__call__
    assert "rotary" in Sharable.of(odd, "cpu", {}).arithmetic.sparse
