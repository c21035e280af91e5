"""The demo's main act: one long prompt, read by two machines together and by one alone.

Two machines are two processes here. Each gets a core of its own where the system allows that, so that the
second one brings what a second machine would bring; where both compute on one GPU nothing can be gained.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daemons import ANSWER_S, MODEL, PAIR_S, REPO, Machine, command_line, fail, fleetctl, say

# Texts that are not rewritten: some 4,200 tokens together.
DECISIONS = (
    "0004-exact-cpu-arithmetic.md",
    "0006-membership-by-signed-records.md",
    "0007-two-transports.md",
    "0008-where-a-request-runs.md",
)
TEXTS = (*(REPO / "docs" / "decisions" / name for name in DECISIONS), REPO / "LICENSE")
# No prompt before it has a beginning in common with it.
OPENING = "Here are four decisions about a program, and its license."
QUESTION = "What is the name of this license?"
MAX_TOKENS = 40


@dataclass(frozen=True)
class Answered:
    """An answer, how long its first token took and how it was planned."""

    content: str
    first_token_s: float
    tokens: int
    cached: int
    plan: str
    exactness: str
    request: str

    @property
    def machines(self) -> list[str]:
        """Those that took part, where they were others than the one that was asked."""
        return [name for name in self.plan.partition("; nodes=")[2].split(",") if name not in ("", "this")]

    @property
    def kind(self) -> str:
        return self.plan.partition(";")[0]

    @property
    def shared(self) -> bool:
        return len(self.machines) > (self.kind == "remote")


def shared_and_alone(one: Machine, other: Machine) -> None:
    """Ask one with a prompt that no machine has read, then the other alone. Fails if exact answers differ."""
    wait_loaded(one, other)
    wait_loaded(other, one)
    prompt = compose()
    say("\nreading four pages of docs/decisions and LICENSE, together and alone")
    say(textwrap.indent(textwrap.fill(apart([one, other]), 96), "  "))
    say(f"\n> {QUESTION}  (about all of it, {len(prompt):,} characters)")
    together = asked(one, prompt)
    # A helper keeps nothing of a prompt; the machine that answered has all of it in its prefix cache.
    answered = other if together.kind == "remote" and together.machines[0] == other.name else one
    fresh = one if answered is other else other
    alone = asked(fresh, prompt, "--local-only")
    say(textwrap.indent(textwrap.fill(together.content, 96), "  "))
    say(f"  together   {line(together, answered)}")
    say(f"  alone      {line(alone, fresh)}")
    say(f"  {verdict(alone, together)}")
    if alone.content != together.content and together.exactness == "exact":
        fail("the answers differ, although they should be exact", one.log)
    show_trace(answered, together.request)


def compose() -> str:
    texts = [f"{path.name}:\n\n{path.read_text(encoding='utf-8')}" for path in TEXTS]
    return "\n\n".join([OPENING, *texts, QUESTION])


def asked(machine: Machine, prompt: str, *flags: str) -> Answered:
    answer = fleetctl(
        machine,
        *("chat", "--model", MODEL, "--temperature", "0", "--max-tokens", str(MAX_TOKENS), *flags),
        limit_s=ANSWER_S,
        stdin=prompt,
    )
    usage = answer["usage"]
    return Answered(
        content=answer["content"].strip(),
        first_token_s=answer["first_token_s"],
        tokens=usage["prompt_tokens"],
        cached=usage["prompt_tokens_details"]["cached_tokens"],
        plan=answer["plan"],
        exactness=answer["exactness"] or "not told",
        request=answer["request"],
    )


def line(answered: Answered, machine: Machine) -> str:
    known = f", {answered.cached:,} known already" if answered.cached else ""
    return (
        f"first token after {answered.first_token_s:.2f} s · {answered.tokens:,} tokens{known}\n"
        f"             answered by {machine.name} · {answered.plan} · exactness {answered.exactness}"
    )


def verdict(alone: Answered, together: Answered) -> str:
    """What the two show, and no more than that."""
    same = "the answers are identical" if alone.content == together.content else "the answers differ"
    ratio = alone.first_token_s / together.first_token_s
    if not together.shared:
        return f"=> nothing was shared, because no clear gain was expected; {same}"
    if ratio < 1:
        return f"=> together it took {1 / ratio:.2f} times as long: not faster here; {same}"
    return f"=> together the first token came {ratio:.2f} times as fast; {same}"


def show_trace(machine: Machine, request: str) -> None:
    say(f"\n{machine.name}$ fleetctl trace {request}")
    # Straight to the terminal, whose width it fits.
    subprocess.run(
        command_line(machine, "trace", request),
        stdin=subprocess.DEVNULL,
        env=machine.environ,
        timeout=30,
        check=False,
    )


def wait_loaded(machine: Machine, other: Machine) -> None:
    """Until ``machine`` knows that the other one has loaded the model."""
    deadline = time.monotonic() + PAIR_S
    while time.monotonic() < deadline:
        peers = fleetctl(machine, "peers", limit_s=30)["peers"]
        held = {(peer["name"], model["name"], model["state"]) for peer in peers for model in peer["models"]}
        if (other.name, MODEL, "loaded") in held:
            return
        time.sleep(0.1)
    fail(f"{machine.name} does not see that {other.name} loaded the model", machine.log)


def apart(machines: list[Machine]) -> str:
    """Give each machine's engine a core of its own; the sentence that says how far that went."""
    engines = [engine(machine) for machine in machines]
    if any(found["device"] != "cpu" for found in engines):
        return "Both machines compute on the one GPU of this computer, so sharing can gain nothing here."
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    if len(cores) < len(machines):
        return "Both machines compute on the same cores of this computer, so sharing can gain little here."
    # Neighbouring numbers may be two threads of one core.
    chosen = (cores[0], cores[-1])
    for found, core in zip(engines, chosen, strict=True):
        pin(found["pid"], core)
    return (
        f"Two machines are two processes here, on one core each: {machines[0].name} has core {chosen[0]}, "
        f"{machines[1].name} core {chosen[1]}. Neither has seen the prompt; alone is local_only."
    )


def engine(machine: Machine) -> Any:
    engines = fleetctl(machine, "status", limit_s=30)["engines"]
    return next(found for found in engines if found["model"] == MODEL and found["state"] == "ready")


def pin(pid: int, core: int) -> None:
    """All threads that it has; later ones inherit it."""
    if sys.platform == "linux":
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})
