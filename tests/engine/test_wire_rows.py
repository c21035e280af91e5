"""Keys and values that helpers send in 8 bits: what crosses, what it becomes, and what is refused."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from family_params import in_turn
from shared_runs import LAYERS, SharedRun, as_bytes, prefilled, prompt, staged
from tiny_architectures import tiny

from fleetd.engine.load.quantised_rows import quantise_rows
from fleetd.engine.sequence_state.parts import parts
from fleetd.engine.sequence_state.row_memory import RowBuffer, preallocated
from fleetd.engine.sequence_state.shapes import KvShape, PackedShape
from fleetd.engine.shared_prefill import frame_payloads, frame_schedule
from fleetd.engine.shared_prefill.kv_layout import KvLayout
from fleetd.engine.shared_prefill.row_wire import RowWire
from fleetd.engine.streams.frames import Frame, FrameHeader, Kind
from fleetd.errors import PeerWrong, ProtocolError
from fleetd.plan.prefill import step_names
from fleetd.plan.prefill.split import Split, checked

pytestmark = pytest.mark.usefixtures("cpu_installed")

SPLITS = [
    Split("layers", (0, 1, 2, 4, 4), LAYERS, 20, 101, 40),
    Split("layers", (0, 2, 4), LAYERS, 0, 101, 40),
    Split("tokens", (20, 60, 100, 140, 181), LAYERS, 20, 181, 40),
]
NUMBERS = KvShape(2, 64, 32, mx.bfloat16)
LAYOUT = KvLayout(0, ((NUMBERS,),), 64, mx.bfloat16)


def received(run: SharedRun) -> int:
    return sum(step.n_bytes for step in run.home.steps if step.name == step_names.WAITED)


@pytest.mark.parametrize(
    ("name", "split"),
    in_turn(
        ["llama", "gemma3_text", "qwen3_5", "deepseek_v32"],
        {f"{split.kind} {split.cached}": split for split in SPLITS},
    ),
)
def test_rows_come_in_fewer_bytes_and_hardly_differ(name: str, split: Split) -> None:
    model = tiny(name)
    plain = SharedRun(model, checked(split), exact=False)
    narrow = SharedRun(model, checked(split), exact=False, wire_bits=8)
    caches = [run.finish().cache for run in (plain, narrow)]
    assert received(narrow) < received(plain)
    layout = staged(model)[1]
    for layer, (one, other) in enumerate(zip(*caches, strict=True)):
        for shape, a, b in zip(layout.parts(layer), parts(one), parts(other), strict=True):
            assert type(a) is type(b)
            if isinstance(shape, KvShape) and shape.in_rows:
                assert a.offset == b.offset == split.tokens
                for x, y in zip(a.keys_and_values(), b.keys_and_values(), strict=True):
                    assert x.dtype == y.dtype
                    if x.size:
                        apart, length = (mx.linalg.norm(z.reshape(-1)).item() for z in (x - y, x))
                        # An index that chooses tokens may choose others.
                        assert apart <= (0.1 if name == "deepseek_v32" else 0.02) * length
    # Rounded rows were among them, so the label is not wrong either way.
    assert narrow.decoded(caches[1]) != plain.decoded(caches[0])


def test_what_home_computed_itself_is_not_rounded() -> None:
    model, split = tiny("llama"), checked(Split("layers", (0, 2, 4), LAYERS, 0, 101, 40))
    run = SharedRun(model, split, exact=False, wire_bits=8)
    alone = prefilled(model, run.tokens, split.chunk).cache
    cache = run.finish().cache
    keys = [[as_bytes(layer.keys_and_values()[0]) for layer in each] for each in (cache, alone)]
    same = [mine == theirs for mine, theirs in zip(*keys, strict=True)]
    # Hidden states come as they were computed.
    assert same == [False, False, True, True]


def test_a_cached_prefix_goes_to_helpers_as_it_is_held() -> None:
    model, split = tiny("llama"), checked(SPLITS[0])
    sent = []
    for bits in (0, 8):
        run = SharedRun(model, split, exact=False, wire_bits=bits)
        run.finish()
        sent.append(sum(s.n_bytes for s in run.home.steps if s.name == step_names.PREFIX_SENT))
    assert sent[0] == sent[1]


def test_rows_that_are_held_in_8_bits_go_as_they_are() -> None:
    model = tiny("llama")
    quantise_rows(model, 8)
    layout = staged(model)[1]
    assert layout.on_wire(8) == layout
    run = SharedRun(model, checked(SPLITS[0]), wire_bits=8)
    run.check(run.finish().cache)


def test_only_rows_are_sent_in_fewer_bits() -> None:
    layout = staged(tiny("qwen3_5"))[1]
    sent = layout.on_wire(8)
    for held, wire in zip(layout.layers, sent.layers, strict=True):
        for one, other in zip(held, wire, strict=True):
            assert isinstance(other, PackedShape) is (isinstance(one, KvShape) and one.in_rows)
            assert isinstance(other, PackedShape) or one == other
    assert layout.on_wire(0) == layout


@pytest.mark.parametrize("spoil", ["scale", "bias", "overflow"])
def test_a_frame_with_a_wrong_scale_is_an_error_and_writes_nothing(spoil: str) -> None:
    wire, cache = RowWire(LAYOUT, 8), preallocated(NUMBERS, 10)
    buffers = {(0, 0): RowBuffer(cache)}
    head = FrameHeader(Kind.ROWS, 0, 0, 10, wire.sent.parts(0)[0].sizes(10))
    frame = filled(wire, head)
    wire.unpack(frame, buffers)
    before = as_bytes(cache.keys)
    words = np.frombuffer(frame.buffers[0], np.uint32).reshape(10, -1)
    word = np.frombuffer(words[3, -1:], np.uint16)
    word[1 if spoil == "bias" else 0] = {"scale": 0x7FC0, "bias": 0xFF80, "overflow": 0x7F7F}[spoil]
    with pytest.raises(PeerWrong, match="layer 0"):
        wire.unpack(frame, buffers)
    assert as_bytes(cache.keys) == before
    # A scale that is none is found before it is used, too.
    assert frame_payloads.finite(frame, wire.sent) is (spoil == "overflow")


def filled(wire: RowWire, head: FrameHeader) -> Frame:
    """The frame as it arrives."""
    rows = [
        mx.random.normal((1, 2, 10, width), key=mx.random.key(1)).astype(mx.bfloat16) for width in (64, 32)
    ]
    packing, memory = wire.packing(head), wire.memory(head)
    assert packing is not None
    assert memory is not None
    payload = b"".join(bytes(piece) for piece in wire.payload(packing, *rows))
    assert len(payload) == head.nbytes == sum(each.nbytes for each in memory)
    for each in memory:
        each[:], payload = payload[: each.nbytes], payload[each.nbytes :]
    return Frame(head, memory)


@pytest.mark.parametrize(("ours", "theirs"), [(8, 0), (0, 8)])
def test_ends_that_do_not_agree_on_the_form_refuse_the_first_frame(ours: int, theirs: int) -> None:
    split, tokens = checked(SPLITS[1]), list(prompt(102))
    run = SharedRun(tiny("llama"), split, exact=False, wire_bits=ours, helper_wire_bits=theirs)
    with pytest.raises(ProtocolError, match="size"):
        run.finish()
    done, cache = run.home.verified
    assert done == 0
    alone = prefilled(run.model, tokens, split.chunk, cache, done).cache
    run.check(alone)


@pytest.mark.parametrize("kind", ["layers", "tokens"])
def test_a_liar_is_found_in_fewer_bits_too(kind: str) -> None:
    split = next(checked(split) for split in SPLITS if split.kind == kind)

    def other(head: FrameHeader, payload: bytes) -> list[tuple[FrameHeader, bytes]]:
        if head.kind is not Kind.ROWS or head.layer != 0:
            return [(head, payload)]
        shape = staged(model)[1].on_wire(8).parts(0)[head.part]
        assert isinstance(shape, PackedShape)
        # Scales stay: the numbers are others.
        words = np.frombuffer(payload, np.uint32).reshape(-1, shape.key_width).copy()
        words[:, : -shape.packing.end_words(shape.packing.key_width)] ^= 0x55555555
        return [(head, words.tobytes())]

    model = tiny("llama")
    run = SharedRun(model, split, exact=False, wire_bits=8, tampers={(0, "home"): other})
    with pytest.raises(PeerWrong):
        run.finish()


def test_sizes_of_frames_follow_from_the_form() -> None:
    layout = staged(tiny("llama"))[1]
    split = checked(SPLITS[2])
    for heads in (frame_schedule.to_home, frame_schedule.to_next):
        plain, narrow = (list(heads(split, 0, layout.on_wire(bits))) for bits in (0, 8))
        assert [(a.kind, a.layer, a.start, a.count) for a in plain] == [
            (b.kind, b.layer, b.start, b.count) for b in narrow
        ]
        rows = [(a.nbytes, b.nbytes) for a, b in zip(plain, narrow, strict=True) if a.kind is Kind.ROWS]
        assert rows
        assert all(b < a for a, b in rows)


def test_no_row_too_wide_or_odd_stops_a_share() -> None:
    """Widths that no group divides are sent as they are held."""
    odd: Any = KvShape(2, 40, 40, mx.float32)
    layout = KvLayout(0, ((odd,),), 64, mx.float32)
    assert layout.on_wire(8) == layout
