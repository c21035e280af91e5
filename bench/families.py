"""What can be measured by name: each family's title on the page, its runs, and the scenarios behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from bench.figures import Measured, Taking
from bench.harness.machines import why_none
from bench.harness.samples import merged
from bench.scenarios import (
    agent_session,
    batching,
    block_fetching,
    card_batch,
    card_helper,
    card_models,
    card_nccl,
    card_shared,
    card_smart,
    decode,
    demo,
    dialect_sessions,
    dialects,
    drafter_beside_local,
    drafter_window,
    drafts,
    fetch_modelled,
    fleet_idle,
    fleet_meeting,
    fleet_sessions,
    fleet_work,
    forks,
    forks_fleet,
    grammar,
    groups,
    heads,
    host_time,
    hybrid_drafts,
    kept_prompts,
    lost_members,
    modelled,
    never_slower,
    padding,
    page,
    page_open,
    prefill,
    prefill_hybrid,
    prefill_no_helper,
    prefill_part,
    prefill_shared,
    prefill_three,
    prefill_unequal,
    prefill_workers,
    prompt_states,
    quantised_cpu,
    ranks,
    scoring,
    sealed_streams,
    service,
    smart_long,
    smart_prefill,
    smart_two,
    speculation,
    turns,
    vectors,
)


@dataclass(frozen=True, slots=True)
class Family:
    """``measure`` takes a number of runs; ``runs`` make a measurement, ``quick_runs`` a look. ``look``: what
    measures for a look instead, with a smaller model, if even one run takes long.

    ``code``: what it measures, and the scenario itself, as git's pathspecs; a later change makes it old.
    """

    title: str
    runs: int
    quick_runs: int
    measure: Callable[[int], Measured | Taking]
    code: tuple[str, ...]
    look: Callable[[int], Measured | Taking] | None = None


def _scenario(*names: str) -> tuple[str, ...]:
    return tuple(f"bench/scenarios/{name}.py" for name in names)


# The engine's rooms that every request passes; the others are features, which their own families name.
_ROOMS = (
    *("answer", "cpu", "daemon_side", "grammar", "layers", "load", "loop"),
    *("measure", "prefixes", "prompt", "sampling", "vision"),
)
_ENGINE = (":(glob)fleetd/engine/*.py", *(f"fleetd/engine/{room}" for room in _ROOMS))
_REQUESTS = (
    ":(glob)fleetd/requests/*.py",
    *(f"fleetd/requests/{room}" for room in ("members", "placement", "remote")),
)
_WORKER = (*_ENGINE, "fleetd/engine/speculation", "fleetd/engine/heads")
_SERVED = (*_WORKER, "fleetd/api", *_REQUESTS)
_SHARED = (
    *_ENGINE,
    "fleetd/engine/groups",
    "fleetd/engine/shared_prefill",
    "fleetd/engine/streams",
    "fleetd/sealed",
    "fleetd/plan",
    *_REQUESTS,
    "fleetd/requests/prefill_sharing",
    "bench/scenarios/prefill_*.py",
)
_GRID = (*_SHARED, "bench/scenarios/never_slower.py")
_SCORED = (
    *_ENGINE,
    "fleetd/engine/scoring",
    "fleetd/engine/sparse_prefill",
    "fleetd/compression",
    "fleetd/requests/smart_prefill",
)
_LONG = (*_SCORED, "fleetd/plan", *_scenario("smart_long", "smart_formula"), "bench/children/chunk_times.py")
_DRAFTED = (
    "fleetd/engine/speculation",
    "fleetd/engine/streams",
    "fleetd/sealed",
    "bench/children/drafter.py",
)


_SHARED_RUNS = 5


def _shared_prefill(runs: int) -> Measured:
    """Raises RuntimeError where two machines cannot be had on this one."""
    if why := why_none():
        raise RuntimeError(why)
    return merged(
        prefill_shared.measure(runs),
        prefill_workers.measure(runs, quick=runs < _SHARED_RUNS),
        prefill_unequal.measure(runs),
        prefill_no_helper.measure(runs),
    )


def _fleet(runs: int) -> Measured:
    parts = (fleet_meeting, fleet_sessions, fleet_idle, fleet_work)
    return merged(*(part.measure(runs) for part in parts))


_FETCHED = (
    *_SERVED,
    "fleetd/cache",
    "fleetd/sealed",
    "fleetd/requests/kv_fetching",
    *_scenario("block_fetching"),
)
#: By name on the command line, in the order of the page.
FAMILIES = {
    "demo": Family(
        "From a fresh clone to an answer",
        1,
        1,
        demo.measure,
        ("Makefile", "demo", "pyproject.toml", "fleetd", "fleetctl", *_scenario("demo")),
    ),
    "decode": Family("Decode through HTTP", 7, 2, decode.measure, (*_SERVED, *_scenario("decode"))),
    "groups": Family(
        "A model over two machines",
        5,
        1,
        groups.measure,
        (
            *_WORKER,
            *("fleetd/engine/groups", "fleetd/engine/streams", "fleetd/sealed"),
            *_scenario("groups"),
        ),
    ),
    "lost-members": Family(
        "A member of a group is lost",
        3,
        1,
        lost_members.measure,
        (
            *_SERVED,
            "fleetd/engine/groups",
            "fleetd/engine/streams",
            "fleetd/p2p",
            "fleetd/requests/groups",
            *_scenario("lost_members"),
        ),
    ),
    "ranks": Family(
        "A model whose layers are divided between two machines",
        5,
        1,
        ranks.measure,
        (
            *_WORKER,
            *("fleetd/engine/groups", "fleetd/engine/ranks", "fleetd/engine/streams", "fleetd/sealed"),
            *("fleetd/p2p/tunnel.py", "fleetd/requests/ranks"),
            *_scenario("ranks"),
            *(f"bench/children/{child}.py" for child in ("mlx_ring", "ring_daemon", "ring_sum")),
        ),
    ),
    "vectors": Family(
        "Vectors of texts",
        3,
        1,
        vectors.measure,
        (
            *_SERVED,
            "fleetd/engine/vectors",
            "fleetd/requests/vectors",
            *_scenario("vectors"),
            "bench/harness/onnx_bert.py",
        ),
    ),
    "batching": Family("Eight streams at once", 3, 1, batching.measure, (*_SERVED, *_scenario("batching"))),
    "prefill": Family("Prefill on the CPU", 5, 1, prefill.measure, (*_WORKER, *_scenario("prefill"))),
    "quantised": Family(
        "Quantised weights on a CPU",
        3,
        1,
        quantised_cpu.measure,
        (*_WORKER, *_scenario("quantised_cpu"), "bench/harness/random_gguf.py"),
    ),
    "turns": Family("Second turn of a chat", 5, 1, turns.measure, (*_SERVED, *_scenario("turns"))),
    "dialects": Family(
        "Dialects beside OpenAI's chat",
        9,
        1,
        lambda runs: merged(dialects.measure(runs), dialect_sessions.measure()),
        (*_SERVED, *_scenario("dialects"), *_scenario("dialect_sessions")),
    ),
    "kept": Family(
        "Prompts kept on the disk",
        5,
        1,
        kept_prompts.measure,
        (*_SERVED, "fleetd/cache", "fleetd/sealed", *_scenario("kept_prompts")),
    ),
    "session": Family(
        "A coding session",
        2,
        1,
        agent_session.measure,
        (
            *_SERVED,
            "fleetd/cache",
            "fleetd/plan",
            "fleetd/requests/kv_fetching",
            "bench/harness/agent_session.py",
            *_scenario("agent_session"),
        ),
    ),
    "fetch": Family(
        "Prompts from another machine's disk",
        10,
        3,
        block_fetching.measure,
        _FETCHED,
    ),
    "fetch-slow": Family(
        "A prompt that another machine has read, over a slow link",
        5,
        2,
        block_fetching.measure_slow,
        _FETCHED,
    ),
    "fetch-modelled": Family(
        "Prompts from another machine's disk, as the planner predicts them",
        1,
        1,
        fetch_modelled.measure,
        ("fleetd/plan", "fleetd/cache/pricing.py", *_scenario("fetch_modelled")),
    ),
    "forks": Family("Prompts that begin alike", 5, 1, forks.measure, (*_SERVED, *_scenario("forks"))),
    "forks-fleet": Family(
        "Forks over three machines",
        3,
        1,
        forks_fleet.measure,
        (*_SERVED, "fleetd/cache", "fleetd/plan", "fleetd/requests/kv_fetching", *_scenario("forks_fleet")),
    ),
    "service": Family("The daemon", 10, 3, service.measure, ("fleetd", "fleetctl", *_scenario("service"))),
    "page": Family(
        "The page", 5, 1, page.measure, ("fleetd/api/page", "fleetd/api/control", *_scenario("page"))
    ),
    "page-open": Family(
        "The page, left open (a run is a minute)",
        60,
        1,
        page_open.measure,
        ("fleetd/api/page", "fleetd/api/control", *_scenario("page_open")),
    ),
    "streams": Family(
        "Sealed streams", 10, 3, sealed_streams.measure, ("fleetd/sealed", *_scenario("sealed_streams"))
    ),
    "fleet": Family(
        "The fleet",
        10,
        2,
        _fleet,
        ("fleetd/p2p", "fleetd/sealed", *_REQUESTS, "bench/scenarios/fleet_*.py"),
    ),
    "shard": Family("Shared prefill", _SHARED_RUNS, 1, _shared_prefill, _SHARED),
    "shard-three": Family("Shared prefill, three machines", 3, 1, prefill_three.measure, _SHARED),
    "shard-hybrid": Family(
        "Shared prefill of a hybrid of Qwen 3.5's shape", 3, 1, prefill_hybrid.measure, _SHARED
    ),
    "shard-part": Family(
        "Shared prefill, a helper with half of the layers", 3, 1, prefill_part.measure, _SHARED
    ),
    "never-slower": Family(
        "Shared prefill, never slower",
        never_slower.RUNS,
        1,
        partial(never_slower.measure, code=_GRID),
        _GRID,
    ),
    "smart": Family(
        "Smart prefill, a small model in front of a large one",
        3,
        1,
        smart_prefill.measure,
        (*_SCORED, *_scenario("smart_prefill")),
    ),
    "smart-16k": Family(
        "Smart prefill of 16,000 tokens",
        1,
        1,
        smart_long.measure_16k,
        _LONG,
        smart_long.look_at_16k,
    ),
    "smart-32k": Family(
        "Smart prefill of 32,000 tokens and, modelled, more",
        1,
        1,
        smart_long.measure_32k,
        _LONG,
        smart_long.look_at_32k,
    ),
    "smart-two": Family(
        "Smart prefill whose rest two machines share",
        1,
        1,
        smart_two.measure,
        (*_LONG, *_SHARED, *_scenario("smart_two")),
        smart_two.look,
    ),
    "smart-score": Family("Scoring a prompt", 3, 1, scoring.measure, (*_SCORED, *_scenario("scoring"))),
    "drafts": Family("Drafts from another worker", 3, 1, drafts.measure, (*_DRAFTED, *_scenario("drafts"))),
    "drafts-beside": Family(
        "A drafter on another machine, beside local drafts",
        3,
        1,
        drafter_beside_local.measure,
        (
            *_DRAFTED,
            *_scenario("drafter_beside_local"),
            "bench/children/fitted_layers.py",
            "eval/cut_fitting.py",
        ),
    ),
    "spec": Family("Speculative decoding", 3, 1, speculation.measure, (*_WORKER, *_scenario("speculation"))),
    "heads": Family("A head that drafts for its model", 3, 1, heads.measure, (*_WORKER, *_scenario("heads"))),
    "grammar": Family(
        "Answers held to a schema",
        5,
        1,
        grammar.measure,
        (*_WORKER, "bench/children/host_time.py", "bench/children/grammar_masks.py", *_scenario("grammar")),
    ),
    "states": Family(
        "States of a hybrid at earlier tokens",
        7,
        1,
        prompt_states.measure,
        (
            "fleetd/engine/prompt/contents.py",
            "fleetd/engine/layers/prefill.py",
            "fleetd/engine/prefixes/prefix_cache.py",
            "fleetd/engine/prompt/prompt_encoding.py",
            "fleetd/engine/sequence_state",
            *_scenario("prompt_states"),
            "bench/children/hybrid_model.py",
            "bench/children/prompt_states.py",
        ),
    ),
    "spec-window": Family(
        "Drafters of long texts",
        3,
        1,
        drafter_window.measure,
        (*_WORKER, *_scenario("drafter_window"), "bench/children/drafter_window.py"),
    ),
    "spec-hybrid": Family(
        "Speculative decoding of a hybrid",
        5,
        1,
        hybrid_drafts.measure,
        (*_WORKER, *_scenario("hybrid_drafts"), "bench/children/hybrid_model.py"),
    ),
    "host-time": Family("Host time of a token", 9, 2, host_time.measure, (*_WORKER, *_scenario("host_time"))),
    "modelled": Family(
        "Others' figures, as the planner predicts them",
        1,
        1,
        modelled.measure,
        ("fleetd/plan", *_scenario("modelled")),
    ),
    "padding": Family(
        "The price of exactness on a CPU",
        5,
        1,
        padding.measure,
        ("fleetd/engine/cpu/products.py", *_scenario("padding")),
    ),
    "card-models": Family(
        "Models of several kinds on an accelerator",
        1,
        1,
        card_models.measure,
        ("fleetd/proof", *_WORKER, "fleetd/engine/shared_prefill", *_scenario("card_models")),
    ),
    "card-verdicts": Family(
        "Whether blocks have the bytes of single steps, on an accelerator",
        1,
        1,
        card_models.verdicts,
        ("fleetd/proof", *_WORKER, *_scenario("card_models")),
    ),
    "card-batch": Family(
        "Several answers at once on an accelerator",
        2,
        1,
        card_batch.measure,
        (*_SERVED, *_scenario("card_batch")),
    ),
    "card-shared": Family(
        "Two daemons on one accelerator",
        2,
        1,
        card_shared.measure,
        (*_FETCHED, *_SHARED, *_scenario("card_shared")),
    ),
    "card-smart": Family(
        "Smart prefill on an accelerator", 1, 1, card_smart.measure, (*_SCORED, *_scenario("card_smart"))
    ),
    "card-helper": Family(
        "A helper with an accelerator for a home without one",
        1,
        1,
        card_helper.measure,
        (*_SHARED, *_scenario("card_helper")),
    ),
    "card-nccl": Family("mlx.distributed by NCCL", 1, 1, card_nccl.measure, _scenario("card_nccl")),
}
# Measured only when named: one downloads everything anew, the others are for a machine with a GPU.
ON_REQUEST = {"demo", "heads", *(name for name in FAMILIES if name.startswith("card-"))}


def needs_default_model(name: str) -> bool:
    """Whether a family measures the default model; the others take its tokenizer at most."""
    return name not in {"demo", "host-time"} and not name.startswith("card-")
