"""A prompt that another machine has read: fetching its keys and values against computing them.

Over loopback all of them are waited for, once from files that the system has in memory and once from the
disk; the benchmark decides which, or the minutes since they were written would. Over a link that carries them
no sooner than they are computed, the last ones come first while the first ones are computed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from bench.figures import Figure, Measured, alternated, at_least, at_most, percentile
from bench.harness import page_cache, prompts
from bench.harness.client import Heard
from bench.harness.daemon import MODEL, Daemon
from bench.harness.fleet import Fleet
from bench.harness.network import Cable, Link
from bench.harness.samples import Samples, wait_for
from fleetd import limits
from fleetd.models.catalog import DEFAULT_MODEL

_KEEPING, _ASKING = "keeping", "asking"
# Nothing else listens in a namespace of its own.
_PORT = 7741
TOKENS = 4000
_KNOWN_WITHIN_S = 120.0
# The first fetches from each state, by which the link, the other machine's disk and the way between are
# measured.
_FIRST = 2
_SLOW = Link("100 Mbit/s", bits_per_s=100e6)


def measure(runs: int) -> Measured:
    with Fleet([_KEEPING, _ASKING]) as fleet:
        seen = _compare(runs, fleet, page_cache.STATES, {}, {})
    return Measured(_figures(seen), _HOW)


def measure_slow(runs: int) -> Measured:
    with Cable(_SLOW) as cable, Fleet([_KEEPING, _ASKING], mdns=False) as fleet:
        there, here = cable.ends
        known = {"FLEETD_FLEET_LISTEN": f"{there.address}:{_PORT}"}
        asking = {
            "FLEETD_FLEET_LISTEN": f"{here.address}:0",
            "FLEETD_FLEET_PEERS": f"{there.address}:{_PORT}",
        }
        at = {"enter": there.enter} | known, {"enter": here.enter} | asking
        seen = _compare(runs, fleet, ("warm",), *at)
    return Measured(_slow_figures(seen), _SLOW_HOW)


def _compare(
    runs: int, fleet: Fleet, states: Sequence[page_cache.State], at_keeping: Any, at_asking: Any
) -> Samples:
    """``at_keeping``, ``at_asking``: how the two are started, besides what is usual."""
    seen = Samples()
    # Alone, or the other one might answer some.
    keeping = fleet.start(_KEEPING, **at_keeping)
    keeping.warm()
    kept = [_prompt(number) for number in range(len(states) * (_FIRST + runs))]
    expected = [_ask(keeping, prompt).text for prompt in kept]
    wait_for(
        lambda: _kept(keeping) >= len(kept) * (TOKENS - limits.CACHE_BLOCK_TOKENS),
        _KNOWN_WITHIN_S,
        0.1,
        keeping.log,
    )
    keeping.control("POST", "/fleet/v1/models/unload", {"model": DEFAULT_MODEL})
    asking = fleet.start(_ASKING, **at_asking)
    fleet.until_usable(_KEEPING, _ASKING)
    asking.warm()
    wait_for(lambda: _known(fleet), _KNOWN_WITHIN_S, 0.1, asking.log)
    blocks = keeping.home / "cache" / "kv" / "blocks"
    left = iter(zip(kept, expected, strict=True))
    for _ in range(_FIRST):
        for state in states:
            page_cache.bring(blocks, state)
            _ask(asking, next(left)[0])
    for run in range(runs):
        for side in alternated(run, (*states, "computed")):
            if side == "computed":
                computed = _ask(asking, _prompt(1000 + run), local_only=True)
                seen[side].append(computed.began_s)
                continue
            prompt, text = next(left)
            page_cache.bring(blocks, "cold" if side == "cold" else "warm")
            _fetch(asking, prompt, side, text, seen)
        disk, link = _report(keeping), fleet.peer(_ASKING, _KEEPING)
        seen.add(
            disk=disk["read_bytes_per_s"] / 1e6,
            cached=disk["cached_bytes_per_s"] / 1e6,
            link=(link["bytes_per_s"] or 0.0) / 1e6,
        )
    return seen


def _fetch(asking: Daemon, prompt: list[int], side: str, text: str, seen: Samples) -> None:
    """One prompt, and how far what its fetch took was from its prediction."""
    before = _machine(asking)
    heard = _ask(asking, prompt)
    after = _machine(asking)
    took_s, predicted_s = (after[name] - before[name] for name in ("took_s", "predicted_s"))
    seen[side].append(heard.began_s)
    seen[side, "tokens"].append(float(heard.timings.get("fetched_n", 0)) / TOKENS)
    seen[side, "took"].append(took_s * 1000)
    seen[side, "predicted"].append(predicted_s * 1000)
    seen[side, "error"].append(abs(took_s / predicted_s - 1) if predicted_s else 1.0)
    seen[side, "same"].append(float(heard.text == text))


def _prompt(number: int) -> list[int]:
    return prompts.tokens(MODEL, 60_000 + number, TOKENS)


def _ask(daemon: Daemon, prompt: list[int], **body: Any) -> Heard:
    return daemon.complete(prompt, 8, **body)


def _report(daemon: Daemon) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(daemon.control("GET", "/fleet/v1/cache"))
    return told


def _machine(daemon: Daemon) -> dict[str, float]:
    """What came from the other machine so far."""
    nothing = {"took_s": 0.0, "predicted_s": 0.0}
    return next((each for each in _report(daemon)["machines"] if each["machine"] == _KEEPING), nothing)


def _kept(daemon: Daemon) -> int:
    return sum(model["block_tokens"] for model in _report(daemon)["models"])


def _known(fleet: Fleet) -> bool:
    """True once the asking machine knows that the other one has the model unloaded."""
    found = [m for m in fleet.peer(_ASKING, _KEEPING)["models"] if m["name"] == DEFAULT_MODEL]
    return bool(found) and found[0]["state"] == "installed" and bool(found[0]["digest"])


_FROM = {"warm": "from memory", "cold": "from the disk"}


def _figures(seen: Samples) -> list[Figure]:
    found = [
        Figure(
            f"{TOKENS:,} tokens fetched over loopback: TTFT of computing them, over that of fetching",
            "x",
            seen.ratios("computed", "warm"),
            at_least(3),
        )
    ]
    found += [
        Figure(
            f"Time of a fetch {_FROM[state]} against its prediction, ninth of ten",
            "%",
            [percentile(seen[state, "error"], 0.9)],
            at_most(0.25),
        )
        for state in page_cache.STATES
    ]
    tokens, same = (
        [x for state in page_cache.STATES for x in seen[state, name]] for name in ("tokens", "same")
    )
    found += [
        Figure("Tokens that were fetched", "%", tokens, at_least(0.95), of="worst"),
        Figure("Fetched answers equal to the other machine's", "%", same, at_least(1.0), of="worst"),
        Figure("TTFT, computed", "s", seen["computed"]),
    ]
    for state in page_cache.STATES:
        found += [
            Figure(f"TTFT, fetched {_FROM[state]}", "s", seen[state]),
            Figure(f"A fetch {_FROM[state]}", "ms", seen[state, "took"]),
            Figure(f"The same, predicted {_FROM[state]}", "ms", seen[state, "predicted"]),
        ]
    return [*found, *_parts(seen)]


def _parts(seen: Samples) -> list[Figure]:
    """Of what predictions are made."""
    return [
        Figure("The other machine reads its disk at", "MB/s", seen["disk"]),
        Figure("It reads files that are in memory at", "MB/s", seen["cached"]),
        Figure("The link carries", "MB/s", seen["link"]),
    ]


def _slow_figures(seen: Samples) -> list[Figure]:
    return [
        Figure(
            f"{TOKENS:,} tokens over {_SLOW.title}: TTFT of computing all, over that of doing both",
            "x",
            seen.ratios("computed", "warm"),
            at_least(1.0),
        ),
        Figure(
            "Time of such a fetch against its prediction, ninth of ten",
            "%",
            [percentile(seen["warm", "error"], 0.9)],
        ),
        Figure("Tokens that came", "%", seen["warm", "tokens"]),
        Figure(
            "Such answers equal to the other machine's", "%", seen["warm", "same"], at_least(1.0), of="worst"
        ),
        Figure("TTFT, computed", "s", seen["computed"]),
        Figure("TTFT, computed from the beginning while the end comes", "s", seen["warm"]),
        *_parts(seen),
    ]


_SLOW_HOW = (
    f"As `fetch`, with a cable of {_SLOW.title} between the two machines, each in a network namespace (the "
    "kernel's token buckets). The prompt is computed from its beginning while its blocks come from the end. "
    "All files are in the system's memory."
)
_HOW = (
    f"Two daemons on loopback and the default model; prompts of {TOKENS:,} token ids, greedy. One machine "
    "reads them all, then unloads the model: it only keeps its disk. The other one is asked the same "
    "prompts, and, by turns, new ones with `local_only`, which it computes. Before each fetch all files of "
    "the machine that keeps them are read, so that the system has them in memory, or are thrown out of it "
    "(after fsync, `posix_fadvise`), where the system can do that. Both times run from the decision to the "
    "last byte. The prediction is that by which the fetch was decided, once the blocks were counted, with "
    f"what was learned of earlier ones; {_FIRST} fetches from either state come before, by which link, disk "
    "and the way between are measured."
)
