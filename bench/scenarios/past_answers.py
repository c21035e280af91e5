"""Questions that are asked again: drafts from past answers of the same machine, against none of these."""

from __future__ import annotations

from bench.figures import Figure, Measured, alternated, at_least
from bench.harness.client import Heard
from bench.harness.daemon import Daemon
from bench.harness.repetitive_prompts import FREE
from bench.harness.samples import Samples

TOKENS = 128
# As people ask again: by the button that regenerates an answer, or with a word in front.
_AGAIN = {"asked again": "", "asked again with a line in front": "Answer with care.\n\n"}


def measure(runs: int) -> Measured:
    """Raises RuntimeError where past answers change what is said."""
    seen = Samples()
    with Daemon() as without, Daemon(FLEETD_SPECULATION_REMEMBER="true") as remembering:
        sides = {"without": without, "with": remembering}
        for daemon in sides.values():
            daemon.warm()
        for run in range(runs):
            words = FREE[run % len(FREE)]
            for daemon in sides.values():
                _ask(daemon, words)
            for name, front in _AGAIN.items():
                said: dict[str, Heard] = {}
                for side in alternated(run, tuple(sides)):
                    said[side] = _ask(sides[side], front + words)
                    seen[name, side].append(said[side].rate)
                if said["with"].text != said["without"].text:
                    raise RuntimeError(f"past answers changed the answer to {words[-40:]!r}")
    return Measured([_gain(name, seen) for name in _AGAIN], _HOW)


def _ask(daemon: Daemon, words: str) -> Heard:
    with daemon.stream("completions", prompt=words, max_tokens=TOKENS) as stream:
        return stream.hear()


def _gain(name: str, seen: Samples) -> Figure:
    return Figure(
        f"Decode of free text that is {name}, times that without past answers",
        "x",
        seen.ratios((name, "with"), (name, "without")),
        at_least(1.1),
    )


_HOW = (
    f"Two daemons by turns, one with `speculation.remember`, both with drafts on. {TOKENS} tokens of free "
    "text, greedy, asked once at each; then the same again, and with a line in front, which changes the "
    "answer. The rate is taken from the first token to the last. Both give the same text."
)
