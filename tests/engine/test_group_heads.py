"""Drafters that read hidden states, of a model over several machines: its answers stay those of the whole
model, the states are those of its layers wherever they are, and none travel that nothing asks for."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import speculating
import tiny_architectures
from block_drafters import right_drafter
from family_params import in_turn
from group_machines import Group, group_of, lazy
from hidden_drafters import LyingHead, right_head, simple, verdict_of
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import load as load_tokenizer
from speculating import GREEDY, Run, Scripted

from fleetd import limits
from fleetd.control.model_facts import StateSizes
from fleetd.engine.failures import MemberLost
from fleetd.engine.groups.group_model import GroupModel
from fleetd.engine.groups.messages import RunStage
from fleetd.engine.groups.remote_stage import RemoteStage
from fleetd.engine.groups.taps_price import TapsPrice
from fleetd.engine.heads.mtp_head import MtpHead
from fleetd.engine.layers.hidden_states import Taps, noted_states
from fleetd.engine.load import loading
from fleetd.engine.load.model_reading import ReadModel
from fleetd.engine.protocol import Cancel, Sampling, Speculate
from fleetd.engine.sequence_state.kinds import ANY
from fleetd.engine.speculation import hidden_source
from fleetd.engine.speculation.block_source import WorkerBlocks
from fleetd.engine.speculation.controller import NO_DRAFT, Controller
from fleetd.engine.speculation.drafts_price import DraftPrice
from fleetd.engine.speculation.exactness_probe import ExactnessVerdict
from fleetd.engine.speculation.mtp_source import WorkerHead
from fleetd.engine.speculation.pass_costs import Costs
from fleetd.engine.speculation.sources import Context

pytestmark = pytest.mark.usefixtures("cpu_installed")
VOCAB = tiny_architectures.VOCAB
PROMPT = [(7 * i + 3) % 64 for i in range(50)]
CUTS = [(2,), (1, 3)]
SEEDED = Sampling(temperature=0.9, top_p=0.95, seed=11)
ALONE = Speculate(sources=["mtp"])


@pytest.fixture(scope="module")
def tokenizer(chain_path: Path) -> Any:
    return load_tokenizer(chain_path)


def grouped(model: Any, head: MtpHead, *cuts: int, **changes: Any) -> tuple[Group, Any]:
    """``model`` over machines, and the speculation of the one that answers, which has ``head``."""
    group = group_of(model, *cuts)
    head.attach(group.model.front)
    worker = WorkerHead.measured(head)
    return group, speculating.speculation(VOCAB, verdict=verdict_of(model), head=worker, **changes)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[RunStage]:
    """All blocks that members are sent."""
    found: list[RunStage] = []
    send = RemoteStage._send

    def noted(stage: RemoteStage, command: RunStage, hidden: mx.array | None) -> None:
        found.append(command)
        send(stage, command, hidden)

    monkeypatch.setattr(RemoteStage, "_send", noted)
    return found


@functools.cache
def plain(name: str, tokenizer: Any, *, seeded: bool) -> Run:
    """Answers of the whole model without drafts."""
    run = Run(simple(name), tokenizer)
    run.submit("r", PROMPT, sampling=SEEDED if seeded else GREEDY, max_tokens=30, top_logprobs=2)
    run.finish()
    return run


@pytest.mark.parametrize(
    ("name", "case"),
    in_turn(
        ["llama", "qwen3_5", "glm4_moe", "nemotron_3"],
        [(cuts, ahead) for ahead in (False, True) for cuts in CUTS],
    ),
)
def test_a_right_head_is_always_right_on_the_machine_that_answers(
    name: str, case: tuple[tuple[int, ...], bool], tokenizer: Any
) -> None:
    cuts, ahead = case
    model = simple(name)
    group, spec = grouped(model, right_head(model), *cuts, ahead=ahead)
    run = Run(group.model, tokenizer, spec)
    run.submit("r", PROMPT, max_tokens=30, top_logprobs=2, speculate=ALONE)
    run.finish()
    assert run.said("r") == plain(name, tokenizer, seeded=False).said("r")
    report = run.finished("r").speculation
    assert report is not None
    assert report.sources["mtp"].drafted == report.accepted > 20
    # All rows of the prompt but that of its last token, which the first block computes.
    assert report.sources["mtp"].known_tokens == len(PROMPT) - 1


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
@pytest.mark.parametrize(("kind", "seeded"), in_turn([MtpHead, LyingHead], [False, True]))
def test_a_wrong_head_changes_no_byte(name: str, kind: Any, tokenizer: Any, *, seeded: bool) -> None:
    model = simple(name)
    head = MtpHead(model) if kind is MtpHead else right_head(model)
    head.__class__ = kind
    group, spec = grouped(model, head, 1)
    run = Run(lazy(group, 3).model, tokenizer, spec)
    sampling = SEEDED if seeded else GREEDY
    run.submit("gone", PROMPT, sampling=sampling, max_tokens=30)
    for _ in range(4):
        run.turn()
    run.scheduler.inbox.put(Cancel("gone"))
    run.submit("r", PROMPT, sampling=sampling, max_tokens=30, top_logprobs=2, speculate=ALONE)
    run.finish()
    assert run.said("r")[:-1] == plain(name, tokenizer, seeded=seeded).said("r")[:-1]
    report = run.finished("r").speculation
    assert report is not None
    assert report.sources["mtp"].drafted > report.accepted


def test_a_head_that_lies_is_switched_off(tokenizer: Any) -> None:
    model = simple("llama")
    head = right_head(model)
    head.__class__ = LyingHead
    group, spec = grouped(model, head, 2)
    run = Run(group.model, tokenizer, spec)
    for i in range(4):
        run.submit(f"r{i}", PROMPT, max_tokens=30, speculate=ALONE)
        run.finish()
    assert spec.head.judged >= hidden_source.JUDGED
    assert run.scheduler._figures().draft_head.startswith("off: 0 of its ")


def test_several_answers_over_machines_each_have_their_head(tokenizer: Any) -> None:
    model = simple("llama")
    group, spec = grouped(model, right_head(model), 1, 3)
    prompts = {f"r{n}": [(7 * i + 5 * n + 3) % 64 for i in range(40 + 9 * n)] for n in range(3)}
    alone = Run(model, tokenizer)
    for name, prompt in prompts.items():
        alone.submit(name, prompt, max_tokens=24)
        alone.finish()
    run = Run(group.model, tokenizer, spec)
    for name, prompt in prompts.items():
        run.submit(name, prompt, max_tokens=24, speculate=ALONE)
        for _ in range(3):
            run.turn()
    run.finish()
    for name in prompts:
        assert run.said(name) == alone.said(name)


class Reader(Scripted):
    """Keeps the rows that it is given, by layer and token; a row that comes again must be the same."""

    def __init__(self, layers: tuple[int, ...], guess: Any) -> None:
        super().__init__(guess, hidden_layers=layers)
        self.rows: dict[tuple[int, int], bytes] = {}

    def propose(self, context: Context) -> list[int]:
        if (hidden := context.hidden) is not None:
            for layer, states in hidden.states.items():
                for i, row in enumerate(states):
                    here = bytes(memoryview(row))
                    assert self.rows.setdefault((layer, hidden.start + i), here) == here
        return super().propose(context)


def rows_of(model: Any, tokens: Sequence[int], layers: Sequence[int]) -> dict[tuple[int, int], bytes]:
    """The rows of a whole text, a token per pass."""
    cache, found = make_prompt_cache(model), {}
    for at, token in enumerate(tokens):
        with noted_states(model, layers) as states:
            mx.eval(model(mx.array([[token]]), cache=cache))
        found.update({(layer, at): bytes(memoryview(noted[0][0, 0])) for layer, noted in states.items()})
    return found


@pytest.mark.parametrize(
    ("name", "case"),
    in_turn(["llama", "qwen3_5"], [(cuts, right) for right in (0, 2, 16) for cuts in CUTS]),
)
def test_states_of_layers_anywhere_are_those_of_the_whole_model(
    name: str, case: tuple[tuple[int, ...], int], tokenizer: Any
) -> None:
    """Of this machine's layers, a member's first and last, and the last of all; some drafts are wrong."""
    cuts, right = case
    model = tiny_architectures.tiny(name)
    layers = (0, 1, 2, len(model.layers) - 1)
    whole = Run(model, tokenizer)
    whole.submit("r", PROMPT, max_tokens=24)
    whole.finish()
    text = whole.tokens["r"]
    group = group_of(model, *cuts)

    def guess(tokens: Sequence[int], width: int) -> list[int]:
        rest = list(text[len(tokens) : len(tokens) + width])
        return rest[:right] + [(token + 1) % VOCAB for token in rest[right:]]

    source = Reader(layers, guess)
    run = Run(group.model, tokenizer, speculating.speculation(VOCAB, ahead=False))
    run.submit("r", PROMPT, source, max_tokens=24)
    run.finish()
    assert run.said("r") == whole.said("r")
    truth = rows_of(model, text, layers)
    assert all(truth[key] == row for key, row in source.rows.items())
    assert {at for _, at in source.rows} >= set(range(len(PROMPT) - 1, len(PROMPT) + 15))
    assert {layer for layer, _ in source.rows} == set(layers)


def test_of_a_prompt_the_last_rows_travel_and_no_others(
    tokenizer: Any, told: list[RunStage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SPEC_HIDDEN_ROWS", 20)
    model = simple("llama")
    group, spec = grouped(model, right_head(model), 1, 3)
    run = Run(group.model, tokenizer, spec)
    long = [(5 * i + 1) % 64 for i in range(150)]
    run.submit("r", long, max_tokens=8, speculate=ALONE)
    run.finish()
    # 149 tokens in chunks of 64: the last 20 are of the last chunk, and the last machine's.
    asked = [(block.tokens, block.taps, block.tap_rows) for block in told if block.taps]
    assert asked == [(21, [3], 20)]
    # What comes out of the last layer is there for the answer's own sake.
    assert all(not block.taps for block in told if block.wanted)
    report = run.finished("r").speculation
    assert report is not None
    assert report.sources["mtp"].known_tokens == 20
    assert report.sources["mtp"].drafted == report.accepted > 0


def test_nothing_more_travels_where_no_source_asks(tokenizer: Any, told: list[RunStage]) -> None:
    model = simple("llama")
    group = group_of(model, 1, 3)
    run = Run(group.model, tokenizer, speculating.speculation(VOCAB))
    run.submit("r", PROMPT, max_tokens=12)
    run.finish()
    assert told
    assert not any(block.taps or block.tap_rows for block in told)


@pytest.mark.parametrize("taps", [(5,), (1 << 20,)])
def test_layers_that_a_member_does_not_have_are_refused(taps: tuple[int, ...]) -> None:
    group = group_of(simple("llama"), 2)
    (member,) = group.model.members.stages
    assert isinstance(member, RemoteStage)
    member.last = 1 << 30
    flight = group.model.begin(mx.array([PROMPT[:8]]), group.model.make_cache(), taps=Taps(taps))
    with pytest.raises(MemberLost, match="Hidden states were asked for of a layer that is not here"):
        flight.logits()


# ---- drafters that read several layers -------------------------------------------------------------------

BLOCKS = Speculate(sources=["dflash"])


def with_blocks(kind: str, taps_s: float, *cuts: int, mode: Any = "auto") -> tuple[Group, Any]:
    """A model over machines, and the speculation with a right drafter of layers 0 and 2."""
    model = simple("llama")
    group, drafter = group_of(model, *cuts), right_drafter(model, kind)
    drafter.attach(group.model.front)
    worker = WorkerBlocks.measured(drafter)
    worker.price, worker.taps_s = DraftPrice(1e-6, 1e-6), taps_s
    # A step of a second, of which what a test machine takes is no part worth naming.
    verdict = ExactnessVerdict(8, ANY, "exact: for the test", {1: 1.0, 8: 1.1})
    return group, speculating.speculation(VOCAB, mode, verdict=verdict, head=worker)


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
@pytest.mark.parametrize("cuts", CUTS)
def test_a_block_drafter_has_states_of_layers_on_other_machines(
    kind: str, cuts: tuple[int, ...], tokenizer: Any, told: list[RunStage]
) -> None:
    group, spec = with_blocks(kind, 0.0, *cuts, mode="on")
    run = Run(group.model, tokenizer, spec)
    run.submit("r", PROMPT, max_tokens=30, top_logprobs=2, speculate=BLOCKS)
    run.finish()
    assert run.said("r") == plain("llama", tokenizer, seeded=False).said("r")
    report = run.finished("r").speculation
    assert report is not None
    assert report.sources["dflash"].drafted == report.accepted > 20
    assert report.sources["dflash"].known_tokens == len(PROMPT) - 1
    # Layer 0 is on the machine that answers, and with one cut layer 2 is the first of the other's.
    assert {tuple(block.taps) for block in told} <= {(), (2,)}
    assert any(block.taps for block in told)


@pytest.mark.parametrize(("taps_s", "asked"), [(0.01, True), (5.0, False)])
def test_states_travel_if_drafts_from_them_are_expected_to_pay(
    taps_s: float, tokenizer: Any, told: list[RunStage], *, asked: bool
) -> None:
    """Beside steps of a second."""
    group, spec = with_blocks("dspark", taps_s, 1)
    run = Run(group.model, tokenizer, spec)
    run.submit("r", PROMPT, max_tokens=30, top_logprobs=2, speculate=BLOCKS)
    run.finish()
    assert run.said("r") == plain("llama", tokenizer, seeded=False).said("r")
    blocks = [block for block in told if block.wanted]
    assert any(block.taps for block in blocks) is asked
    report = run.finished("r").speculation
    assert (report is not None and report.accepted > 0) is asked


def test_what_states_take_on_their_way_counts_as_lost() -> None:
    controller = Controller(Costs({1: 1.0, 8: 1.1}), 7)
    before = controller.saved_s
    controller.drafted("dflash", 0.2)
    controller.verified(NO_DRAFT, [5], 1.2)
    assert controller.saved_s == pytest.approx(before - 0.2)
    assert controller.costs.step_s == pytest.approx(1.0)


@pytest.mark.parametrize(("way_s", "off"), [(0.001, False), (0.5, True)])
def test_a_load_measures_what_states_take_and_says_if_that_is_too_much(
    way_s: float, monkeypatch: pytest.MonkeyPatch, *, off: bool
) -> None:
    """Beside passes of a tenth of a second."""
    model = simple("llama")
    group, drafter = group_of(model, 1), right_drafter(model, "dspark")
    now = [0.0]
    begin = GroupModel.begin

    def timed(own: GroupModel, *args: Any, **more: Any) -> Any:
        now[0] += 0.1 + way_s * bool(more["taps"].layers)
        return begin(own, *args, **more)

    monkeypatch.setattr(GroupModel, "begin", timed)
    price = TapsPrice.measured(group.model, (0, 2), lambda: now[0])
    assert (price.far, price.nbytes) == (1, group.model.width * group.model.dtype.size)
    assert (price.seconds, price.pass_s) == (pytest.approx(way_s), pytest.approx(0.1))
    monkeypatch.setattr(TapsPrice, "measured", lambda model, layers: price)
    drafts = WorkerBlocks(DraftPrice(1e-3, 1e-4), drafter)
    monkeypatch.setattr(WorkerBlocks, "measured", lambda drafter: drafts)
    verdict = ExactnessVerdict(8, ANY, "exact: for the test", {1: 0.1, 8: 0.11})
    read = ReadModel(group.model, None, {}, "cpu", "", StateSizes(), VOCAB, 2048, drafter)
    found, text = loading._head(read, verdict)
    assert (found is None) is off
    if off:
        assert text.startswith("off: hidden states of 1 layers on other machines")
        assert "500.0 ms of a pass of 100.0 ms" in text
    else:
        assert found is not None
        assert found.taps_s == pytest.approx(way_s)
        assert text.endswith("ms a pass on the way")
    assert loading._head(read, verdict, always=True)[0] is not None


@pytest.mark.parametrize("layers", [(0,), (0, 3), (3,)])
def test_states_that_are_here_anyway_cost_nothing(layers: tuple[int, ...]) -> None:
    group = group_of(simple("llama"), 1)
    assert TapsPrice.measured(group.model, layers) == TapsPrice()
