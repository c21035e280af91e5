"""An answer that is held to a form is the same whatever was done to its prompt: read here, shared with
helpers, kept from before, or read in part."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from turned_pair import TurnedPair
from turned_scheduler import TinyFamily, family

from fleetd import limits
from fleetd.engine.protocol import Delta, Finished
from fleetd.engine.sampling.constraint import Constraint
from fleetd.engine.sampling.parameters import Sampling

pytestmark = pytest.mark.usefixtures("cpu_installed")
FORM = r"[a-z]{3} [0-9]{5,9}(, (yes|no))?"
TOKENS = 300
# The first is alone there, the others join it in the batch.
SAMPLINGS = {
    "greedy": Sampling(temperature=0),
    "drawn": Sampling(temperature=1, seed=4),
    "hot": Sampling(temperature=2, seed=5),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TinyFamily:
    return family(Path(tmp_path_factory.mktemp("llama")), "llama")


@pytest.fixture
def pair(llama: TinyFamily, monkeypatch: pytest.MonkeyPatch) -> Iterator[TurnedPair]:
    monkeypatch.setattr(limits, "SHARE_STEP_S", 0.0)  # a step is one chunk
    for wait in ("SHARE_SETUP_S", "SHARE_GRACE_S", "TICKET_S"):
        monkeypatch.setattr(limits, wait, 600.0)  # however busy the machine is
    made = TurnedPair(llama)
    yield made
    made.close()


def ask(pair: TurnedPair, name: str, sampling: Sampling, **fields: Any) -> None:
    held = {"constraint": Constraint("regex", FORM, "guided_regex"), "max_tokens": 40, "top_logprobs": 1}
    pair.ask(name, TOKENS, sampling=sampling, **held, **fields)


def answer(pair: TurnedPair, name: str) -> list[Any]:
    (finished,) = pair.home.of(name, Finished)
    assert finished.reason == "stop"
    assert re.fullmatch(FORM, pair.home.text(name))
    return [(event.text, event.logprobs) for event in pair.home.of(name, Delta)]


@pytest.fixture(params=SAMPLINGS)
def sampling(request: pytest.FixtureRequest) -> Sampling:
    return SAMPLINGS[request.param]


@pytest.fixture
def alone(llama: TinyFamily, sampling: Sampling) -> list[Any]:
    own = TurnedPair(llama)
    ask(own, "alone", sampling, shared=False)
    own.finish("alone")
    found = answer(own, "alone")
    own.close()
    return found


@pytest.mark.parametrize("kind", ["layers", "tokens"])
def test_shared_with_a_helper(pair: TurnedPair, alone: list[Any], sampling: Sampling, kind: str) -> None:
    ask(pair, "r", sampling, shared=True)
    pair.share("r", kind)
    pair.finish("r")
    assert pair.gave_up("r") == ""
    assert answer(pair, "r") == alone


def test_kept_from_before_and_beside_others(pair: TurnedPair, alone: list[Any], sampling: Sampling) -> None:
    ask(pair, "first", sampling, shared=False)
    pair.finish("first")
    for name, other in SAMPLINGS.items():
        ask(pair, name, other, shared=False)
    ask(pair, "again", sampling, shared=False)
    pair.finish("again")
    assert pair.home.of("again", Finished)[0].usage.cached_tokens == TOKENS - 1
    for name in ("first", "again"):
        assert answer(pair, name) == alone


def test_read_in_part(pair: TurnedPair, sampling: Sampling) -> None:
    """Twice the same, alone and beside a dense prompt: the tokens that are left out decide with the rest."""
    kept = [*range(0, TOKENS, 3), TOKENS - 1]
    ask(pair, "one", sampling, shared=False, kept=kept)
    pair.finish("one")
    ask(pair, "dense", sampling, shared=False)
    ask(pair, "two", sampling, shared=False, kept=kept)
    pair.finish("two")
    assert answer(pair, "one") == answer(pair, "two")
    assert answer(pair, "dense")
