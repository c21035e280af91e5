"""Three machines that are alike read one prompt, against two of them and one."""

from __future__ import annotations

from bench.figures import Figure, Measured, alternated
from bench.harness import prompts
from bench.harness.daemon import MODEL
from bench.harness.machines import LOOPBACK, SECOND_HELPER, Asked, Machines, why_none
from bench.harness.samples import Samples

QUICK_RUNS = 1
LENGTHS, QUICK_LENGTHS = (2000, 4000), (1000,)
# Of a core; three of them are less than one, so that other work on the cores changes little.
SHARE = 0.3


def measure(runs: int) -> Measured:
    """Raises RuntimeError where cores cannot be shared out on this machine."""
    shares = (SHARE,) * 3
    if why := why_none(LOOPBACK, *shares):
        raise RuntimeError(why)
    seen, how = Samples(), dict[tuple[int, int], list[str]]()
    lengths = QUICK_LENGTHS if runs <= QUICK_RUNS else LENGTHS
    with Machines(shares=shares) as machines:
        for run in range(runs):
            for length in lengths:
                prompt = prompts.tokens(MODEL, 39_000 + 10 * run + length, length)
                texts = set()
                for count in alternated(run, (1, 2, 3)):
                    asked = _ask(machines, prompt, count)
                    seen[length, count].append(asked.ttft_s)
                    how.setdefault((length, count), []).append(f"{_machines(asked)} by {asked.how}")
                    texts.add(asked.heard.text)
                seen["same"].append(float(len(texts) == 1))
    return Measured(_figures(seen, how, lengths), _HOW)


def _ask(machines: Machines, prompt: list[int], count: int) -> Asked:
    if count == 2:
        with machines.without(SECOND_HELPER):
            return machines.ask(prompt, alone=False)
    return machines.ask(prompt, alone=count == 1)


def _machines(asked: Asked) -> int:
    """How many machines computed."""
    return len(asked.trace.chosen.nodes) if asked.shared and asked.trace is not None else 1


def _figures(seen: Samples, how: dict[tuple[int, int], list[str]], lengths: tuple[int, ...]) -> list[Figure]:
    figures = []
    for length in lengths:
        for over, under in ((3, 2), (3, 1), (2, 1)):
            ratios = seen.ratios((length, under), (length, over))
            note = "; ".join(dict.fromkeys(how[length, over]))
            title = f"{over} machines over {under}, TTFT at {length:,} tokens"
            figures.append(Figure(title, "x", ratios, note=note))
        figures.append(Figure(f"TTFT of one machine, {length:,} tokens", "s", seen[length, 1]))
    return [*figures, Figure("First tokens equal", "%", seen["same"], of="worst")]


_HOW = (
    f"Three daemons on loopback, each of whose workers may use {SHARE:.0%} of a core (a CPU quota of 10 ms "
    "periods) and comes before all other work on the cores. Each prompt is asked of one machine, of two "
    "while the third one's daemon stands still, and of all three, in turns. The planner chooses the split "
    "and may leave a machine out. Prefix caches are off; chunks are of 256 tokens."
)
