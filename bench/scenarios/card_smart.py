"""Smart prefill on an accelerator: a model of 0.6 billion parameters scores in front of larger ones.

Weights are random, so what is kept means nothing: only times count.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

from bench.figures import Figure, NotMeasured, Taking, ratios
from bench.harness import card_models, prompts, smart_chats
from bench.harness.card_parts import SCORES_NOTHING, MeasuredParts, digests, keep_profile
from bench.harness.daemon import MODEL, Daemon
from bench.harness.samples import Samples, wait_for
from bench.harness.smart_chats import Answered, Shortened, shortened
from fleetd.engine.protocol import Profile
from fleetd.plan.scoring import EXIT_SHARE

SCORER = "dense-0.6b-bf16"
TARGETS = ("dense-8b-4bit", "moe-30b-a3b-4bit")
RATIO = 0.2
# Of all targets together; no prompt is begun that would probably end later.
_BUDGET_S = 210.0
# What is late once is left out for half a minute at most.
_FIRST_WITHIN_S, _FIRST_POLL_S = 60.0, 1.0
# Codes of a plan that takes longer than to read the whole prompt.
_LONGER = ("slower", "margin")
# From one length to the next: twice the tokens, and up to four times the attention.
_GROWTH = 4.0
_NEEDLE = " Marta Ellison wrote the number 48213 on the brass plaque of the observatory. "
_QUESTION = "Which number did Marta Ellison write on the brass plaque of the observatory?"
_OF_RANDOM = "random weights: what is kept means nothing, only times count"


def _lengths() -> tuple[int, ...]:
    return (2200, 3000) if card_models.small() else (16_000, 32_000, 64_000, 128_000)


def measure(runs: int) -> Taking:
    parts = MeasuredParts()
    return Taking(parts.of(_figures(parts, runs)), _HOW)


def _figures(parts: MeasuredParts, runs: int) -> Iterator[Figure]:
    begun, lengths = time.perf_counter(), _lengths()
    for target in TARGETS:
        with parts.part(target):
            yield from _target(parts, target, lengths, runs, begun + _BUDGET_S)


def _target(
    parts: MeasuredParts, target: str, lengths: tuple[int, ...], runs: int, ends: float
) -> Iterator[Figure]:
    models = card_models.made(SCORER, target)
    known = digests(models, SCORER, target)
    with Daemon(
        models=models,
        FLEETD_CACHE_DISK="off",
        FLEETD_ENGINE_PREFIX_CACHE_BYTES="1",
        FLEETD_SPECULATION_MODE="off",
    ) as daemon:
        keep_profile(daemon.home, known[SCORER], _profile())
        keep_profile(daemon.home, known[target], SCORES_NOTHING)
        for model in (SCORER, target):
            _ask(daemon, model, 1, 600, smart=False)
        # Kernels are compiled at their first use.
        _ask(daemon, target, 2, lengths[0], smart=False)
        with parts.part(f"{target}, the first scores"):
            _first_scores(daemon, target, lengths[0])
        took_s = 0.0
        for length in lengths:
            if time.perf_counter() + _GROWTH * took_s > ends:
                raise NotMeasured(f"no time is left for {length:,} tokens")
            with parts.part(f"{target}, {length:,} tokens"):
                at = time.perf_counter()
                yield from _length(daemon, target, length, runs)
                took_s = time.perf_counter() - at


def _first_scores(daemon: Daemon, target: str, length: int) -> None:
    """Ask until a prompt is shortened: scores that compile kernels come too late for theirs.

    Raises:
        NotMeasured: it would be read sooner whole, which asking again does not change.
        RuntimeError: none is shortened within a while.
    """
    seeds, why = itertools.count(3), ""

    def scored() -> bool:
        nonlocal why
        try:
            shortened(_ask(daemon, target, next(seeds), length, smart=True).said)
        except NotMeasured as error:
            why = str(error)
            if any(f": {code}: " in why for code in _LONGER):
                raise
            return False
        return True

    wait_for(scored, _FIRST_WITHIN_S, _FIRST_POLL_S, lambda: f"no prompt was shortened: {why}")


def _length(daemon: Daemon, target: str, length: int, runs: int) -> Iterator[Figure]:
    seen, title = Samples(), f"{target}, {length:,} tokens"
    found: Shortened | None = None
    for run in range(runs):
        # No prompt is asked twice: its scores would be remembered.
        seed = 71_000 + length + 2 * run
        whole = _ask(daemon, target, seed, length, smart=False)
        seen.add(whole_s=whole.first_s)
        smart = _ask(daemon, target, seed + 1, length, smart=True)
        found = shortened(smart.said)
        seen.add(smart_s=smart.first_s, score_s=found.score_s, kept=found.kept / found.whole)
    assert found is not None
    note = f"{_OF_RANDOM}; {found.kept:,} of {found.whole:,} tokens were kept, form {found.form}"
    yield Figure(
        f"Smart prefill over whole, TTFT, {title}", "x", seen.ratios("whole_s", "smart_s"), note=note
    )
    yield Figure(f"TTFT, whole, {title}", "s", seen["whole_s"])
    yield Figure(f"TTFT, smart prefill, {title}", "s", seen["smart_s"])
    yield Figure(f"The scorer's share of the time, {title}", "%", ratios(seen["score_s"], seen["smart_s"]))
    yield Figure(f"Share of the tokens that is kept, {title}", "%", seen["kept"])


def _profile() -> Profile:
    """One head of the scorer in each of a few layers, as if a search had found them."""
    shape, _ = card_models.shape(SCORER)
    layers, heads = int(shape.config["num_hidden_layers"]), int(shape.config["num_attention_heads"])
    last = max(1, round(EXIT_SHARE * layers))
    asked = sorted({(last * (i + 1) // 4 - 1, i % heads) for i in range(4) if last * (i + 1) // 4 >= 1})
    return Profile(asked, last, layers=layers)


def _ask(daemon: Daemon, model: str, seed: int, count: int, *, smart: bool) -> Answered:
    """Ask for one place in a text of about so many tokens. Raises RuntimeError for an error."""
    text = prompts.text(MODEL, seed, count)
    middle = text.rfind(".", 0, len(text) // 2) + 1
    messages = [
        {"role": "user", "content": text[:middle] + _NEEDLE + text[middle:]},
        {"role": "user", "content": _QUESTION},
    ]
    wanted = {"target_ratio": RATIO, "compressor_model": SCORER} if smart else None
    return smart_chats.ask(daemon, model, messages, smart=wanted, local_only=True)


_HOW = (
    f"One daemon on the accelerator: {SCORER} scores, the model in the title answers. Weights are random, "
    "so scores mean nothing and only times count. The scorer's profile is made up: heads in the first "
    f"{EXIT_SHARE:.0%} of its layers, the share that the planner assumes. Each prompt is a chat of made-up "
    f"prose with one sentence that the question is about, `target_ratio` {RATIO}, and is asked once: whole "
    "and shortened are equally long texts of other words. A request that was not shortened gives no row. "
    "TTFT is a client's, over HTTP, with everything in it. Nothing is kept of a prompt, and drafts are off."
)
