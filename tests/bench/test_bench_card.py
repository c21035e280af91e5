"""Figures of an accelerator: what a proof's lines become, and what several answers at once come to."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from bench.families import FAMILIES, needs_default_model
from bench.figures import Figure, NotMeasured
from bench.harness import card_models
from bench.harness.card_parts import MeasuredParts
from bench.harness.client import Heard
from bench.scenarios import card_batch
from bench.scenarios.card_models import STEPS, VERDICTS, Verdict, figures
from fleetd.control.hardware_proof import (
    ChunkProof,
    MachineProof,
    ModelProof,
    ProofStep,
    SharedProof,
    SpeedProof,
    WidthProof,
)
from fleetd.control.model_facts import MeasuredSpeed, ModelShape
from fleetd.proof.__main__ import BUDGETS_S

EXACT = "exact: blocks of up to 16 tokens, contexts of up to 1020"
# Three billion weights of two bytes.
WEIGHTS_BYTES = 6_000_000_000


@pytest.fixture(autouse=True)
def whole_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BENCH_CARD_SHAPES", raising=False)


def line(name: str, error: str = "", skipped: str = "", **found: Any) -> str:
    step = ProofStep(name, 1.0, error, skipped)
    return msgspec.json.encode({"step": step, "found": found}).decode()


def loaded(said: str = EXACT, device: str = "cuda") -> str:
    model = ModelProof(ModelShape(weights_bytes=WEIGHTS_BYTES), MeasuredSpeed(9000, 90), said, 7.0)
    return line("load", model=model, machine=MachineProof(accelerator="a card", device=device))


def taken(*lines: str, name: str = "dense-4b-bf16", parts: MeasuredParts | None = None) -> dict[str, Figure]:
    steps = [*BUDGETS_S]
    found = figures(name, lines, steps, parts or MeasuredParts())
    return {figure.title.removeprefix(f"{name}: "): figure for figure in found}


@pytest.mark.parametrize(
    ("said", "kind", "width"),
    [
        (EXACT, "exact", 16),
        ("exact: blocks of up to 3 tokens; blocks of 4 tokens give other logits", "exact", 3),
        (f"{EXACT}; single tokens are computed as 2 rows, 1.02 times as long as one", "canonical width", 16),
        ("declined: blocks of 2 tokens give other logits at 250 tokens of context", "declined", 1),
    ],
)
def test_a_verdict_has_a_kind_and_a_width(said: str, kind: str, width: int) -> None:
    verdict = Verdict.of(said)
    assert (verdict.kind, verdict.width) == (kind, width)
    told = taken(loaded(said))["tokens of the widest pass with the bytes of single steps"]
    assert told.values == [width]
    assert told.note == f"{kind}: {said.partition(': ')[2]}"


@pytest.mark.parametrize("said", ["", "exact", "exact: to be measured", "off"])
def test_a_verdict_in_other_words_is_no_figure(said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}$"):
        Verdict.of(said)


def test_each_speed_is_a_ratio_beside_the_share_of_the_card() -> None:
    speeds = [SpeedProof("prefill", 4096, 3, 50_000.0, 40_000.0), SpeedProof("greedy", 64, 3, 250.0, 200.0)]
    found = taken(loaded(), line("decode", speeds=speeds), line("chunks", chunks=[ChunkProof(512, 50_000.0)]))
    decode = found["decode, greedy, fleetd over mlx-lm in one process"]
    assert decode.values == [1.25]
    # 250 tokens of 6 GB are half of 3 TB.
    assert decode.note == "250.0 against 200.0 tok/s; 64 tokens; 3 runs by turns; 50% of 3.0 TB/s"
    # The table of logits is not multiplied with: 2.6 of 3 billion weights, twice, 50,000 times a second.
    assert found["prefill, fleetd over mlx-lm in one process"].note.endswith("33% of 790 TFLOP/s")
    assert found["prefill in chunks of 512 tokens"].note == "33% of 790 TFLOP/s"


@pytest.mark.parametrize("device", ["cpu", "metal"])
def test_on_another_device_no_share_of_the_card_is_told(device: str) -> None:
    found = taken(loaded(device=device), line("chunks", chunks=[ChunkProof(512, 50.0)]))
    assert found["prefill in chunks of 512 tokens"].note == ""


def test_widths_of_other_bytes_are_named_with_their_context() -> None:
    widths = [
        WidthProof(250, 2, True, 0.004, rows=2),
        WidthProof(250, 4, True, 0.009),
        WidthProof(1020, 2, True, 0.003, rows=2),
        WidthProof(1020, 4, False, 0.005),
    ]
    found = taken(loaded(), line("widths", widths=widths))
    share = found["widths of a pass that have the bytes of single steps"]
    assert share.values == [0.75]
    assert share.note == ("contexts of 250, 1,020; 4 tried; other bytes: 4 at 1,020; single tokens as 2 rows")
    assert found["a pass of 2 tokens"].values == [3.0]
    assert "a pass of 8 tokens" not in found


def test_a_shared_prefill_that_could_not_be_compared_gives_no_row() -> None:
    shared = [SharedProof("layers", 512, True), SharedProof("tokens", 512, None)]
    found = taken(loaded(), line("shared", shared=shared))
    assert found["shared prefill by layers with the bytes of a local one"].values == [1.0]
    assert not any("by tokens" in title for title in found)
    other = taken(loaded(), line("shared", shared=[SharedProof("tokens", 512, False)]))
    assert other["shared prefill by tokens with the bytes of a local one"].values == [0.0]


def test_a_step_that_failed_or_was_skipped_gives_no_row_and_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert taken('{"began": "load"}', line("load", error="MemoryError")) == {}
    begun = len(taken(loaded()))
    lines = [loaded(), line("shared", error="RuntimeError"), line("widths", skipped="not available")]
    parts = MeasuredParts()
    assert len(taken(*lines, line("chunks", chunks=[]), '{"began": "decode"}', parts=parts)) == begun
    told = capsys.readouterr().err
    assert "load: MemoryError" in told
    with pytest.raises(NotMeasured) as missed:
        list(parts.of(()))
    assert str(missed.value).split("; ") == [
        "dense-4b-bf16, shared: RuntimeError",
        "dense-4b-bf16, widths: not available",
        "dense-4b-bf16, chunks: it gave no figure",
        "dense-4b-bf16, prefill: the process ended before it did",
        "dense-4b-bf16, decode: the process ended before it did",
    ]


def test_a_mixture_reads_the_experts_that_it_asks_only() -> None:
    weights = 17_000_000_000
    some = card_models.Reading.of("moe-30b-a3b-4bit", weights, "cuda")
    # Of 30 billion weights about three are used for a token, of four bits and a half.
    assert 2.5e9 < some.bytes / (4.5 / 8) < 3.5e9
    assert some.products < some.bytes / (4.5 / 8)


def test_the_steps_are_those_of_a_proof_and_the_models_can_be_made() -> None:
    for name, steps in (STEPS | VERDICTS).items():
        assert steps.keys() <= BUDGETS_S.keys()
        assert card_models.shape(name)


def test_answers_at_once_are_counted_from_the_first_token_of_any_to_the_last() -> None:
    early = Heard(10.0, 0.0, text_s=[1.0, 2.0], usage={"completion_tokens": 11})
    late = Heard(11.0, 0.0, text_s=[1.0, 4.0], usage={"completion_tokens": 31})
    assert card_batch.rate([early, late]) == 40 / 4.0
    assert early.rate == 10.0


@pytest.mark.parametrize(("pieces", "told"), [(1, False), (2, False), (8, True), (30, True)])
def test_an_answer_whose_text_came_at_once_has_no_rate(pieces: int, told: bool) -> None:
    heard = Heard(0.0, 0.0, text_s=[float(n) for n in range(pieces)], usage={"completion_tokens": 32})
    if told:
        assert card_batch.timed(heard) is heard
    else:
        with pytest.raises(NotMeasured, match=f"32 tokens came as {pieces} pieces"):
            card_batch.timed(heard)


def test_families_that_make_their_models_ask_no_network() -> None:
    without = {name for name in FAMILIES if not needs_default_model(name)}
    assert without >= {"demo", "host-time", "card-models", "card-verdicts", "card-batch"}
    assert needs_default_model("decode")
