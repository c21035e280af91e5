"""`make demo`: a throw-away fleet of three daemons, questions to it, one prompt that two of them share, and a
model that two more hold together, because it fits neither.

They find each other by mDNS and are paired with a code, as three machines would be; the model is fetched once
and copied from one to another; the third, which has none, is asked. Needs nothing but what `make` installed.
The model is kept in .cache/models; everything else lives in a temporary folder and is gone afterwards, also
after Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import ExitStack
from pathlib import Path

from daemons import (
    ANSWER_S,
    MODEL,
    PAIR_S,
    REPO,
    Machine,
    command_line,
    daemon,
    fail,
    fleetctl,
    pair,
    say,
    temporary_home,
    wait_usable,
)
from held_by_two import held_by_two
from together import shared_and_alone

# A text that the answers can be checked against, some 2,200 tokens long.
LONG_TEXT = REPO / "LICENSE"
# (the question, whether it is about the long text). The third needs little of the second's work again.
QUESTIONS = (
    ("What is 2+2?", False),
    ("Does this license provide a warranty? Answer in one sentence.", True),
    ("What is the name of this license?", True),
)
PULL_S = 900.0
# Three rooms of one flat.
NAMES = ("studio", "kitchen", "attic")
# Two machines that are too small for the model.
SMALL_NAMES = ("cellar", "garage")


def ask(machine: Machine, question: str, *, about_text: bool) -> None:
    text = LONG_TEXT.read_text(encoding="utf-8") if about_text else ""
    about = f"  (about {LONG_TEXT.name}, {len(text):,} characters)" if about_text else ""
    say(f"\n> {question}{about}")
    began = time.monotonic()
    answer = fleetctl(
        machine,
        *("chat", "--model", MODEL, "--temperature", "0", "--max-tokens", "100"),
        *(() if about_text else (question,)),
        limit_s=ANSWER_S,
        # The text first: a second question about it then finds it computed.
        stdin=f"{text}\n{question}\n" if about_text else "",
    )
    took_s = time.monotonic() - began
    if not answer["content"].strip():
        fail("the answer is empty", machine.log)
    say(textwrap.indent(textwrap.fill(answer["content"], 96), "  "))
    usage, times = answer["usage"], answer["timings"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    say(f"  way        {answer['plan']} · exactness {answer['exactness']}")
    say(
        f"  prompt     {usage['prompt_tokens']:,} tokens, {cached:,} of them known already; "
        f"the others read in {times['prompt_ms'] / 1000:.2f} s"
    )
    say(
        f"  answer     {usage['completion_tokens']} tokens in {times['predicted_ms'] / 1000:.2f} s; "
        f"first one after {answer['first_token_s']:.2f} s, everything after {took_s:.2f} s"
    )


def main() -> None:
    began = time.monotonic()
    # `kill` should clean up as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with temporary_home() as folder, ExitStack() as stack:
        machines = [Machine(name, folder / name, environment(name, folder)) for name in NAMES]
        first, second, third = machines
        say(f"starting a throw-away fleet of three daemons, their homes in {folder}")
        for machine in machines:
            stack.enter_context(daemon(machine))
        facts = fleetctl(first, "status", limit_s=30)["machine"]
        say(
            f"ready after {time.monotonic() - began:.1f} s · all three on this {facts['cpu']} with "
            f"{facts['cores']} cores and {facts['memory_bytes'] / 1e9:.0f} GB"
        )
        say("pairing them")
        begun = time.monotonic()
        pair(first, second)
        pair(first, third)
        wait_usable(machines)
        say(f"  each can use both others, {time.monotonic() - begun:.1f} s after the first code was shown")
        say(f"getting the model {MODEL} for {first.name} (90 MB, once)")
        fleetctl(first, "models", "pull", MODEL, limit_s=PULL_S)
        begun = time.monotonic()
        fleetctl(first, "models", "load", MODEL, limit_s=ANSWER_S)
        say(f"  verified and loaded in {time.monotonic() - begun:.1f} s")
        copy(second, first)
        say(f"asking {third.name}, which has no model")
        for question, about_text in QUESTIONS:
            ask(third, question, about_text=about_text)
        say(f"\n{third.name}$ fleetctl peers")
        subprocess.run(command_line(third, "peers"), env=third.environ, check=False, timeout=30)
        shared_and_alone(second, first)
        others = [Machine(name, folder / name, environment(name, folder)) for name in SMALL_NAMES]
        held_by_two(others, first)
    say(f"\nthe fleet is stopped, its homes removed; {time.monotonic() - began:.0f} s in all")
    say("next: `.venv/bin/fleetd run`, and in another terminal `.venv/bin/fleetctl chat`")


def environment(name: str, folder: Path) -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("FLEETD_")}
    environ["FLEETD_FLEET_NAME"] = name
    # On a CPU a machine is one core here, so that two of them are more than one.
    environ["FLEETD_ENGINE_THREADS"] = "1"
    # Nothing of what this machine really has takes part.
    environ["FLEETD_MODELS_HUB_CACHE"] = str(folder / "no-hub")
    if name in (NAMES[0], *SMALL_NAMES):
        environ["FLEETD_MODELS_DIR"] = str(REPO / ".cache" / "models")
    return environ


def copy(machine: Machine, source: Machine) -> None:
    """The second machine takes the model from the first one instead of the internet."""
    begun = time.monotonic()
    wait_digest(machine, source)
    fleetctl(machine, "models", "pull", MODEL, limit_s=PULL_S)
    took_s = time.monotonic() - begun
    models = fleetctl(machine, "models", limit_s=30)["installed"]
    size = next(model["weights_bytes"] for model in models if model["name"] == MODEL)
    say(f"  {machine.name} copied it from {source.name}: {size / 1e6:.0f} MB, checked, in {took_s:.1f} s")
    fleetctl(machine, "models", "load", MODEL, limit_s=ANSWER_S)


def wait_digest(machine: Machine, source: Machine) -> None:
    """Until the source has told that it has the model, and what its files are."""
    deadline = time.monotonic() + PAIR_S
    while time.monotonic() < deadline:
        for peer in fleetctl(machine, "peers", limit_s=30)["peers"]:
            for model in peer["models"]:
                if peer["name"] == source.name and model["name"] == MODEL and model["digest"]:
                    return
        time.sleep(0.1)
    fail(f"{source.name} did not tell what model it has", source.log)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
