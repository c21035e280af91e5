"""Smart prefill on two machines: both score, and both read what is left. Gains of both ways multiply."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.figures import Figure, NotMeasured, Taking, alternated, at_least
from bench.harness import card_parts, smart_chats
from bench.harness.cores import starting_on, why_no_cores, workers_of
from bench.harness.fleet import Fleet
from bench.harness.machines import HELPER, HOME
from bench.harness.machines import SETTINGS as OF_A_CORE
from bench.harness.samples import Closing, Samples
from bench.harness.smart_chats import TARGET
from bench.scenarios.smart_formula import whole_s
from bench.scenarios.smart_long import CONTEXT_TOKENS, QUICK_LAYERS, SETTINGS, WANTED, timed_chunks
from fleetd.control.prefill_trace import Trace
from fleetd.models.catalog import DEFAULT_MODEL
from fleetd.plan.prefill import step_names

# Each machine has the target in memory: all of its layers would leave no room for anything else.
LENGTH, LAYERS = 16_000, 12
QUICK_LENGTH = 3_000
_DEPTHS, _CHUNK = 4, 128
_WARM_TOKENS = 300
_PROMPT_TOKENS = 4_000


@dataclass(frozen=True, slots=True)
class TwoPhases:
    """What the first token took: until the prompt was shortened, and what was left of it, in seconds."""

    first_s: float
    score_s: float
    kept: float
    who: str

    @property
    def rest_s(self) -> float:
        """Seconds from the shortened prompt to the first token."""
        return self.first_s - self.score_s


def measure(runs: int) -> Taking:
    """Raises RuntimeError if two machines cannot be had here."""
    return _measure(runs, LENGTH, LAYERS)


def look(runs: int) -> Taking:
    """The same rows of a short prompt and a small target. Raises RuntimeError as ``measure`` does."""
    return _measure(runs, QUICK_LENGTH, QUICK_LAYERS)


def _measure(runs: int, length: int, layers: int) -> Taking:
    if why := why_no_cores():
        raise RuntimeError(why)
    return Taking(_figures(runs, length, layers), _HOW)


def _figures(runs: int, length: int, layers: int) -> Iterator[Figure]:
    seen, who = Samples(), dict[str, None]()
    sizes = {"max_position_embeddings": CONTEXT_TOKENS, "num_hidden_layers": layers}
    with smart_chats.models(**sizes) as models:
        with PinnedPair(models) as pair:
            for run in range(runs):
                took: dict[bool, TwoPhases] = {}
                for alone in alternated(run, (True, False)):
                    took[alone] = pair.ask(100 + 2 * run + alone, length, alone=alone)
                    print(f"  {'one' if alone else 'two'}: {took[alone]}", flush=True)
                note(seen, took[True], took[False])
                who[took[False].who] = None
        yield from gains(seen, f"{length:,} tokens", "; ".join(who))
        with starting_on({pair.core_of_home}):
            chunks = timed_chunks(models / TARGET, length, _DEPTHS, _CHUNK)
    dense_s = whole_s(chunks, length)
    title = f"{length:,} tokens (dense: of {len(chunks)} timed chunks)"
    yield Figure(f"first token of one machine, all of {title}", "s", [dense_s])
    for name, machines in (("one_s", "one machine"), ("two_s", "two machines")):
        gained = [dense_s / first_s for first_s in seen[name]]
        yield Figure(f"{machines} with smart prefill, over one without, {title}", "x", gained)


def note(seen: Samples, one: TwoPhases, two: TwoPhases) -> None:
    """A pair of prompts: shortened by one machine, and by two that share what is left."""
    smart_and_shared, shared = one.first_s / two.first_s, one.rest_s / two.rest_s
    seen.add(
        one_s=one.first_s,
        two_s=two.first_s,
        scored=one.score_s / two.score_s,
        shared=shared,
        both=smart_and_shared,
        of_product=smart_and_shared / shared,
        kept=one.kept / two.kept,
    )


def gains(seen: Samples, at: str, who: str) -> Iterator[Figure]:
    """Rows that need no figure of the whole prompt: it is on both sides of a ratio."""
    yield Figure(f"first token, smart prefill by one machine, {at}", "s", seen["one_s"])
    yield Figure(f"first token, smart prefill by two machines, {at}", "s", seen["two_s"], note=who)
    yield Figure(f"two machines over one, scoring, {at}", "x", seen["scored"])
    yield Figure(f"two machines over one, reading what is left, {at}", "x", seen["shared"])
    yield Figure(f"two machines over one, first token, {at}", "x", seen["both"])
    product = f"gain of both, of the product of smart prefill's and shared prefill's, {at}"
    yield Figure(product, "%", seen["of_product"], at_least(0.9))


# ---- machines --------------------------------------------------------------------------------------------


class PinnedPair(Closing):
    """Two daemons on loopback that know each other, each with both models in workers on one core."""

    def __init__(self, models: Path) -> None:
        self._cores = dict(zip((HOME, HELPER), sorted(os.sched_getaffinity(0)), strict=False))
        self._exit = ExitStack()
        with self._exit:
            self._start(models)
            # Kept open from here on; closed by ``close``.
            self._exit = self._exit.pop_all()

    def close(self) -> None:
        self._exit.close()

    @property
    def core_of_home(self) -> int:
        """The core on which home's workers are."""
        return self._cores[HOME]

    def ask(self, seed: int, tokens: int, *, alone: bool) -> TwoPhases:
        """The first token of a chat that is shortened as text, which others can help to read.

        Raises NotMeasured if it was read whole, or if no other machine helped although it may.
        """
        home = self._fleet[HOME]
        wanted, body = {**WANTED, "mode": "text"}, {"local_only": True} if alone else {}
        answered = smart_chats.ask(home, TARGET, smart_chats.chat(seed, tokens), smart=wanted, **body)
        for name, core in self._cores.items():
            workers_of(self._fleet[name].process.pid, {core})
        done = smart_chats.shortened(answered.said)
        trace = card_parts.traced(home, answered.id)
        who = by_whom(trace)
        if not alone and HELPER not in who:
            raise NotMeasured(f"no other machine helped: {who}; {trace.code} {trace.reason}; {trace.losers}")
        return TwoPhases(answered.first_s, done.score_s, done.kept / done.whole, who)

    def _start(self, models: Path) -> None:
        known = card_parts.digests(models, TARGET)
        self._fleet = self._exit.enter_context(
            Fleet(self._cores, models=dict.fromkeys(self._cores, models), mdns=False)
        )
        peers: list[str] = []
        for name in self._cores:
            # Random weights find nothing, and a search would compute between two requests.
            card_parts.keep_profile(self._fleet.root / name, known[TARGET], card_parts.SCORES_NOTHING)
            settings = {**SETTINGS, **OF_A_CORE, "FLEETD_FLEET_PEERS": ",".join(peers)}
            daemon = self._fleet.start(name, **settings)
            peers.append(f"127.0.0.1:{daemon.status()['fleet']['port']}")
        self._fleet.until_usable(*self._cores)
        for name, core in self._cores.items():
            daemon = self._fleet[name]
            with starting_on({core}, None, daemon.process.pid):
                for model in (DEFAULT_MODEL, TARGET):
                    smart_chats.ask(daemon, model, smart_chats.chat(1, _WARM_TOKENS), local_only=True)
            if len(workers_of(daemon.process.pid, {core})) != 2:
                raise RuntimeError(f"{name} has not loaded both models:\n{daemon.log()}")
        self._fleet.until_priced(HOME, [HELPER], _PROMPT_TOKENS, TARGET)


def by_whom(trace: Trace) -> str:
    """Which machines scored a prompt and which read what was left, by its trace."""
    named = {
        what: dict.fromkeys(step.machine for step in trace.steps if step.name == name)
        for what, name in (("scored by", step_names.SCORED), ("read by", step_names.COMPUTED))
    }
    return ", ".join(f"{what} {' and '.join(machines) or 'nobody'}" for what, machines in named.items())


_HOW = (
    "Two daemons on loopback, whose workers compute on one core each, and both have both models: "
    "SmolLM2-135M scores, and a llama of random weights with the same tokenizer answers, as wide as at 8,000 "
    f"tokens and with {LAYERS} of its layers, so that it fits twice. Prompts are chats and a question, each "
    "its own, shortened as `text`: what is sparse is read by one machine. One machine is asked by "
    "`local_only`; two are as the planner decides: both score, and both read what is left. Smart prefill "
    "gains (all by one) / (shortened by one), shared prefill (what is left, by one) / (the same, by two), "
    "both together (all by one) / (shortened by two). All by one is on both sides of the row with the bar, "
    "which therefore needs no figure of it; the last rows have one from timed chunks, as for 32,000 tokens. "
    "Both sides compute chunks of 256 tokens, as in other rows of two machines."
)
