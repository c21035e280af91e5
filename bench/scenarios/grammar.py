"""Answers that are held to a schema: what the masks cost, and what forced tokens bring."""

from __future__ import annotations

import random
import statistics
from typing import Any

from bench.figures import Figure, Measured, alternated, at_least, at_most, percentile
from bench.harness.child import Child
from bench.harness.daemon import MODEL, Daemon
from bench.harness.samples import Samples

# A step of a model that a person would use.
STEP_S = 0.020
TOKENS, PROMPT, STREAMS = 512, 40, 4
VOCABULARY = 49_152

CONTACT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "city": {"type": "string"},
        "email_address": {"type": "string"},
        "favourite_colours": {
            "type": "array",
            "items": {"enum": ["red", "green", "blue"]},
            "maxItems": 3,
        },
        "is_customer": {"type": "boolean"},
    },
    "required": ["name", "age", "city", "email_address", "favourite_colours", "is_customer"],
    "additionalProperties": False,
}
_PERSON = {
    "name": "Ada Example",
    "age": 36,
    "city": "Paris",
    "email_address": "ada@example.com",
    "favourite_colours": ["red", "blue"],
    "is_customer": True,
}
_NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "contacts": {"type": "array", "items": {"$ref": "#/$defs/contact"}},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        "kind": {"type": "string", "pattern": "^[a-z]+(-[a-z]+)*$"},
        "scores": {"type": "object", "additionalProperties": {"type": "number"}},
    },
    "required": ["contacts", "next", "kind", "scores"],
    "$defs": {"contact": CONTACT},
}
_TREE = {
    "contacts": [_PERSON, _PERSON],
    "next": {"contacts": [], "next": None, "kind": "a-b", "scores": {}},
    "kind": "first-of-two",
    "scores": {"taste": 0.25, "smell": -3.5e2, "overall quality": 17},
}


def measure(runs: int) -> Measured:
    seen = Samples()
    with Child("host_time", "async", str(MODEL), str(VOCABULARY)) as child:
        for run in range(runs + 1):
            for temperature, streams in ((0.0, 1), (0.8, 1), (0.0, STREAMS)):
                for side in alternated(run, ("free", "held")):
                    said = _ask(child, run, temperature, streams, held=side == "held")
                    if run:  # the first run warms up
                        seen[side, temperature, streams].append(said["each_s"])
    masks = _masks()
    with Daemon() as daemon:
        daemon.warm()
        for run in range(runs):
            for side in alternated(run, ("none", "others", "all")):
                seen[side].append(_answer_s(daemon, run, side))
    return Measured([*_costs(seen), *masks, *_forced(seen)], _HOW)


def _ask(child: Child, run: int, temperature: float, streams: int, *, held: bool) -> dict[str, Any]:
    dice = random.Random(run)
    prompts = [[dice.randrange(VOCABULARY) for _ in range(PROMPT)] for _ in range(streams)]
    return child.ask(
        prompts=prompts, max_tokens=TOKENS, temperature=temperature, side="fleetd", drafts=False, held=held
    )


def _costs(seen: Samples) -> list[Figure]:
    figures = []
    for title, temperature, streams in (
        ("alone, greedy", 0.0, 1),
        ("alone, temperature 0.8", 0.8, 1),
        (f"{STREAMS} answers, greedy, each", 0.0, STREAMS),
    ):
        pairs = zip(seen["held", temperature, streams], seen["free", temperature, streams], strict=True)
        more = [(held - free) / STEP_S for held, free in pairs]
        figures.append(
            Figure(
                f"A token held to a grammar, {title}: what it takes longer, share of a 20 ms step",
                "%",
                more,
                at_most(0.02),
                note=f"{1e6 * STEP_S * statistics.median(more):.0f} µs",
            )
        )
    return figures


def _masks() -> list[Figure]:
    with Child("grammar_masks", str(MODEL)) as child:
        said = [child.ask(schema=CONTACT, answer=_PERSON), child.ask(schema=_NESTED, answer=_TREE)]
    each_ms = [1e3 * each for one in said for each in one["each_s"]]
    tokens = said[0]["tokens"]
    return [
        Figure(f"A mask over {tokens:,} tokens, p50", "ms", [percentile(each_ms, 0.5)]),
        Figure(f"A mask over {tokens:,} tokens, p99", "ms", [percentile(each_ms, 0.99)], at_most(2.0)),
        Figure("A schema, compiled", "ms", [1e3 * one["compile_s"] for one in said], at_most(1e3), "worst"),
        Figure("The token table, once per loaded model", "s", [said[0]["table_s"]]),
    ]


def _answer_s(daemon: Daemon, run: int, side: str) -> float:
    """Seconds from the first to the last token of one answer."""
    sources = {"none": False, "others": {"sources": ["suffix", "lookup"]}, "all": True}[side]
    talk = [{"role": "user", "content": f"Invent person number {run} and describe them as JSON."}]
    heard = daemon.chat(
        talk,
        120,
        temperature=0,
        speculate=sources,
        response_format={"type": "json_schema", "json_schema": {"name": "contact", "schema": CONTACT}},
    )
    return float(heard.timings["predicted_ms"]) / 1000


def _forced(seen: Samples) -> list[Figure]:
    return [
        Figure(
            "A JSON answer with forced tokens, times as fast as without them",
            "x",
            seen.ratios("others", "all"),
            at_least(1.3),
            note="other drafts are on beside both",
        ),
        Figure("The same, beside no drafts at all", "x", seen.ratios("none", "all")),
        Figure("A JSON answer with forced tokens", "s", seen["all"]),
    ]


_HOW = (
    "Costs: one process, a model of 2 layers that are 64 wide with the default model's vocabulary, whose "
    f"compute is next to nothing, answers of {TOKENS} tokens with and without a grammar that allows any "
    "text; MLX computes in a thread of its own, as a GPU does. Masks: two schemas and answers to them, "
    "tokens of the default model, one mask after the other. Answers: a daemon, the default model, a schema "
    "of six properties, greedy; from the first token to the last, with all drafts, without forced tokens, "
    "and without drafts."
)
