"""Workers that share prefills: real processes, real sockets, a tiny model; only the daemons are played here.

Whatever happens to a helper, the answer is the one that this machine gives alone, to the last bit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from own_resources import POOL_THREADS, grown, of_worker
from request_events import RequestEvents
from sharing import (
    CHUNK,
    LAYERS,
    Sharing,
    prompt,
    settle,
    split_of,
    workers,
    write,
)

from fleetd import limits
from fleetd.engine.daemon_side.supervisor import EngineProcess
from fleetd.engine.protocol import (
    Assisted,
    AssistPrefill,
    Delta,
    Generate,
    Prefill,
    PrefillWithHelpers,
)
from fleetd.errors import FleetError, InvalidValue, OutOfMemory, Overloaded, PeerError
from fleetd.plan.prefill.split import Split

pytestmark = pytest.mark.one_loop
# Rows of about this many tokens of two layers have come from the helper, and more are due.
MIDWAY_BYTES = 200_000
TRIES = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tiny"))


async def alone(engine: EngineProcess, request: Generate) -> list[Any]:
    """The numbers of the same request where nobody helps."""
    told = RequestEvents()
    request = Generate(
        f"{request.id} alone",
        request.prompt,
        request.sampling,
        request.max_tokens,
        top_logprobs=request.top_logprobs,
        keep=request.keep,
    )
    async for event in engine.stream(request):
        told.events.append(event)
    return told.numbers


def idle(*engines: EngineProcess) -> bool:
    """As last told."""
    seen = [engine.status for engine in engines]
    return all(status.kv_bytes == status.assisting == status.prefilling == 0 for status in seen)


async def warm(engine: EngineProcess) -> dict[str, int]:
    """Its resources once the threads that its first requests start are there.

    Attention's own start one by one, when there are more blocks of queries than idle threads.
    """
    await alone(engine, prompt("warm", 1500, seed=99))
    return of_worker(engine.pid)


def held_no_more(engines: Sequence[EngineProcess], before: Sequence[dict[str, int]]) -> bool:
    held = [of_worker(engine.pid) for engine in engines]
    return not any(grown(*each, POOL_THREADS) for each in zip(held, before, strict=True))


async def refused(engine: EngineProcess, assist: AssistPrefill) -> Exception | None:
    try:
        await anext(engine.assist(assist))
    except FleetError as error:
        return error
    return None


async def test_a_shared_prefill_gives_the_answer_of_this_machine_alone(model: Path) -> None:
    async with workers(model, 3) as (home, *helpers):
        before = [await warm(engine) for engine in (home, *helpers)]
        assert home.facts is not None
        assert home.facts.shape.unshareable == ""
        assert (home.facts.first_layer, home.facts.last_layer, home.facts.shape.layers) == (0, LAYERS, LAYERS)
        assert home.facts.arithmetic is not None
        assert home.facts.arithmetic.layers == helpers[0].facts.arithmetic.layers  # type: ignore[union-attr]
        ways = [
            ("layers", (0.5,)),
            ("layers", (1.0,)),
            ("layers", (0.25, 0.75)),
            ("tokens", (0.5,)),
            ("tokens", (1.0,)),
            ("tokens", (0.25, 0.75)),
        ]
        for seed, (kind, cuts) in enumerate(ways):
            sharing = Sharing(home, helpers[: len(cuts)], prompt(f"r{seed}", 600, seed))
            told = await sharing.run(kind, cuts)
            accepted = await sharing.wait()
            assert (accepted.waits, accepted.cached, accepted.chunk, accepted.exact) == (True, 0, CHUNK, True)
            assert (told.error, told.shared.code) == (None, "")
            assert sharing.assisted(), [a.error for a in sharing.assists]
            assert told.numbers == await alone(helpers[0], sharing.request)
            assert [e.done for e in told.of(Prefill)][-1] == 599
            assert told.finished.usage.prompt_tokens == 600
        # A following turn has its beginning here already, and the rest is shared.
        again = Sharing(home, helpers[:1], prompt("again", 1200, seed=2))
        told = await again.run("tokens")
        assert (await again.wait()).cached == told.finished.usage.cached_tokens == 600
        assert told.numbers == await alone(helpers[1], again.request)
        # What the relay lets through is of use once the worker has read and checked it; nobody tells when.
        for attempt in range(TRIES):
            if await _given_up_midway(home, helpers[0], f"midway {attempt}", 100 + attempt):
                break
        else:
            pytest.fail("nothing that a helper sent was verified before it was given up")
        await settle(lambda: idle(home, *helpers))
        await settle(lambda: held_no_more((home, *helpers), before))


async def _given_up_midway(home: EngineProcess, helper: EngineProcess, name: str, seed: int) -> int:
    """A prompt whose helper is given up midway; returns how many tokens were verified by then."""
    sharing = Sharing(home, [helper], prompt(name, 1500, seed))
    await sharing.begin("layers", hold_after=MIDWAY_BYTES)
    await sharing.held()
    await sharing.computed.wait()
    home.alone(sharing.request.id, "helper0 left the fleet")
    await sharing.tasks[0]
    told = sharing.told
    assert (told.error, told.shared.code) == (None, "peer_unreachable")
    verified: int = told.shared.verified
    assert told.numbers == await alone(helper, sharing.request)
    assert told.of(Prefill)[-1].done == told.of(Prefill)[-1].total - 1 == 1499
    await sharing.end()
    # All of it is known from then on.
    again = Sharing(home, [], prompt(f"{name} again", 1500, seed, shared=False))
    await again.end()
    assert again.told.finished.usage.cached_tokens == 1499
    return verified


async def test_a_hybrid_is_shared_and_its_states_are_counted(tmp_path: Path) -> None:
    """Qwen 3.5's kind: two of four layers keep a running state, which comes home at the prompt's end."""
    path = write(tmp_path, "qwen3_5")
    async with workers(path) as (home, helper):
        facts = home.facts
        assert facts is not None
        assert facts.shape.unshareable == ""
        assert facts.shape.sizes.state_bytes > 0
        assert facts.sparse.startswith("A qwen3_5 model computes every token of a prompt")
        for number, kind in enumerate(("layers", "tokens")):
            request = prompt(f"hybrid{number}", 400, seed=number)
            told = await Sharing(home, [helper], request).run(kind)
            assert (told.error, told.shared.code) == (None, "")
            assert told.numbers == await alone(helper, request)


async def test_three_prompts_at_once_while_another_answer_runs(model: Path) -> None:
    async with workers(model) as (home, helper):
        running = Sharing(home, [], prompt("running", 20, max_tokens=3000, shared=False))
        await running.decoding.wait()
        sharings = [Sharing(home, [helper], prompt(f"r{n}", 600, n)) for n in range(3)]
        accepted = [await sharing.wait() for sharing in sharings]
        splits = [split_of("layers" if n % 2 else "tokens", a) for n, a in enumerate(accepted)]
        for sharing, split in zip(sharings, splits, strict=True):
            await sharing.agree(split)
        # One more than a machine helps with; nobody waits for it.
        refused = [sharing for sharing in sharings if sharing.assists[0].error is not None]
        assert len(refused) == 1
        assert isinstance(refused[0].assists[0].error, Overloaded)
        shown = len(running.told.of(Delta))
        for sharing, split in zip(sharings, splits, strict=True):
            if sharing in refused:
                home.alone(sharing.request.id)
            else:
                await sharing.connect(split)
                home.share(PrefillWithHelpers(sharing.request.id, split, 10.0, True))
        for sharing in sharings:
            await sharing.end()
        assert len(running.told.of(Delta)) > shown + 3
        for sharing in sharings:
            assert sharing.told.error is None
            assert (
                [s.code for s in sharing.told.of(type(sharing.told.shared))] == [""]
                if (sharing not in refused)
                else sharing.told.events
            )
        running.tasks[0].cancel()
        for sharing in sharings:
            assert sharing.told.numbers == await alone(helper, sharing.request)
        await settle(lambda: idle(home, helper))


@pytest.mark.parametrize("kind", ["layers", "tokens"])
async def test_the_same_prompt_goes_on_from_what_helpers_computed_for_the_first(
    model: Path, kind: str
) -> None:
    async with workers(model) as (home, helper):
        first = Sharing(home, [helper], prompt("first", 600, seed=3))
        split = split_of(kind, await first.wait())
        second = Sharing(home, [], prompt("second", 600, seed=3))
        assert not (await second.wait()).waits, "it was offered to helpers, and is being read already"
        await first.agree(split)
        await first.connect(split)
        home.share(PrefillWithHelpers(first.request.id, split, 10.0, True))
        for sharing in (first, second):
            await sharing.end()
        assert first.assisted()
        assert (first.told.shared.code, second.told.error) == ("", None)
        assert second.told.finished.usage.cached_tokens == 599
        assert first.told.numbers == second.told.numbers == await alone(helper, first.request)
        await settle(lambda: idle(home, helper))


async def test_what_is_too_short_or_scored_is_not_offered(model: Path) -> None:
    async with workers(model, 1) as (home,):
        short = Sharing(home, [], prompt("short", limits.SHARE_LEAST_TOKENS))
        scored = Sharing(home, [], prompt("scored", 400, echo=True))
        for sharing in (short, scored):
            assert not (await sharing.wait()).waits
            await sharing.end()
            assert sharing.told.finished.usage.completion_tokens > 0


@pytest.mark.long
async def test_cancelling_either_side_leaves_nothing_behind(model: Path) -> None:
    async with workers(model) as (home, helper):
        before = await warm(home), await warm(helper)
        for seed, kind in enumerate(("layers", "tokens")):
            asked = Sharing(home, [helper], prompt(f"asked {kind}", 1500, seed))
            await asked.begin(kind, hold_after=MIDWAY_BYTES)
            await asked.held()
            await settle(lambda: not idle(home))
            asked.tasks[0].cancel()
            asked.relays[0].close()
            await asyncio.wait(asked.tasks)
            assert asked.assists[0].of(Assisted) or isinstance(asked.assists[0].error, PeerError)
            assisted = Sharing(home, [helper], prompt(f"assisted {kind}", 1500, 10 + seed))
            await assisted.begin(kind, predicted_s=1000.0, hold_after=MIDWAY_BYTES)
            await assisted.held()
            assisted.tasks[1].cancel()
            await asyncio.wait(assisted.tasks[1:])
            assisted.relays[0].close()
            await assisted.tasks[0]
            assert assisted.told.shared.code == "peer_lost"
            assert assisted.told.numbers == await alone(helper, assisted.request)
        # Before there is any word, and before there are streams.
        for name in ("undecided", "no streams"):
            sharing = Sharing(home, [helper], prompt(name, 600, seed=20))
            split = split_of("layers", await sharing.wait())
            await sharing.agree(split)
            if name == "no streams":
                await sharing.connect(split, leave_out="home")
                home.share(PrefillWithHelpers(name, split, 5.0))
            for task in sharing.tasks:
                task.cancel()
            await asyncio.wait(sharing.tasks)
        await settle(lambda: idle(home, helper))
        await settle(lambda: held_no_more((home, helper), before))


async def test_numbers_of_another_accelerator_are_never_part_of_an_exact_answer(model: Path) -> None:
    async with workers(model) as (home, helper):
        first = Sharing(home, [helper], prompt("first", 600))
        await first.run("layers", exact=False)
        exact = Sharing(home, [], prompt("exact", 600, shared=False))
        await exact.end()
        assert exact.told.finished.usage.cached_tokens == 0
        # That answer is kept too, and serves before the other; with another prompt only the other is there.
        other = Sharing(home, [helper], prompt("other", 700, seed=9))
        await other.run("tokens", exact=False)
        longer = Sharing(home, [helper], prompt("longer", 1400, seed=9))
        accepted = await longer.wait()
        assert (accepted.cached, accepted.exact) == (700, False)
        await longer.run("layers")
        assert longer.told.shared.code == ""
        fresh = Sharing(home, [], prompt("fresh", 1400, seed=9, shared=False))
        await fresh.end()
        assert fresh.told.finished.usage.cached_tokens == 0


async def test_an_assist_that_makes_no_sense_is_refused_before_it_takes_memory(model: Path) -> None:
    async with workers(model, 1, max_memory_bytes=(512 << 20) + (12 << 20)) as (helper,):
        good = Split("layers", (0, 2, 4), LAYERS, 0, 600, CHUNK)
        senseless: list[tuple[AssistPrefill, type[Exception]]] = [
            (AssistPrefill("a", Split("layers", (0, 2, 5), 5, 0, 600, CHUNK), 0), InvalidValue),
            (AssistPrefill("a", Split("layers", (2, 1, 4), 4, 0, 600, CHUNK), 0), InvalidValue),
            (AssistPrefill("a", Split("tokens", (0, 33, 600), 4, 0, 600, CHUNK), 0), InvalidValue),
            (AssistPrefill("a", good, 1), InvalidValue),
            (AssistPrefill("a", good, -1), InvalidValue),
            (AssistPrefill("a", Split("layers", (0, 2, 4), LAYERS, 0, 4097, CHUNK), 0), InvalidValue),
        ]
        for assist, expected in senseless:
            assert isinstance(await refused(helper, assist), expected), assist
        assert helper.facts is not None
        too_many = helper.facts.kv_budget_bytes // helper.facts.shape.sizes.token_bytes + 64
        assert too_many < 4096, "the test's memory is too large for what it tests"
        large = AssistPrefill("a", Split("layers", (0, 4, 4), LAYERS, 0, too_many, CHUNK), 0)
        assert isinstance(await refused(helper, large), OutOfMemory)
        await settle(lambda: idle(helper))


async def test_a_worker_with_some_layers_helps_and_answers_nothing(model: Path) -> None:
    async with (
        workers(model, 1) as (home,),
        workers(model, 1, first_layer=0, last_layer=2) as (part,),
    ):
        assert part.facts is not None
        assert home.facts is not None
        assert (part.facts.first_layer, part.facts.last_layer, part.facts.shape.layers) == (0, 2, LAYERS)
        assert part.facts.shape.weights_bytes < home.facts.shape.weights_bytes
        assert part.facts.shape.sizes.token_bytes * 2 == home.facts.shape.sizes.token_bytes
        assert part.facts.arithmetic is not None
        assert home.facts.arithmetic is not None
        assert part.facts.arithmetic.layers == home.facts.arithmetic.layers[:2]
        asked = Sharing(part, [], prompt("asked", 300))
        await asked.end()
        assert asked.told.error is not None
        assert "some of the model's layers" in asked.told.error.message
        before = of_worker(part.pid)
        sharing = Sharing(home, [part], prompt("r", 600))
        told = await sharing.run("layers")
        assert told.shared.code == ""
        assert sharing.assists[0].of(Assisted)
        async with workers(model, 1) as (other,):
            assert told.numbers == await alone(other, sharing.request)
        for assist in (
            AssistPrefill("more layers", Split("layers", (0, 3, 4), LAYERS, 0, 600, CHUNK), 0),
            AssistPrefill("all layers", Split("tokens", (0, 320, 600), LAYERS, 0, 600, CHUNK), 0),
        ):
            assert "here are 0 to 2" in str(await refused(part, assist))
        await settle(lambda: idle(part) and held_no_more((part,), (before,)))
