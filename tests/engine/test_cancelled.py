"""A request that is cancelled, in each phase of its life: it ends at once, what it had taken is free, every
report can be decoded, and what goes on beside it goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sharing
from disk_worker import BLOCK
from turned_pair import TurnedPair
from turned_scheduler import TinyFamily, Turned, alone, drawn, family
from two_disks import PROMPT, WHOLE, TwoMachines, damaged, every_byte, first_then

from fleetd import limits
from fleetd.cache.pricing import PrefillCost
from fleetd.engine.layers.prefill import Prefiller
from fleetd.engine.loop.sequence import ScheduledSequence
from fleetd.engine.measure.chunk_size import FixedChunks
from fleetd.engine.prefixes.front_prefill import FrontPrefill
from fleetd.engine.prefixes.peer_fetch import FetchState
from fleetd.engine.prefixes.prefix_cache import DENSE
from fleetd.engine.protocol import Accepted, Cancel, Delta, Failed, Finished, PrefillWithHelpers

pytestmark = pytest.mark.usefixtures("cpu_installed")
QUICK = PrefillCost(token_s=1e-9)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TinyFamily:
    return family(Path(tmp_path_factory.mktemp("llama")), "llama")


@pytest.fixture
def pair(llama: TinyFamily, monkeypatch: pytest.MonkeyPatch) -> Iterator[TurnedPair]:
    for name, value in (("SHARE_STEP_S", 0.0), ("ENGINE_BEAT_S", 0.02), ("SHARE_LEFT_S", -1.0)):
        monkeypatch.setattr(limits, name, value)
    for wait in ("SHARE_SETUP_S", "SHARE_GRACE_S", "TICKET_S"):
        monkeypatch.setattr(limits, wait, 600.0)  # however busy the machine is
    made = TurnedPair(llama, max_streams=3)
    yield made
    made.close()


def turns(pair: TurnedPair, count: int) -> None:
    for _ in range(count):
        pair.turn()


def waits(pair: TurnedPair) -> None:
    pair.home.scheduler.max_streams = 0
    pair.ask("r", shared=False)
    turns(pair, 1)
    pair.home.scheduler.max_streams = 3


def undecided(pair: TurnedPair) -> None:
    pair.ask("r")
    turns(pair, 2)
    assert pair.home.of("r", Accepted)[0].waits


def decided(pair: TurnedPair) -> None:
    undecided(pair)
    (accepted,) = pair.home.of("r", Accepted)
    pair.home.scheduler.tell(PrefillWithHelpers("r", sharing.split_of("layers", accepted), 5.0))
    turns(pair, 1)


def shared(kind: str) -> Callable[[TurnedPair], None]:
    def begin(pair: TurnedPair) -> None:
        pair.ask("r")
        pair.share("r", kind)
        turns(pair, 3)

    return begin


def alone_again(pair: TurnedPair) -> None:
    shared("layers")(pair)
    pair.helper.scheduler.tell(Cancel("r helped"))
    pair.turn_until(lambda: pair.shared("r") is None)


def follows(pair: TurnedPair) -> None:
    pair.ask("leader", shared=False)
    turns(pair, 1)
    pair.ask("r", shared=False)
    turns(pair, 1)
    assert pair.home.scheduler._prefilling[1].awaited is not None


def is_prefilled(pair: TurnedPair) -> None:
    pair.ask("r", shared=False)
    turns(pair, 3)


def is_prefilled_sparsely(pair: TurnedPair) -> None:
    pair.ask("r", shared=False, kept=list(range(0, 800, 2)))
    turns(pair, 3)


def is_scored(pair: TurnedPair) -> None:
    pair.ask("r", shared=False, echo=True)
    turns(pair, 3)


def is_decoded(pair: TurnedPair) -> None:
    pair.ask("r", 100, shared=False, max_tokens=400)
    pair.turn_until(lambda: len(pair.home.of("r", Delta)) > 2)


def is_decoded_in_a_batch(pair: TurnedPair) -> None:
    pair.ask("beside", 90, 6, shared=False, max_tokens=30)
    is_decoded(pair)


PHASES: list[Callable[[TurnedPair], None]] = [
    waits,
    undecided,
    decided,
    shared("layers"),
    shared("tokens"),
    alone_again,
    follows,
    is_prefilled,
    is_prefilled_sparsely,
    is_scored,
    is_decoded,
    is_decoded_in_a_batch,
]


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__qualname__)
def test_cancelled_while_it(pair: TurnedPair, phase: Callable[[TurnedPair], None]) -> None:
    phase(pair)
    pair.home.scheduler.tell(Cancel("r"))
    pair.turn()
    (ended,) = pair.home.of("r", Finished)
    assert ended.reason == "cancelled"
    assert 0 <= ended.usage.cached_tokens <= ended.usage.prompt_tokens
    pair.ask("after", 300, 9, shared=False)
    pair.turn_until(lambda: bool(pair.home.of("after", Finished)) and not pair.home.busy)
    assert pair.home.scheduler.budget.used_bytes == 0
    assert not [event for event in pair.home.events if isinstance(event, Failed)]
    for beside in ("leader", "beside"):
        assert [each.reason for each in pair.home.of(beside, Finished)] in ([], ["length"])


def test_a_hybrids_prompt_that_is_cancelled_keeps_states_at_its_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next try may end otherwise, and goes on from the last state before that."""
    of, block = family(tmp_path, "qwen3_next"), limits.CHECKPOINT_BLOCK_TOKENS
    bench, tokens = Turned(of, chunks=FixedChunks(block, block), context_tokens=4096), drawn(7 * block)
    bench.ask("r", tokens)
    bench.turn(5)
    bench.scheduler.tell(Cancel("r"))
    bench.finish()
    (ended,) = bench.of("r", Finished)
    assert ended.reason == "cancelled"
    edited = [*tokens[: 3 * block + 9], *drawn(block, seed=2)]
    bench.ask("again", edited)
    bench.finish()
    assert bench.of("again", Finished)[0].usage.cached_tokens in (block, 2 * block, 3 * block)
    assert bench.answer("again") == alone(of, edited)


# ---- While its beginning comes from another machine ------------------------------------------------------


def sequence(machines: TwoMachines) -> ScheduledSequence:
    return machines.here.scheduler._prefilling[0]


def turned(machines: TwoMachines, until: Callable[[], object]) -> None:
    while not until():
        machines.here.turn()


def asks(machines: TwoMachines, over: threading.Event) -> None:
    machines.lacking()


def receives(machines: TwoMachines, over: threading.Event) -> None:
    machines.send(first_then(2, lambda: over.wait(60) and None, machines))

    def receiving() -> bool:
        fetching = sequence(machines).fetching
        return fetching is not None and fetching._state is FetchState.RECEIVING and fetching._blocks > 1

    turned(machines, receiving)


def computes_towards_it(machines: TwoMachines, over: threading.Event) -> None:
    machines.send(first_then(1, lambda: over.wait(60) and None, machines), last_first=True)

    def met() -> bool:
        fetching = sequence(machines).fetching
        if fetching is None or fetching.front is None or fetching.front.lowest == fetching.front._last:
            return False
        fetching.front._cost = QUICK
        return fetching.front.computed >= BLOCK // 2

    turned(machines, met)


def has_all(machines: TwoMachines, over: threading.Event, *, last_first: bool = False) -> None:
    """Its fetch has ended, and its prefill has not begun: another one has the turn."""
    machines.here.tier.cost = QUICK if last_first else machines.here.tier.cost
    machines.here.scheduler._prefill_turn = _without_prefill(machines)  # type: ignore[method-assign]
    machines.send(machines.honest, last_first=last_first)
    turned(machines, lambda: sequence(machines).hit)
    assert sequence(machines).prefiller is None


def _without_prefill(machines: TwoMachines) -> Callable[[], None]:
    """Turns that compute towards blocks alone."""

    def turn() -> None:
        fetching = sequence(machines).fetching
        if fetching is not None and fetching.computes:
            fetching.compute()

    return turn


def has_computed_its_part(machines: TwoMachines, over: threading.Event) -> None:
    has_all(machines, over, last_first=True)


@pytest.mark.usefixtures("patient", "short_prompts")
@pytest.mark.parametrize(
    ("phase", "least", "most"),
    [
        (asks, 0, 0),
        (receives, 2 * BLOCK, 2 * BLOCK),
        (computes_towards_it, BLOCK // 2, 2 * BLOCK),
        (has_all, WHOLE * BLOCK, len(PROMPT) - 1),
        (has_computed_its_part, WHOLE * BLOCK, len(PROMPT) - 1),
    ],
)
def test_cancelled_while_it_fetches(
    machines: TwoMachines, phase: Callable[[TwoMachines, threading.Event], None], least: int, most: int
) -> None:
    over, scheduler = threading.Event(), machines.here.scheduler
    machines.ask()
    phase(machines, over)
    scheduler.tell(Cancel("second"))
    ended = machines.here.finish("second")
    over.set()
    assert ended.reason == "cancelled"
    assert 0 <= ended.usage.cached_tokens <= ended.usage.prompt_tokens
    scheduler.validate()
    # What came, and what was computed towards it, is there for the next try.
    assert least <= scheduler.prefix.longest(PROMPT, DENSE) <= most


@pytest.mark.usefixtures("patient", "short_prompts")
def test_attack_what_came_wrong_is_not_kept_by_a_request_that_is_cancelled(machines: TwoMachines) -> None:
    machines.here.scheduler._prefill_turn = _without_prefill(machines)  # type: ignore[method-assign]
    machines.ask()
    machines.send(damaged(machines, every_byte))
    turned(machines, lambda: (fetching := sequence(machines).fetching) is None or fetching._blocks > 0)
    machines.here.scheduler.tell(Cancel("second"))
    machines.here.finish("second")
    assert machines.here.scheduler.prefix.longest(PROMPT, DENSE) == 0


def test_a_chunk_towards_blocks_that_have_come_meanwhile_is_none(machines: TwoMachines) -> None:
    """A block may come between the question whether a chunk pays and the chunk."""
    prefiller = Prefiller(None, PROMPT, [], 2 * BLOCK)  # a step of it would raise: it has no model
    front = FrontPrefill(prefiller, DENSE, 3, 1.0, QUICK, lambda: 128)
    assert front.pays
    front.came(2)
    assert front.step() == 0
