"""Drafts from hidden states after a prompt of which this machine did not compute all: restored from its disk,
fetched from another machine, or shared with helpers. They begin with what there is, and say with how much."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import speculating
from block_drafters import right_drafter
from disk_worker import BLOCK, Worker, settings_in
from hidden_drafters import VOCAB, right_head, simple, verdict_of
from turned_pair import TurnedPair
from turned_scheduler import TinyFamily
from two_disks import TwoMachines

from fleetd.control.prefill_trace import SourceCounts, Speculated
from fleetd.engine.layers.stage import Stage
from fleetd.engine.protocol import Delta, Finished, Speculate, TokenPrompt
from fleetd.engine.shared_prefill.sharable import Sharable
from fleetd.engine.speculation.block_source import WorkerBlocks
from fleetd.engine.speculation.mtp_source import WorkerHead

pytestmark = pytest.mark.usefixtures("cpu_installed", "patient", "short_prompts")
# Three blocks and a rest, in which a head has more rows than a prompt's own last chunk gives it.
PROMPT = [(7 * i + i // 64 + 3) % 200 for i in range(3 * BLOCK + 40)]
TOKENS = 60
MAKERS: dict[str, Callable[[Any], Any]] = {
    "mtp": lambda model: WorkerHead.measured(right_head(model)),
    "dflash": lambda model: WorkerBlocks.measured(right_drafter(model, "dspark")),
}


def spec(source: str) -> Any:
    model = simple("llama")
    return speculating.speculation(VOCAB, "on", verdict=verdict_of(model), head=MAKERS[source](model))


@pytest.fixture(params=MAKERS)
def source(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def plain(tokenizer: Any, tmp_path: Path) -> str:
    """The answer of a machine alone, without drafts."""
    worker = Worker(simple("llama"), tokenizer, settings_in(tmp_path / "plain"))
    worker.ask("plain", PROMPT, max_tokens=TOKENS)
    worker.stop()
    return worker.text("plain")


def check(report: Speculated | None, source: str, most: int) -> None:
    """The first pass of the answer has no draft at most; all drafts after it are right. At most ``most``
    hidden states were known, and it is told how many are usual."""
    assert report is not None
    counts: SourceCounts = report.sources[source]
    assert counts.drafted == counts.accepted > 0.7 * TOKENS
    assert report.passes - counts.passes <= 1
    assert 0 < counts.known_tokens <= most
    assert counts.wanted_tokens == 256


def test_after_a_restore_from_the_disk(tokenizer: Any, tmp_path: Path, plain: str, source: str) -> None:
    settings = settings_in(tmp_path / "own")
    first = Worker(simple("llama"), tokenizer, settings, speculation=spec(source))
    asked: dict[str, Any] = {"max_tokens": TOKENS, "speculate": Speculate(sources=[source])}
    whole = first.ask("whole", PROMPT, **asked)
    first.stop()
    assert whole.speculation is not None
    assert whole.speculation.sources[source].known_tokens == 256
    again = Worker(simple("llama"), tokenizer, settings, speculation=spec(source))
    done = again.ask("again", PROMPT, **asked)
    again.stop()
    assert done.timings.restored_tokens == 3 * BLOCK
    assert first.text("whole") == again.text("again") == plain
    # The prompt's rest, whose last token the first pass computes.
    check(done.speculation, source, len(PROMPT) - 3 * BLOCK)


def test_after_a_fetch_from_another_machine(tokenizer: Any, tmp_path: Path, plain: str, source: str) -> None:
    model = simple("llama")
    machines = TwoMachines(model, tokenizer, tmp_path, PROMPT, max_tokens=TOKENS)
    try:
        machines.here.stop()
        machines.here = Worker(model, tokenizer, settings_in(tmp_path / "here"), speculation=spec(source))
        machines.ask(speculate=Speculate(sources=[source]))
        machines.send(machines.honest)
        done, _ = machines.finish()
        assert done.timings.fetched_tokens == 3 * BLOCK
        assert machines.here.text("second") == plain
        # What came was checked, for which some of it was computed; that is in no answer.
        check(done.speculation, source, len(PROMPT) - 3 * BLOCK)
    finally:
        machines.close()


@pytest.mark.parametrize("kind", ["layers", "tokens"])
def test_after_a_shared_prefill(tokenizer: Any, plain: str, source: str, kind: str) -> None:
    model = simple("llama")
    family = TinyFamily(model, tokenizer, Sharable.of(Stage.of(model), "cpu", {}))
    pair = TurnedPair(family, speculation=spec(source))
    try:
        asked = {"prompt": TokenPrompt(PROMPT), "speculate": Speculate(sources=[source])}
        pair.ask("r", max_tokens=TOKENS, top_logprobs=0, **asked)
        pair.share("r", kind)
        events = pair.finish("r")
        assert pair.gave_up("r") == ""
    finally:
        pair.close()
    (done,) = (event for event in events if isinstance(event, Finished))
    assert "".join(event.text for event in events if isinstance(event, Delta)) == plain
    # None of the prompt: its states were computed where its rows came from.
    check(done.speculation, source, 1)
