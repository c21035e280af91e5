"""What machines tell each other before they share a prefill: what is believed, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from fleetd import limits
from fleetd.engine.protocol import Arithmetic, StepTime
from fleetd.errors import Incompatible, ProtocolError
from fleetd.p2p.link_prober import Invitation
from fleetd.plan.prefill.split import Split
from fleetd.requests.prefill_sharing import messages
from fleetd.requests.prefill_sharing.agreement import checked_split, compare

DIGEST = "d" * 64
HOME = Arithmetic(
    "cpu x86",
    "float32",
    {"mlx": "0.31", "mlx-lm": "0.31.3"},
    layers=[bytes([n]) * 8 for n in range(4)],
    chunks="any",
)
SPLIT = Split("layers", (0, 2, 4), 4, 0, 1000, 256)
INVITED = Invitation(b"t" * 32, b"k" * 32)


def test_equal_fingerprints_are_exact() -> None:
    assert compare(HOME, HOME, range(4), own_chunks=False)


def test_a_stage_is_compared_from_its_first_layer_on() -> None:
    stage = replace(HOME, first_layer=2, layers=HOME.layers[2:])
    assert compare(HOME, stage, range(2, 4), own_chunks=False)
    with pytest.raises(Incompatible, match="Layer 1") as caught:
        compare(HOME, stage, range(1, 4), own_chunks=False)
    assert caught.value.param == "layers"


def test_only_the_layers_that_the_helper_runs_count() -> None:
    other = replace(HOME, accelerator="metal", layers=[*HOME.layers[:3], b"x" * 8])
    assert compare(HOME, other, range(3), own_chunks=False)
    assert not compare(HOME, other, range(4), own_chunks=False)


@pytest.mark.parametrize("who", ["home", "helper"])
def test_chunks_that_matter_are_exact_only_where_home_would_cut(who: str) -> None:
    strict = replace(HOME, chunks="same")
    ends = (strict, HOME) if who == "home" else (HOME, strict)
    assert compare(*ends, range(4), own_chunks=True)
    assert not compare(*ends, range(4), own_chunks=False)


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("dtype", replace(HOME, dtype="bfloat16")),
        ("mlx-lm", replace(HOME, versions={"mlx": "0.31", "mlx-lm": "0.32"})),
        ("mlx-lm", replace(HOME, versions={})),
        ("states", replace(HOME, states=1)),
        ("mlx", replace(HOME, versions={"mlx": "0.30", "mlx-lm": "0.31.3"}, layers=[b"x" * 8] * 4)),
    ],
)
def test_what_differs_is_named(field: str, other: Arithmetic) -> None:
    with pytest.raises(Incompatible) as caught:
        compare(HOME, other, range(4), own_chunks=True)
    assert caught.value.param == field
    assert field in caught.value.message


def test_another_accelerator_may_have_another_mlx() -> None:
    metal = replace(
        HOME, accelerator="metal", versions={"mlx": "0.30", "mlx-lm": "0.31.3"}, layers=[b"x" * 8] * 4
    )
    assert not compare(HOME, metal, range(4), own_chunks=True)


def test_an_mlx_that_computes_the_same_is_the_same() -> None:
    assert compare(
        HOME, replace(HOME, versions={"mlx": "0.30", "mlx-lm": "0.31.3"}), range(4), own_chunks=False
    )


@pytest.mark.parametrize(
    "split",
    [
        replace(SPLIT, cuts=(0, 3, 2)),
        replace(SPLIT, cuts=(0, 0, 4)),
        replace(SPLIT, cuts=(1, 2, 4)),
        replace(SPLIT, layers=5, cuts=(0, 2, 5)),
        replace(SPLIT, tokens=2**31 - 1),
        replace(SPLIT, tokens=8192),
        replace(SPLIT, cached=1000),
        replace(SPLIT, kind="tokens", cuts=(0, 100, 1000)),
    ],
    ids=str,
)
def test_a_split_that_fits_no_model_of_ours_is_refused(split: Split) -> None:
    with pytest.raises(ProtocolError):
        checked_split(split, layers=4, context_tokens=8192, rank=0)


@pytest.mark.parametrize("rank", [-1, 1, 2])
def test_a_rank_outside_the_chain_is_refused(rank: int) -> None:
    assert checked_split(SPLIT, layers=4, context_tokens=8192, rank=0) == SPLIT
    with pytest.raises(ProtocolError, match="Rank"):
        checked_split(SPLIT, layers=4, context_tokens=8192, rank=rank)


# ---- messages --------------------------------------------------------------------------------------------

ASK = messages.AssistQuestion("m", DIGEST, SPLIT, 0, "r1", HOME)
HONEST = [
    ASK,
    messages.AssistOffer(HOME, INVITED),
    messages.AssistOffer(HOME, INVITED, INVITED),
    messages.AssistGo(),
    messages.AssistGo("node", INVITED),
    messages.AssistDone([StepTime("chunk 1", 0.5, 1000)]),
    messages.WarmModel("m", DIGEST),
]


@pytest.mark.parametrize("message", HONEST, ids=lambda message: type(message).__name__)
def test_messages_arrive_as_they_were_sent(message: Any) -> None:
    body = messages.encode(message)
    assert messages.decode(body, type(message)) == message
    with pytest.raises(ProtocolError):
        messages.decode(body[:-1], type(message))


@pytest.mark.parametrize(
    "message",
    [
        replace(ASK, model="/etc"),
        replace(ASK, model=""),
        replace(ASK, digest="D" * 64),
        replace(ASK, digest="d" * 63),
        replace(ASK, rank=limits.SHARE_MACHINES - 1),
        replace(ASK, rank=-1),
        replace(ASK, id=""),
        replace(ASK, id="x" * (limits.REQUEST_ID_CHARS + 1)),
        replace(ASK, split=replace(SPLIT, cuts=(0, 4))),
        replace(ASK, split=replace(SPLIT, cuts=(0, 1, 2, 3, 4, 4))),
        replace(ASK, split=replace(SPLIT, tokens=2**31)),
        replace(ASK, split=replace(SPLIT, chunk=0)),
        replace(ASK, arithmetic=replace(HOME, layers=[b"x" * 9])),
        replace(ASK, arithmetic=replace(HOME, layers=[b"x" * 8] * 4097)),
        replace(ASK, arithmetic=replace(HOME, first_layer=-1)),
        replace(ASK, arithmetic=replace(HOME, dtype="x" * (limits.CARD_TEXT_CHARS + 1))),
        replace(ASK, arithmetic=replace(HOME, versions={str(n): "" for n in range(17)})),
        messages.AssistOffer(replace(HOME, accelerator="x" * limits.SHARE_MESSAGE_BYTES), INVITED),
        messages.AssistOffer(HOME, Invitation(b"t" * 31, b"k" * 32)),
        messages.AssistGo("node"),
        messages.AssistGo("", INVITED),
        messages.AssistDone([StepTime("x", float("nan"))]),
        messages.AssistDone([StepTime("x", -1.0)]),
        messages.AssistDone([StepTime("x", 1.0, -1)]),
        messages.AssistDone([StepTime("x", 1.0)] * (limits.SHARE_STEPS + 1)),
        messages.WarmModel("~/m", DIGEST),
        messages.WarmModel("m", "d"),
    ],
    ids=lambda message: f"{message}"[:80],
)
def test_absurd_figures_are_refused_before_anything_is_allocated(message: Any) -> None:
    with pytest.raises(ProtocolError):
        messages.decode(messages.encode(message), type(message))


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x91" * 100_000, msgspec.msgpack.encode({"model": 1})])
def test_garbage_is_refused(body: bytes) -> None:
    for kind in (messages.AssistQuestion, messages.AssistOffer, messages.AssistDone, messages.WarmModel):
        if not (kind is messages.AssistDone and body.startswith(b"\x81")):
            with pytest.raises(ProtocolError):
                messages.decode(body, kind)
