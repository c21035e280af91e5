"""What it costs a hybrid to keep states at earlier tokens of a prompt, and what an edit then reads again."""

from __future__ import annotations

import tempfile
from pathlib import Path

from bench.figures import Figure, Measured, alternated, at_most
from bench.harness import prompts
from bench.harness.child import Child
from bench.harness.daemon import MODEL
from bench.harness.samples import Samples

LENGTH, QUICK_LENGTH = 4000, 1500
EDITED = 200


def measure(runs: int) -> Measured:
    seen, length = Samples(), LENGTH if runs > 1 else QUICK_LENGTH
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "hybrid"
        with Child("hybrid_model", str(model), str(MODEL)):
            pass
        with Child("prompt_states", str(model)) as child:
            child.ask(messages=_chat(1, 300, 1), edited=_chat(1, 300, 2), states=True)
            for run in range(runs):
                asked, edited = (_chat(60_000 + run, length, last) for last in (1, 2))
                for states in alternated(run, (False, True)):
                    said = child.ask(messages=asked, edited=edited, states=states)
                    seen[states].append(said["seconds"])
                    seen[states, "saving"].append(said["saving"] / said["seconds"])
                    seen[states, "again"].append(said["again"])
                    seen[states, "held"].append(said["held_bytes"] / 1e6)
    extra = [ratio - 1 for ratio in seen.ratios(True, False)]
    return Measured(
        [
            Figure(
                f"Saving states, share of the prefill of {length:,} tokens",
                "%",
                seen[True, "saving"],
                at_most(0.02),
            ),
            Figure("Prefill with states, longer than without by", "%", extra),
            Figure(
                f"Computed after the last message of {EDITED} in {length:,} tokens was edited",
                "count",
                seen[True, "again"],
                at_most(456),
                of="worst",
                note=f"without states: {max(seen[False, 'again']):.0f}",
            ),
            Figure("Memory of the states of one prompt", "MB", seen[True, "held"]),
            Figure("Prefill without states", "s", seen[False]),
        ],
        _HOW,
    )


def _chat(seed: int, tokens: int, last: int) -> list[dict[str, str]]:
    """A chat of about so many tokens. Its last message, of ``EDITED``, is chosen by ``last``."""
    rules, question, answer = (
        prompts.text(MODEL, seed + 1000 * i, (tokens - EDITED) * part // 10)
        for i, part in enumerate((5, 3, 2))
    )
    edited = prompts.text(MODEL, seed + 10_000 * last, EDITED)
    roles = ("system", "user", "assistant", "user")
    texts = (rules, question, answer, edited)
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]


_HOW = (
    "One process with the engine's own prefill and a model of Qwen 3.5's shape with random weights, with and "
    "without states in turn, in chunks of 256 tokens. Each run has a chat of its own, which the model's "
    "template renders; with states that includes finding where messages end. What saving takes is timed by "
    "itself, until the states are computed; the difference of two prefills also has their noise."
)
