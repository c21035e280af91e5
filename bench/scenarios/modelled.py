"""The planner, fed with what others published of their machines: does it predict their speed-ups?

Nothing is computed here but prices; no model runs, and the machines are not around.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from bench.figures import Figure, Measured, at_most
from fleetd.control.model_facts import ModelShape, StateSizes
from fleetd.limits import KIB, MIB
from fleetd.plan.costs import LinkSpeed, PrefillSpeed
from fleetd.plan.prefill.choice import HelperSpec, PlanChoice, PrefillOption, PrefillSize, choose, options
from fleetd.plan.prefill.schedule import timeline
from fleetd.plan.prefill.split import Split, checked

# How far a prediction may be from what was published.
TOLERANCE = 0.1

# ---- ds4: two M5 Max on Thunderbolt 5, layers halved, chunks of 4,096 ------------------------------------
# antirez/ds4, README: tokens of the prompt → tokens per second of prefill on one machine, and on both.
DS4: dict[int, tuple[float, float]] = {
    9_421: (421.7, 582.2),
    28_684: (405.3, 674.2),
    63_819: (353.6, 654.8),
}
DS4_CHUNK = 4096
# The same: a round trip of 0.45 ms on that cable. Its threads 304 to 430: rows over a direct link in 425 to
# 435 MiB/s; layers 0 to 21 are one half, and a prompt of 14,524 tokens left 107,097,320 bytes of their rows.
DS4_LINK = LinkSpeed(425 * MIB, 0.45e-3)
DS4_LAYERS, DS4_FIRST = 43, 22
DS4_ROW_BYTES = 107_097_320 // 14_524 * DS4_LAYERS // DS4_FIRST
# There also: 390 tokens per second in chunks of 256, 589 to 603 in chunks of 4,096; taken for that prompt's.
DS4_SMALL_CHUNK, DS4_SMALL_TOKENS, DS4_SMALL_RATES = 256, 14_524, (390.0, 596.0)
# Not published: the width of the model's forerunner in 16 bits. Some per cent of a chunk's time on that link.
DS4_HIDDEN_BYTES = 7168 * 2
DS4_SHAPE = ModelShape(layers=DS4_LAYERS, sizes=StateSizes(DS4_ROW_BYTES), hidden_bytes=DS4_HIDDEN_BYTES)

# ---- exo: a DGX Spark prefills, an M3 Ultra answers, 10 Gbit/s between them ------------------------------
# exo's blog on DGX Spark and Mac Studio: Llama-3.1-8B in FP16, 8,192 tokens of prompt; seconds of prefill on
# each, of decode on the Mac, and end to end on both together.
EXO_TOKENS = 8192
EXO_SPARK_S, EXO_MAC_S, EXO_MAC_DECODE_S, EXO_BOTH_S = 1.47, 5.57, 0.85, 2.32
EXO_LINK = LinkSpeed(1.25e9, 0.3e-3)
# The model's config: 32 layers, 8 heads of 128 for keys and values, 4,096 wide. Its weights of 16 GB are read
# once per chunk, at the bandwidth of each machine's memory (their makers' figures).
EXO_SHAPE = ModelShape(layers=32, sizes=StateSizes(128 * KIB), hidden_bytes=4096 * 2)
EXO_WEIGHTS_BYTES, EXO_SPARK_BYTES_PER_S, EXO_MAC_BYTES_PER_S = 16.06e9, 273e9, 819e9
# mlx-lm's own, in which the published rates are taken to be measured.
EXO_CHUNK = 2048


@dataclass(frozen=True, slots=True)
class Prediction:
    """Speed-ups over one machine alone: published, predicted for that way, and of the plan fleetd takes.

    ``third``: of its plan with one more machine like the other one.
    """

    name: str
    published: float
    predicted: float
    choice: PlanChoice
    best: float
    choice_of_three: PlanChoice
    third: float

    @property
    def error(self) -> float:
        return abs(self.predicted / self.published - 1)


def ds4(tokens: int) -> Prediction:
    """Their own schedule; rows stay where they are made there."""
    alone, both = DS4[tokens]
    speed, prompt = ds4_speed(), _ds4_prompt(tokens)
    split = checked(Split("layers", (0, DS4_FIRST, DS4_LAYERS), DS4_LAYERS, 0, tokens, DS4_CHUNK))
    place = HelperSpec("other", "the other", speed, DS4_LINK)
    staying = replace(prompt, shape=replace(DS4_SHAPE, sizes=StateSizes()))
    local_s = speed.total(1.0, prompt.new, DS4_CHUNK)
    home = HelperSpec("", "this", speed)
    others = [HelperSpec(name, name, speed, DS4_LINK) for name in ("other", "third")]
    choice, of_three = (choose(options(prompt, home, others[:count])) for count in (1, 2))
    return Prediction(
        f"ds4, {tokens:,} tokens",
        both / alone,
        local_s / timeline(staying, split, [place], speed).total_s,
        choice,
        local_s / choice.best.predicted_s,
        of_three,
        local_s / of_three.best.predicted_s,
    )


def ds4_speed() -> PrefillSpeed:
    """Through the shortest and the longest prompt on one machine, with what chunks cost in themselves."""
    small, large = (DS4_SMALL_TOKENS / rate for rate in DS4_SMALL_RATES)
    # Two equal stages take (chunks + 1) of them.
    small_s = small / (DS4_SMALL_TOKENS / DS4_SMALL_CHUNK + 1)
    large_s = large / (DS4_SMALL_TOKENS / DS4_CHUNK + 1)
    per_token_s = (large_s - small_s) / (DS4_CHUNK - DS4_SMALL_CHUNK)
    fixed_s = 2 * (small_s - DS4_SMALL_CHUNK * per_token_s)
    (few, (few_rate, _)), *_, (many, (many_rate, _)) = sorted(DS4.items())
    context_s = 2 * (1 / many_rate - 1 / few_rate) / (many - few)
    token_s = 1 / few_rate - context_s * few / 2 - fixed_s / DS4_CHUNK
    return PrefillSpeed(token_s, context_s, fixed_s)


def _ds4_prompt(tokens: int) -> PrefillSize:
    return PrefillSize(DS4_SHAPE, tokens, 0, DS4_CHUNK)


def exo() -> Prediction:
    """End to end, as it was published: all of the prefill on one machine, decode on the other."""
    prompt = PrefillSize(EXO_SHAPE, EXO_TOKENS, 0, EXO_CHUNK)
    mac = HelperSpec("", "the Mac", _exo_speed(EXO_MAC_S, EXO_MAC_BYTES_PER_S))
    speed = _exo_speed(EXO_SPARK_S, EXO_SPARK_BYTES_PER_S)
    sparks = [HelperSpec(name, name, speed, EXO_LINK) for name in ("spark", "second spark")]
    (whole,) = [option for option in options(prompt, mac, sparks[:1]) if option.kind == "whole"]
    choice, of_three = (choose(options(prompt, mac, sparks[:count])) for count in (1, 2))
    alone_s = EXO_MAC_S + EXO_MAC_DECODE_S

    def faster(option: PrefillOption) -> float:
        return alone_s / (option.predicted_s + EXO_MAC_DECODE_S)

    published, best, third = alone_s / EXO_BOTH_S, faster(choice.best), faster(of_three.best)
    return Prediction("exo", published, faster(whole), choice, best, of_three, third)


def _exo_speed(seconds: float, bytes_per_s: float) -> PrefillSpeed:
    fixed_s = EXO_WEIGHTS_BYTES / bytes_per_s
    return PrefillSpeed((seconds - EXO_TOKENS / EXO_CHUNK * fixed_s) / EXO_TOKENS, 0.0, fixed_s)


def predictions() -> list[Prediction]:
    return [*map(ds4, DS4), exo()]


def _plan(choice: PlanChoice) -> str:
    split = choice.best.split
    return f"{choice.best.kind}, cut at {split.cuts} in chunks of {split.chunk}" if split else "local"


def measure(runs: int) -> Measured:
    del runs  # arithmetic gives the same every time
    figures = []
    for made in predictions():
        figures += [
            Figure(
                f"{made.name}: distance of the prediction",
                "%",
                [made.error],
                at_most(TOLERANCE),
                note=f"published {made.published:.2f}, predicted {made.predicted:.2f}",
            ),
            Figure(f"{made.name}: fleetd's own plan, modelled", "x", [made.best], note=_plan(made.choice)),
            Figure(
                f"{made.name}: fleetd's own plan for three machines, modelled",
                "x",
                [made.third],
                note=f"{made.third / made.best:.2f} times its plan for two; {_plan(made.choice_of_three)}",
            ),
        ]
    return Measured(
        figures,
        "No measurements: the planner's prices for machines and links as their owners published them (the "
        "sources stand in bench/scenarios/modelled.py). First its prediction of the speed-up over one "
        "machine alone for the way that ds4 and exo go, against theirs; then what it expects of the way that "
        "it would choose itself on the same machines, and on three: with one more machine like the helper. "
        "ds4's single machine ran a smaller file than its pair, so its published speed-ups are rather low; "
        "what a chunk costs in itself comes from its runs in chunks of 256 and 4,096. exo's figure is end to "
        "end, with the decode on the Mac. It streams each layer once it is computed, where the planner has "
        "rows leave chunk by chunk, and so expects a longer tail.",
    )
