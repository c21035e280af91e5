"""A recorded coding session on two machines: how much of it is computed that is not new."""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

from bench.figures import Figure, Measured, at_most
from bench.harness import prompts
from bench.harness.agent_session import Session, Turn
from bench.harness.child import Child
from bench.harness.client import Heard
from bench.harness.daemon import MODEL, Daemon
from bench.harness.fleet import Fleet
from bench.harness.samples import Samples, wait_for
from fleetd.models.catalog import DEFAULT_MODEL

_MACHINES = ("desk", "laptop")
_ANSWER_TOKENS = 16
# Roles that every chat template knows; what a tool gave is told by the user.
_ROLES = {"system": "system", "user": "user", "assistant": "assistant", "tool": "user"}
_KNOWN_WITHIN_S = 120.0
#: One run is a look.
FULL, QUICK = Session(), Session(system_tokens=2_000, turns=8, restart_at=2, moves_at=4, compacts_at=6)


def measure(runs: int) -> Measured:
    seen, session = Samples(), FULL if runs > 1 else QUICK
    with tempfile.TemporaryDirectory(prefix="fleetd-bench-") as folder:
        with Child("long_model", str(Path(folder) / DEFAULT_MODEL), str(MODEL)) as child:
            child.ask()
        for run in range(runs):
            _replay(session, run, Path(folder), seen)
    return Measured(_figures(seen, session), _HOW)


def _replay(session: Session, run: int, models: Path, seen: Samples) -> None:
    new = computed = restored = fetched = there = 0
    prefix, prompt_tokens, first_s = tuple[Any, ...](), 0, 0.0
    with Fleet(_MACHINES, models=dict.fromkeys(_MACHINES, models)) as fleet:
        # Alone, or the planner may send the session to the other one from the beginning.
        fleet.start(_MACHINES[0]).warm()
        machine = 0
        for turn in session:
            if turn.restarted:
                _restart(fleet)
            if turn.machine != machine:
                machine = turn.machine
                _move(fleet)
            heard, plan = _ask(fleet[_MACHINES[machine]], turn, run)
            counted = int(heard.usage["prompt_tokens"])
            grown = turn.pieces[: len(prefix)] == prefix
            # A turn begins with the whole prompt before it; after the compaction, with the system prompt.
            new += counted - (prompt_tokens if grown else _known(turn, prefix))
            computed += counted - heard.cached
            restored += int(heard.timings.get("restored_n", 0))
            fetched += int(heard.timings.get("fetched_n", 0))
            there += plan.startswith("remote")
            first_s = first_s or heard.began_s
            seen[turn.machine, "ttft"].append(heard.began_s)
            prefix, prompt_tokens = turn.pieces, counted
    seen.add(ratio=computed / new, new=new, computed=computed, cold_s=first_s)
    seen.add(restored=restored, fetched=fetched, there=there)


def _known(turn: Turn, before: tuple[Any, ...]) -> int:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(turn.pieces, before, strict=False))
    return sum(mine.tokens for mine, _ in pairs)


def _restart(fleet: Fleet) -> None:
    fleet[_MACHINES[0]].close()
    fleet.start(_MACHINES[0])


def _move(fleet: Fleet) -> None:
    """The first machine's model is unloaded, what it has read lies on its disk; the second one loads it."""
    fleet.start(_MACHINES[1])
    fleet.until_usable(*_MACHINES)
    first, second = (fleet[name] for name in _MACHINES)
    before = _written(first)
    first.control("POST", "/fleet/v1/models/unload", {"model": DEFAULT_MODEL})
    wait_for(lambda: _written(first) >= before, _KNOWN_WITHIN_S, 0.1, first.log)
    second.warm()

    def alike() -> bool:
        found = [m for m in fleet.peer(_MACHINES[1], _MACHINES[0])["models"] if m["name"] == DEFAULT_MODEL]
        return bool(found) and found[0]["state"] == "installed" and bool(found[0]["digest"])

    wait_for(alike, _KNOWN_WITHIN_S, 0.1, second.log)


def _written(daemon: Daemon) -> int:
    return sum(
        model["block_tokens"] for model in json.loads(daemon.control("GET", "/fleet/v1/cache"))["models"]
    )


def _ask(daemon: Daemon, turn: Turn, run: int) -> tuple[Heard, str]:
    messages = [
        {"role": _ROLES[piece.role], "content": prompts.text(MODEL, 10_000 * run + piece.seed, piece.tokens)}
        for piece in turn.pieces
    ]
    with daemon.stream("chat/completions", messages=messages, max_tokens=_ANSWER_TOKENS) as stream:
        return stream.hear(), stream.plan


def _figures(seen: Samples, session: Session) -> list[Figure]:
    note = (
        f"{seen['computed'][0]:,.0f} of {seen['new'][0]:,.0f}; {seen['restored'][0]:,.0f} tokens came from "
        f"the disk and {seen['fetched'][0]:,.0f} from the other machine, which answered "
        f"{seen['there'][0]:.0f} turns"
    )
    return [
        Figure("Tokens computed, per new token of the session", "x", seen["ratio"], at_most(1.1), note=note),
        Figure(f"TTFT of the first turn, {session.system_tokens:,} tokens and more", "s", seen["cold_s"]),
        Figure("TTFT of a turn on the first machine", "s", seen[0, "ttft"]),
        Figure("TTFT of a turn on the second machine", "s", seen[1, "ttft"]),
    ]


_HOW = (
    "A scripted session of an agent over chat completions, with a model of twelve layers and random "
    "weights that takes 32,768 tokens: a system prompt and tools of 10,000 tokens, 20 turns, each with "
    "all earlier ones in front and with the recorded answer and a tool's result of up to 1,200 tokens "
    "behind. The machine is restarted before the sixth turn; from the eleventh on the session is asked at "
    "another machine, which is started then, while the first one, its model unloaded, only keeps its disk; "
    "before the fifteenth the conversation is compacted to a summary. New are the tokens of a prompt that no "
    "earlier prompt began with. Answers of 16 tokens."
)
