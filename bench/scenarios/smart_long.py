"""Smart prefill of long prompts on one machine, and what the planner makes of still longer ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench.figures import Bar, Figure, Taking, at_least, at_most
from bench.harness import card_parts, smart_chats
from bench.harness.child import Child
from bench.harness.daemon import Daemon
from bench.harness.smart_chats import RATIO, TARGET, Shortened
from bench.scenarios.smart_formula import TimedChunk, as_measured, depths, expected, fitted, whole_s
from fleetd.control.daemon_status import EngineStatus
from fleetd.control.prefill_trace import Trace
from fleetd.models.catalog import DEFAULT_MODEL
from fleetd.plan.costs import PrefillSpeed
from fleetd.plan.refusals import THIS_NODE
from fleetd.plan.scoring import Scorer

# Of the target: as long as any prompt here.
CONTEXT_TOKENS = 131_072
# A look, with fewer tokens and a target of fewer layers.
QUICK_LAYERS = 6
DEPTHS = 9
#: Nothing is kept of a prompt, and nothing is drafted or written beside one.
SETTINGS: Mapping[str, str] = {
    "FLEETD_CACHE_DISK": "off",
    "FLEETD_ENGINE_PREFIX_CACHE_BYTES": "1",
    "FLEETD_SPECULATION_MODE": "off",
}
WANTED = {"target_ratio": RATIO, "compressor_model": DEFAULT_MODEL}
_WARM_TOKENS = 200
# The last place at which a chunk begins, before the end of the prompt.
_LAST_TOKENS = 256


@dataclass(frozen=True, slots=True)
class LongPrompt:
    """``tokens`` of a prompt. ``dense``: all of them are computed for real, besides what timed chunks say.
    ``modelled``: longer prompts, of which the planner's figures are shown."""

    tokens: int
    sooner: Bar | None = None
    share: Bar | None = None
    dense: bool = False
    modelled: tuple[int, ...] = ()


OF_16K = LongPrompt(16_000, at_least(4.5), at_most(0.2), dense=True)
OF_32K = LongPrompt(32_000, at_least(6), modelled=(64_000, 128_000))
#: What a look takes instead.
QUICK_16K = LongPrompt(2_200, dense=True)
QUICK_32K = LongPrompt(3_000, modelled=(6_000,))


@dataclass(frozen=True, slots=True)
class SmartRun:
    """One prompt that was shortened: the seconds to its first token, what was done, and its trace."""

    first_s: float
    done: Shortened
    trace: Trace

    @property
    def kept(self) -> float:
        """The share of the tokens that is kept."""
        return self.done.kept / self.done.whole


def measure_16k(runs: int) -> Taking:
    return Taking(_figures(runs, OF_16K), _HOW)


def measure_32k(runs: int) -> Taking:
    return Taking(_figures(runs, OF_32K), _HOW)


def look_at_16k(runs: int) -> Taking:
    """The same rows of a short prompt and a small target."""
    return Taking(_figures(runs, QUICK_16K, num_hidden_layers=QUICK_LAYERS), _HOW)


def look_at_32k(runs: int) -> Taking:
    """The same rows of a short prompt and a small target."""
    return Taking(_figures(runs, QUICK_32K, num_hidden_layers=QUICK_LAYERS), _HOW)


def _figures(runs: int, prompt: LongPrompt, **sizes: int) -> Iterator[Figure]:
    at = f"{prompt.tokens:,} tokens"
    with smart_chats.models(max_position_embeddings=CONTEXT_TOKENS, **sizes) as models:
        with started(models) as daemon:
            smart = [_smart(daemon, prompt.tokens, run) for run in range(runs)]
            yield Figure(f"first token, smart prefill of {at}", "s", [run.first_s for run in smart])
            yield from _scoring(smart, at, prompt.share)
            scorer = scorer_of(daemon)
            dense_s = _dense_s(daemon, prompt.tokens) if prompt.dense else 0.0
            if dense_s:
                yield Figure(f"first token, all of {at}", "s", [dense_s])
        chunks = timed_chunks(models / TARGET, prompt.tokens)
    yield from gains(prompt, smart, scorer, chunks, dense_s)


def gains(
    prompt: LongPrompt, smart: list[SmartRun], scorer: Scorer, chunks: list[TimedChunk], dense_s: float
) -> Iterator[Figure]:
    """How much sooner the first token comes, as measured and by the planner's code, and for longer prompts
    by that code alone. ``dense_s``: of the whole prompt, 0 if only its chunks were timed."""
    at, speed, estimated_s = f"{prompt.tokens:,} tokens", fitted(chunks), whole_s(chunks, prompt.tokens)
    dense = f"dense: of {len(chunks)} timed chunks"
    yield Figure(f"first token, all of {at} ({dense})", "s", [estimated_s], note=_line(speed, chunks))
    if dense_s:
        off = [abs(estimated_s / dense_s - 1)]
        yield Figure(f"first token, all of {at} ({dense}), off the measured one by", "%", off, at_most(0.1))
    by = "" if dense_s else f" ({dense})"
    dense_s = dense_s or estimated_s
    yield Figure(f"sooner by, {at}{by}", "x", [dense_s / run.first_s for run in smart], prompt.sooner)
    paced = [as_measured(scorer, run.done.whole, run.done.score_s) for run in smart]
    plans = [
        expected(speed, each, run.done.whole, run.kept, dense_s=dense_s)
        for run, each in zip(smart, paced, strict=True)
    ]
    yield Figure(f"sooner by, {at}{by}, by the formula", "x", [dense_s / plan.predicted_s for plan in plans])
    of_formula = [plan.predicted_s / run.first_s for plan, run in zip(plans, smart, strict=True)]
    yield Figure(f"of what the formula allows, {at}{by}", "%", of_formula, at_least(0.95))
    for tokens in prompt.modelled:
        plan = expected(speed, paced[-1], tokens, RATIO)
        note = f"all of it {plan.dense_s:,.0f} s; shortened {plan.predicted_s:,.0f} s"
        yield Figure(
            f"sooner by, {tokens:,} tokens, modelled", "x", [plan.dense_s / plan.predicted_s], note=note
        )


def _line(speed: PrefillSpeed, chunks: list[TimedChunk]) -> str:
    lengths = sorted({chunk.tokens for chunk in chunks})
    starts = sorted(chunk.start for chunk in chunks)
    return (
        f"chunks of {' to '.join(map(str, dict.fromkeys([lengths[0], lengths[-1]])))} tokens behind "
        f"{starts[0]:,} to {starts[-1]:,}; on the line nearest to all, a token takes "
        f"{1000 * speed.token_s:.1f} ms, and {1e6 * speed.context_s:.2f} µs for each one before it"
    )


def _scoring(smart: list[SmartRun], at: str, bar: Bar | None) -> Iterator[Figure]:
    share = [run.done.score_s / run.first_s for run in smart]
    yield Figure(f"the scorer's share of the time, {at}", "%", share, bar)
    form = "form: " + ", ".join(dict.fromkeys(run.done.form for run in smart))
    yield Figure(f"share of the tokens that is kept, {at}", "%", [run.kept for run in smart], note=form)
    if missed := [off for run in smart if (off := _off(run.trace)) is not None]:
        yield Figure(f"the daemon's own prediction, off by, {at}", "%", missed, at_most(0.25))


def _off(trace: Trace) -> float | None:
    """How far a prediction was from what it took, as a share of that; None if one of them is not known."""
    predicted_s = trace.chosen.predicted_s
    return abs(predicted_s / trace.prefill_s - 1) if predicted_s and trace.prefill_s else None


# ---- asking ----------------------------------------------------------------------------------------------


def started(models: Path) -> Daemon:
    """A daemon that knows how fast it is with both models."""
    known = card_parts.digests(models, TARGET)
    daemon = Daemon(models=models, **dict[str, Any](SETTINGS))
    try:
        # Random weights find nothing, and a search would compute between two requests.
        card_parts.keep_profile(daemon.home, known[TARGET], card_parts.SCORES_NOTHING)
        for model in (DEFAULT_MODEL, TARGET):
            smart_chats.ask(daemon, model, smart_chats.chat(1, _WARM_TOKENS), local_only=True)
    except BaseException:
        daemon.close()
        raise
    return daemon


def _smart(daemon: Daemon, tokens: int, run: int) -> SmartRun:
    # No prompt is asked twice: its scores would be remembered.
    answered = smart_chats.ask(daemon, TARGET, smart_chats.chat(100 + run, tokens), smart=WANTED)
    done = smart_chats.shortened(answered.said)
    return SmartRun(answered.first_s, done, card_parts.traced(daemon, answered.id))


def _dense_s(daemon: Daemon, tokens: int) -> float:
    return smart_chats.ask(daemon, TARGET, smart_chats.chat(200, tokens), local_only=True).first_s


def scorer_of(daemon: Daemon) -> Scorer:
    """The default model as the planner sees it on a daemon's machine. Raises RuntimeError if it is not
    loaded."""
    engines = msgspec.convert(daemon.status()["engines"], list[EngineStatus])
    engine = next((engine for engine in engines if engine.model == DEFAULT_MODEL), None)
    if engine is None or engine.speed.prefill_tok_s <= 0:
        raise RuntimeError(f"{DEFAULT_MODEL} has not been measured: {engines}")
    return Scorer(
        THIS_NODE, "this", PrefillSpeed.of(engine.speed), context_tokens=engine.shape.context_tokens
    )


def timed_chunks(model: Path, tokens: int, count: int = DEPTHS, chunk: int = 0) -> list[TimedChunk]:
    """Chunks of a prompt that is not computed otherwise, one at each of ``count`` places, in a process of
    their own. Each is told as it comes. ``chunk``: their tokens; 0 is as a worker has it."""
    found = []
    with Child("chunk_times", str(model)) as child:
        # It finds its memory, and its pace.
        child.ask(start=0, count=2, chunk=chunk)
        for start in depths(tokens, count, _LAST_TOKENS):
            ((begins, done, took_s),) = child.ask(start=start, count=1, chunk=chunk)["chunks"]
            print(f"  {done} tokens behind {begins:,}: {took_s:.2f} s", flush=True)
            found.append(TimedChunk(begins, done, took_s))
    return found


_HOW = (
    "One daemon, one machine: SmolLM2-135M scores, and a llama of random weights with the same tokenizer "
    "answers, the same pair as at 8,000 tokens, one after the other on all cores. Prompts are chats and a "
    f"question, each its own; `target_ratio` {RATIO}. The time to the first token is a client's, over HTTP, "
    "with everything in it. If a row says `dense: of timed chunks`, its whole prompt was not read: one chunk "
    "was computed at each of so many depths, by the engine's own prefill behind rows that were made up. A "
    "chunk's time depends on how many rows are before it and not on what they say. The prompt is the area "
    "under the seconds per token, by trapezoids. Of 16,000 tokens both figures are there, and a row says how "
    "far apart they are. The formula is the planner's own code, with the line nearest to the timed chunks as "
    "the target's speed, the scoring time as it was measured, and the share that was kept. Rows that are "
    "modelled are the same code with the same two speeds: nothing that long was read."
)
