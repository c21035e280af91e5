"""The phases of a sequence: every pair of them against the table, and prompts that go through all of them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from turned_pair import TurnedPair
from turned_scheduler import family
from two_disks import TwoMachines

from fleetd import limits
from fleetd.engine.loop.phases import HELD, HOLDS, NEXT, IllegalMove, Phase
from fleetd.engine.loop.sequence import ScheduledSequence
from fleetd.engine.protocol import Cancel, PrefillAlone

pytestmark = pytest.mark.usefixtures("cpu_installed")
Paths = dict[str, list[Phase]]


def sequence_in(phase: Phase) -> ScheduledSequence:
    """One that holds what it must, and nothing else."""
    prepared: Any = SimpleNamespace(request=SimpleNamespace(id="r"))
    found = ScheduledSequence(prepared, SimpleNamespace(), 1, 1, 0.0, None)  # type: ignore[arg-type]
    found.phase = phase
    for name in HOLDS[phase][0]:
        setattr(found, name, object())
    return found


def held_by_a_move_to(phase: Phase) -> dict[str, Any]:
    return {name: object() for name in HOLDS[phase][0] - {"hit"}}


def test_every_phase_is_in_both_tables() -> None:
    assert set(NEXT) == set(HOLDS) == set(Phase)
    assert all(Phase.ENDED in after for phase, after in NEXT.items() if phase is not Phase.ENDED)
    assert not any(Phase.WAITING in after for after in NEXT.values())


@pytest.mark.parametrize(("phase", "after"), list(itertools.product(Phase, Phase)))
def test_a_phase_follows_another_if_the_table_says_so(phase: Phase, after: Phase) -> None:
    sequence = sequence_in(phase)
    sequence.validate()
    if after not in NEXT[phase]:
        with pytest.raises(IllegalMove, match=f"from {phase.name} to {after.name}"):
            sequence.move(after, **held_by_a_move_to(after))
        assert sequence.phase is phase
        sequence.validate()
        return
    if after is Phase.OFFERED:
        sequence.hit = SimpleNamespace()  # type: ignore[assignment]
    sequence.move(after, **held_by_a_move_to(after))
    assert sequence.phase is after
    sequence.validate()


@pytest.mark.parametrize(("phase", "name"), list(itertools.product(Phase, sorted(HELD))))
def test_what_belongs_to_another_phase_is_found(phase: Phase, name: str) -> None:
    sequence, (must, may) = sequence_in(phase), HOLDS[phase]
    setattr(sequence, name, None if name in must else object())
    if name in may:
        sequence.validate()
    else:
        with pytest.raises(AssertionError, match=f"while it is {phase.name}"):
            sequence.validate()


def test_a_prefill_has_taken_over_what_was_found() -> None:
    sequence: Any = sequence_in(Phase.READING)
    sequence.hit = object()
    sequence.move(Phase.READING)
    assert sequence.hit is not None
    sequence.move(Phase.READING, prefiller=object())
    assert sequence.hit is None
    sequence.hit = object()
    with pytest.raises(AssertionError, match="took over"):
        sequence.validate()


# ---- Real ones -------------------------------------------------------------------------------------------


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> Paths:
    """The phases of each prompt from now on, by its id; the same one twice counts once."""
    found: Paths = defaultdict(list)
    move: Callable[..., None] = ScheduledSequence.move

    def recorded(sequence: ScheduledSequence, phase: Phase, **held: Any) -> None:
        move(sequence, phase, **held)
        if found[sequence.id][-1:] != [phase]:
            found[sequence.id].append(phase)

    monkeypatch.setattr(ScheduledSequence, "move", recorded)
    return found


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TurnedPair]:
    for wait in ("SHARE_SETUP_S", "SHARE_GRACE_S", "TICKET_S"):
        monkeypatch.setattr(limits, wait, 600.0)  # however busy the machine is
    made = TurnedPair(family(tmp_path, "llama"), max_streams=2)
    yield made
    made.close()


def test_prompts_on_one_machine_and_with_a_helper(paths: Paths, pair: TurnedPair) -> None:
    alone = [Phase.READING, Phase.DECODING, Phase.ENDED]
    pair.ask("shared")
    pair.share("shared", "layers")
    pair.finish("shared")
    assert paths["shared"] == [Phase.OFFERED, *alone]
    pair.ask("refused", seed=6)
    pair.turn()
    pair.home.scheduler.tell(PrefillAlone("refused"))
    pair.finish("refused")
    assert paths["refused"] == [Phase.OFFERED, *alone]
    for name in ("leader", "follower", "waits"):
        pair.ask(name, seed=7, shared=False)
    pair.turn()
    sequences = [*pair.home.scheduler._prefilling, *pair.home.scheduler._waiting]
    assert [(each.id, each.phase) for each in sequences] == [
        ("leader", Phase.READING),
        ("follower", Phase.FOLLOWING),
        ("waits", Phase.WAITING),
    ]
    pair.home.scheduler.tell(Cancel("waits"))
    pair.finish("leader")
    pair.finish("follower")
    assert (paths["leader"], paths["follower"]) == (alone, [Phase.FOLLOWING, *alone])
    assert paths["waits"] == [Phase.ENDED]


@pytest.mark.usefixtures("patient", "short_prompts")
def test_a_prompt_whose_beginning_another_machine_has(paths: Paths, machines: TwoMachines) -> None:
    machines.ask()
    machines.send(machines.honest)
    machines.finish()
    found = [Phase.RESTORING, Phase.FETCHING, Phase.READING, Phase.DECODING, Phase.ENDED]
    assert paths["second"] == found


@pytest.mark.usefixtures("patient", "short_prompts")
@pytest.mark.parametrize("phase", [Phase.RESTORING, Phase.FETCHING])
def test_a_prompt_that_ends_while_its_beginning_comes(
    paths: Paths, machines: TwoMachines, phase: Phase
) -> None:
    machines.ask()
    while paths["second"][-1:] != [phase]:
        machines.here.turn()
    machines.here.scheduler.tell(Cancel("second"))
    machines.here.finish("second")
    assert paths["second"][-2:] == [phase, Phase.ENDED]
