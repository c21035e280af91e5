"""Two daemons on one accelerator: what sharing a prompt, and fetching a kept one, takes there.

Both divide one card, so nothing can be gained: the figures are the price of streams, checks and agreement.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from bench.figures import Figure, NotMeasured, Taking, ratios
from bench.harness import card_models, prompts
from bench.harness.card_parts import (
    SCORES_NOTHING,
    MeasuredParts,
    digests,
    keep_profile,
    traced,
    until_linked,
)
from bench.harness.daemon import MODEL, Daemon
from bench.harness.fleet import Fleet
from bench.harness.samples import Samples, wait_for
from fleetd import limits
from fleetd.control.prefill_trace import Trace
from fleetd.plan.prefill import step_names

MODELS = ("dense-4b-4bit", "dense-4b-bf16")
KINDS = ("layers", "tokens")
HOME, HELPER = "home", "helper"
_ANSWER_TOKENS = 32
_WITHIN_S = 60.0
_SETTINGS = {
    # Of what the card has; one daemon alone may take twice as much.
    "FLEETD_ENGINE_MEMORY_FRACTION": "0.42",
    "FLEETD_SPECULATION_MODE": "off",
}


def _lengths() -> tuple[int, ...]:
    return (700, 1400) if card_models.small() else (8000, 32_000)


def measure(runs: int) -> Taking:
    parts = MeasuredParts()
    return Taking(parts.of(_figures(parts, runs)), _HOW)


def _figures(parts: MeasuredParts, runs: int) -> Iterator[Figure]:
    models = card_models.made(*MODELS)
    small, large = MODELS
    with parts.part(f"{small}, shared"):
        yield from _all_shared(parts, models, small, runs)
    with parts.part(f"{small}, fetched"):
        yield from _all_fetched(parts, models, small, runs)
    with parts.part(f"{large}, shared"):
        yield from _all_shared(parts, models, large, runs)


class Pair(Fleet):
    """A home, whose plans follow ``plan``, and a helper, which answers alone; both know their link.

    Args:
        names: the models that are used.
        settings: of both, and ``at_home`` those of home only.
    """

    def __init__(
        self, models: Path, names: Iterable[str], settings: Mapping[str, str], at_home: Mapping[str, str]
    ) -> None:
        super().__init__((HOME, HELPER), models=dict.fromkeys((HOME, HELPER), models), mdns=False)
        self._plan, alone = self.root / "plan", self.root / "alone"
        self.plan("")
        alone.write_text("here", encoding="ascii")
        for name, digest in itertools.product((HOME, HELPER), digests(models, *names).values()):
            keep_profile(self.root / name, digest, SCORES_NOTHING)
        try:
            helper = self._begin(HELPER, alone, settings)
            peers = f"127.0.0.1:{helper.status()['fleet']['port']}"
            self._begin(HOME, self._plan, {**settings, **at_home, "FLEETD_FLEET_PEERS": peers})
            self.until_usable(HOME, HELPER)
            until_linked(self, HOME, HELPER)
        except BaseException:
            self.close()
            raise

    def _begin(self, name: str, plan: Path, settings: Mapping[str, str]) -> Daemon:
        module = "bench.children.planned_daemon"
        return self.start(name, module=module, BENCH_PLAN=str(plan), **_SETTINGS, **settings)

    def plan(self, word: str) -> None:
        """What home does with prompts from now on; a word of ``planned_daemon``."""
        self._plan.write_text(word, encoding="ascii")


# ---- Shared ----------------------------------------------------------------------------------------------


def _all_shared(parts: MeasuredParts, models: Path, model: str, runs: int) -> Iterator[Figure]:
    settings = {"FLEETD_CACHE_DISK": "off", "FLEETD_ENGINE_PREFIX_CACHE_BYTES": "1"}
    with Pair(models, [model], settings, {}) as pair:
        _warm(pair, model)
        for length in _lengths():
            with parts.part(f"{model}, {length:,} tokens"):
                yield from _length(parts, pair, model, length, runs)


def _warm(pair: Pair, model: str) -> None:
    """Both load it and compile their kernels, at home also those of a prompt that is shared."""
    for name in (HELPER, HOME):
        pair[name].warm(model)
        for length in _lengths():
            pair[name].complete(prompts.tokens(MODEL, 7, length), 4, model=model, local_only=True)
    pair.until_priced(HOME, [HELPER], _lengths()[0], model, _WITHIN_S)


def _length(parts: MeasuredParts, pair: Pair, model: str, length: int, runs: int) -> Iterator[Figure]:
    seen, title = Samples(), f"{model}, {length:,} tokens"
    texts: list[str] = []
    wanted = [prompts.tokens(MODEL, 72_000 + length + run, length) for run in range(runs)]
    for prompt in wanted:
        alone = pair[HOME].complete(prompt, _ANSWER_TOKENS, model=model, local_only=True)
        seen.add(alone_s=alone.began_s)
        texts.append(alone.text)
    yield Figure(
        f"TTFT of one of two daemons, {title}", "s", seen["alone_s"], note=_chosen(pair, model, length)
    )
    for kind in KINDS:
        with parts.part(f"{title}, {kind}"):
            pair.plan(kind)
            try:
                traces = [
                    _share(pair[HOME], model, prompt, text, kind, seen)
                    for prompt, text in zip(wanted, texts, strict=True)
                ]
            finally:
                pair.plan("")
            yield from _shared_figures(f"half of the {kind}, {title}", kind, traces, seen)


def _chosen(pair: Pair, model: str, length: int) -> str:
    """What the planner says of such a prompt: its choice, and why not the best other way."""
    told = json.loads(pair[HOME].control("POST", "/fleet/v1/plan", {"model": model, "tokens": length}))
    chosen, *others = told["options"]
    why = next(
        (f"; {one['kind']}: {one['reason']}" for one in others if one["kind"] in (*KINDS, "whole", "any")), ""
    )
    return f"the planner chooses {chosen['kind']}{why}"


def _share(daemon: Daemon, model: str, prompt: list[int], text: str, kind: str, seen: Samples) -> Trace:
    """One prompt with the helper's part as planned. Raises NotMeasured if it was not shared so."""
    with daemon.stream("completions", prompt=prompt, max_tokens=_ANSWER_TOKENS, model=model) as stream:
        heard, name = stream.hear(), stream.id
    trace = traced(daemon, name)
    if trace.outcome != "shared" or trace.chosen.kind != kind:
        raise NotMeasured(f"{trace.chosen.kind}, {trace.outcome}: {trace.code}: {trace.reason}")
    seen[kind, "s"].append(heard.began_s)
    seen[kind, "same"].append(float(heard.text == text))
    seen[kind, "bytes"].append(float(received(trace)))
    return trace


def received(trace: Trace) -> int:
    """Bytes of keys, values and states that came home."""
    return sum(s.n_bytes for s in trace.steps if s.machine == trace.machine and s.name == step_names.WAITED)


def _shared_figures(title: str, kind: str, traces: list[Trace], seen: Samples) -> Iterator[Figure]:
    took = [f"{s.machine} {s.name} {s.seconds:.3f} s" for s in traces[-1].steps]
    labels = ", ".join(sorted({trace.exactness for trace in traces}))
    n_bytes, seconds = seen[kind, "bytes"], [trace.prefill_s or 0.0 for trace in traces]
    yield Figure(
        f"One over two that share a card, TTFT, {title}",
        "x",
        ratios(seen["alone_s"], seen[kind, "s"]),
        note=f"label: {labels}; {'; '.join(took)}",
    )
    yield Figure(f"TTFT of two, {title}", "s", seen[kind, "s"])
    yield Figure(f"Streamed to home, {title}", "MB", [n / 1e6 for n in n_bytes])
    yield Figure(
        f"Of the whole prefill, {title}", "MB/s", [n / 1e6 / s for n, s in zip(n_bytes, seconds, strict=True)]
    )
    yield Figure(f"Answers equal to one's, {title}", "%", seen[kind, "same"], note=f"label: {labels}")


# ---- Fetched ---------------------------------------------------------------------------------------------


def _all_fetched(parts: MeasuredParts, models: Path, model: str, runs: int) -> Iterator[Figure]:
    settings = {"FLEETD_CACHE_QUOTA_BYTES": str(24 * limits.GIB)}
    with Pair(models, [model], settings, {}) as pair:
        for name in (HELPER, HOME):
            pair[name].warm(model)
        for length in _lengths():
            with parts.part(f"{model}, {length:,} tokens fetched"):
                # Gigabytes are written first.
                yield from _fetched(pair, model, length, runs if length == _lengths()[0] else 1)


def _fetched(pair: Pair, model: str, length: int, runs: int) -> Iterator[Figure]:
    seen, title = Samples(), f"{model}, {length:,} tokens"
    kept = [prompts.tokens(MODEL, 73_000 + length + run, length) for run in range(runs)]
    before = _kept(pair[HELPER])
    # A prompt that is kept to one machine is kept apart from the others' as well.
    expected = [pair[HELPER].complete(prompt, _ANSWER_TOKENS, model=model).text for prompt in kept]
    least = before + runs * (length - limits.CACHE_BLOCK_TOKENS)
    wait_for(lambda: _kept(pair[HELPER]) >= least, _WITHIN_S, 0.1, pair[HELPER].log)
    # It would be asked to answer, as it has read the prompt.
    pair[HELPER].control("POST", "/fleet/v1/models/unload", {"model": model})
    for number in range(runs + 1):
        prompt = prompts.tokens(MODEL, 74_000 + length + number, length)
        computed = pair[HOME].complete(prompt, _ANSWER_TOKENS, model=model, local_only=True)
        seen["computed_s"] = [*seen["computed_s"], computed.began_s][-runs:]
    pair.plan("fetch")
    try:
        for prompt, text in zip(kept, expected, strict=True):
            _fetch(pair[HOME], model, prompt, text, seen)
    finally:
        pair.plan("")
    yield from _fetched_figures(title, seen)


def _fetch(daemon: Daemon, model: str, prompt: list[int], text: str, seen: Samples) -> None:
    """Raises NotMeasured if the prompt did not come from the other machine."""
    with daemon.stream("completions", prompt=prompt, max_tokens=_ANSWER_TOKENS, model=model) as stream:
        heard, name = stream.hear(), stream.id
    trace = traced(daemon, name)
    step = next((step for step in trace.steps if step.name == step_names.FETCHED), None)
    if step is None or not trace.fetched_tokens:
        raise NotMeasured(f"nothing was fetched: {trace.chosen.kind}, {trace.outcome}: {trace.reason}")
    seen.add(
        fetched_s=heard.began_s,
        took_s=step.seconds,
        mb=step.n_bytes / 1e6,
        rate=step.n_bytes / 1e6 / step.seconds,
        share=trace.fetched_tokens / len(prompt),
        same=float(heard.text == text),
    )


def _fetched_figures(title: str, seen: Samples) -> Iterator[Figure]:
    yield Figure(
        f"Reading anew over fetching from the other daemon, TTFT, {title}",
        "x",
        seen.ratios("computed_s", "fetched_s"),
        note="fetched whether or not the planner would",
    )
    yield Figure(f"TTFT, read anew, {title}", "s", seen["computed_s"])
    yield Figure(f"TTFT, fetched, {title}", "s", seen["fetched_s"])
    yield Figure(f"A fetch, {title}", "s", seen["took_s"])
    yield Figure(f"Bytes of a fetch, {title}", "MB", seen["mb"])
    yield Figure(f"Rate of a fetch, {title}", "MB/s", seen["rate"])
    yield Figure(f"Tokens that were fetched, {title}", "%", seen["share"])
    yield Figure(f"Fetched answers equal to the other daemon's, {title}", "%", seen["same"])


def _kept(daemon: Daemon) -> int:
    """Tokens whose blocks are on the disk."""
    told = json.loads(daemon.control("GET", "/fleet/v1/cache"))
    return sum(int(model["block_tokens"]) for model in told["models"])


_HOW = (
    "Two paired daemons on loopback whose workers share one accelerator, each with half of what models may "
    "take there; random weights. The same prompt of token ids is kept to one, and then shared by halves of "
    "the layers and of the tokens, whether or not the planner would: on one card sharing divides the same "
    "hardware, so these figures are what it costs. TTFT is a client's. Prompts are asked once each way, "
    "after one of each length that does not count; nothing is kept of them. Then, with kept prompts: one "
    "that the other daemon has read, and unloaded, is fetched from its disk, which the system has in "
    "memory, and another one is read anew."
)
