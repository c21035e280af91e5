"""The demo's last act: a model that two machines hold together, because neither has the memory for it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from daemons import ANSWER_S, MODEL, Machine, daemon, fail, fleetctl, pair, say, wait_usable
from together import engine

from fleetctl.render.text import layers
from fleetd.models.memory_need import WORKING_BYTES

QUESTION = "Write a story about a fox, in three sentences."
MAX_TOKENS = 60
# Of the model's weights; so much each machine may hold, besides what any load works with.
ROOM = 0.88


def held_by_two(machines: Sequence[Machine], whole: Machine) -> None:
    """Ask one of ``machines``, each with too little memory, and then ``whole``, which has the model.

    Fails if exact answers differ.
    """
    weights = engine(whole)["shape"]["weights_bytes"]
    budget = WORKING_BYTES + int(ROOM * weights)
    limited = [replace(each, environ={**each.environ, **memory(budget)}) for each in machines]
    one, other = limited
    say(f"\nholding {MODEL} on {one.name} and {other.name}, which each have too little memory for it")
    say(
        f"  it takes {weights / 1e6:.0f} MB of memory, and {WORKING_BYTES / 1e6:.0f} MB to work with; "
        f"each machine may use {budget / 1e6:.0f} MB"
    )
    with ExitStack() as stack:
        for machine in limited:
            stack.enter_context(daemon(machine))
        pair(one, other)
        wait_usable(limited)
        fleetctl(one, "models", "load", MODEL, limit_s=ANSWER_S)
        say(f"\n> {QUESTION}  (asked of {one.name})")
        together = asked(one)
        say(textwrap.indent(textwrap.fill(together["content"].strip(), 96), "  "))
        say(f"  way        {together['plan']} · exactness {together['exactness']}")
        for line in shares(*(fleetctl(each, "status", limit_s=30)["engines"][0] for each in limited)):
            say(f"  {line}")
        alone = asked(whole)
        say(f"  {verdict(together, alone, whole.name)}")
        if together["exactness"] == "exact" and together["content"] != alone["content"]:
            fail("the answers differ, although they should be exact", one.log)


def memory(budget: int) -> dict[str, str]:
    return {"FLEETD_ENGINE_MAX_MEMORY_BYTES": str(budget)}


def asked(machine: Machine) -> Any:
    return fleetctl(
        machine,
        *("chat", "--model", MODEL, "--temperature", "0", "--max-tokens", str(MAX_TOKENS), QUESTION),
        limit_s=ANSWER_S,
    )


def shares(front: Any, part: Any) -> list[str]:
    """What each machine holds of the weights, as its status says."""
    (member,) = front["members"]
    here, there = (each["shape"]["weights_bytes"] / 1e6 for each in (front, part))
    return [
        f"here       {layers(0, member['first'])}, both ends: {here:.0f} MB",
        f"{member['name']:10} {layers(part['first_layer'], part['last_layer'])}: {there:.0f} MB",
    ]


def verdict(together: Any, alone: Any, whole: str) -> str:
    """What the two answers show, and no more than that."""
    same = together["content"] == alone["content"]
    return (
        f"=> {speed(together):.1f} tokens per second; {whole}, which has the whole model, writes "
        f"{speed(alone):.1f}; the answers {'are identical' if same else 'differ'}"
    )


def speed(answer: Any) -> float:
    """Tokens per second, from the first to the last."""
    seconds = answer["timings"]["predicted_ms"] / 1000
    return float(answer["usage"]["completion_tokens"] / seconds) if seconds else 0.0
