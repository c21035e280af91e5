"""What a machine's card says of its speed: as measured, rounded, and still known when the model is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from files_off_the_loop import files_off_the_loop
from msgspec.structs import replace
from nested_fields import changed

from fleetd import limits
from fleetd.control.daemon_status import EngineStatus, HardwareReading, HeldLayers, RequestCounts
from fleetd.control.model_facts import MeasuredSpeed, ModelShape, StateSizes
from fleetd.control.prefill_plan import StepView
from fleetd.engine.protocol import Profile
from fleetd.engine.scoring.known_profiles import ProfileStore
from fleetd.errors import ModelCorrupt
from fleetd.fleet.own_card import CardMaker, Readings, _key
from fleetd.hardware.memory import MemoryReading, budget
from fleetd.limits import GIB
from fleetd.models.folder import ModelFolder
from fleetd.models.memory_need import WORKING_BYTES, WeightRules
from fleetd.p2p.membership.cards import Card, ModelCard
from fleetd.plan.load_times import LoadTimes
from fleetd.plan.model_speeds import ModelSpeeds

MACHINE = HardwareReading("Linux", "h", "", "cpu", "", 2, 2, 1 << 34, 1 << 33, 0, "small", "cpu")
FOLDER = ModelFolder("m", Path("/m"), "models", None, {"model_type": "llama"}, 1000, 1.0)
LOADED = EngineStatus(
    "m",
    "ready",
    shape=ModelShape(dtype="float32"),
    speed=MeasuredSpeed(312.3, 25.4, 1.2345e-6, 0.0518),
    arithmetic="0123456789abcdef",
    speculation="exact: blocks of 16",
)


def engine(pid: int, **fields: Any) -> EngineStatus:
    return changed(LOADED, pid=pid, **fields)


def part(pid: int, first: int, last: int, **fields: Any) -> EngineStatus:
    held = {"part_of": "m", "first_layer": first, "last_layer": last, "decode_tok_s": 0.0}
    return engine(pid, **{"model": f"m[{first}:{last}]", **held, **fields})


class CardDaemon:
    """A card maker with everything it looks at."""

    def __init__(
        self,
        profiles: ProfileStore | None = None,
        *,
        alone: bool = False,
        rules: WeightRules = WeightRules("cpu"),  # noqa: B008  # frozen
        **limits: Any,
    ) -> None:
        self.engines: list[EngineStatus] = []
        self.listing = asyncio.Event()
        # The folder's profile is known, which is looked up after it is listed.
        self.knows = profiles is not None
        # What takes no hashing.
        self.remembered: Callable[[], str] = str
        self.speeds = ModelSpeeds()
        self.unread_tokens = 0
        self.maker = CardMaker(
            Card("n", 1, 0, name="n", software="0", max_streams=4),
            SimpleNamespace(  # type: ignore[arg-type]  # what it asks of the models
                installed=lambda: [FOLDER],
                part_bytes=lambda: 5 * GIB + 7,
                digest=lambda folder: "d",
                known_digest=lambda folder: self.remembered(),
            ),
            Readings(
                machine=lambda: MACHINE,
                budget=lambda machine, free: budget(MemoryReading(machine.memory_bytes, free), **limits),
                engines=lambda: self.engines,
                counts=RequestCounts,
                unread_tokens=lambda: self.unread_tokens,
                draining=lambda: False,
                weight_rules=lambda machine: rules,
            ),
            speeds=self.speeds,
            profiles=profiles,
            publish=None if alone else self.published,
        )

    async def listed(self) -> None:
        """The folder was read, which no engine depends on."""
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            running = group.create_task(self.maker.run())
            await self.listing.wait()
            running.cancel()

    def published(self, card: Card) -> None:
        if card.models and (card.models[0].scoring or not self.knows):
            self.listing.set()

    @property
    def model(self) -> ModelCard:
        (model,) = self.maker.card().models
        return model


@pytest.mark.one_loop
async def test_a_card_tells_what_a_load_measured_in_two_digits() -> None:
    daemon = CardDaemon()
    await daemon.listed()
    assert daemon.model.speed.prefill_tok_s == 0
    daemon.engines = [engine(7)]
    told = daemon.model
    assert told.speed == MeasuredSpeed(310, 25, 1.2e-6, 0.052)
    assert (told.shape.dtype, told.arithmetic) == ("float32", "0123456789abcdef")
    assert told.exactness == "exact: blocks of 16"
    # A little is no news.
    daemon.engines = [engine(8, prefill_tok_s=308.0, prefill_context_s=1.23e-6)]
    assert daemon.model == told


@pytest.mark.one_loop
async def test_a_card_tells_the_room_for_layers_of_others_in_gib() -> None:
    daemon = CardDaemon()
    await daemon.listed()
    assert daemon.maker.card().part_bytes == 5 * GIB


@pytest.mark.one_loop
async def test_a_card_tells_of_vectors_that_are_computed_and_counts_them_as_no_prompt() -> None:
    daemon = CardDaemon()
    encoder = changed(LOADED.shape, purpose="embedding")
    daemon.engines = [
        engine(1, prefilling=1, waiting=2),
        engine(2, model="minilm", shape=encoder, prefilling=2, waiting=1),
    ]
    card = daemon.maker.card()
    assert (card.vectors, card.running, card.waiting) == (3, 0, 0)


@pytest.mark.one_loop
async def test_a_card_is_made_without_a_look_at_the_models_files() -> None:
    daemon = CardDaemon(rules=WeightRules("cpu", budget_bytes=1 << 40))
    with files_off_the_loop(FOLDER.path):
        await daemon.listed()
        assert daemon.model.memory_bytes


@pytest.mark.one_loop
async def test_a_card_counts_the_cores_that_ranks_keep_busy() -> None:
    daemon = CardDaemon()
    daemon.engines = [
        engine(1, ranks=2),
        part(2, 0, 8, model="x[rank 1 of 2]", rank=1, ranks=2),
        part(3, 0, 8, model="y[rank 1 of 2]", rank=1, ranks=2, state="loading"),
        engine(4, model="z"),
    ]
    assert daemon.maker.card().rank_cores == 2


@pytest.mark.one_loop
async def test_a_card_tells_how_much_is_to_be_prefilled_in_steps() -> None:
    daemon = CardDaemon()
    for left, told in ((0, 0), (1, 1024), (1024, 1024), (1025, 2048)):
        daemon.unread_tokens = left
        assert daemon.maker.card().unread_tokens == told


@pytest.mark.one_loop
async def test_a_card_says_whether_a_model_can_score_at_once(tmp_path: Path) -> None:
    """Also of one that is not loaded, if its profile is shipped or was found here."""
    daemon = CardDaemon()
    await daemon.listed()
    assert daemon.model.scoring == ""
    daemon.engines = [engine(7, scoring="unmeasured")]
    assert daemon.model.scoring == "unmeasured"
    daemon.engines = [engine(7, scoring="ready")]
    assert daemon.model.scoring == "ready"
    daemon.engines = []
    assert daemon.model.scoring == "ready"
    for heads, scoring in (([(0, 0)], "ready"), ([], "unable")):
        store = ProfileStore(tmp_path / scoring)
        store.keep("d", "metal", Profile(heads, 1))
        daemon = CardDaemon(profiles=store)
        await daemon.listed()
        assert daemon.model.scoring == scoring


@pytest.mark.one_loop
async def test_digests_are_found_also_without_a_fleet() -> None:
    """Prompts on the disk are named by them."""
    daemon = CardDaemon(alone=True)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        running = group.create_task(daemon.maker.run())
        while not (models := daemon.maker.card().models) or models[0].digest != "d":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        running.cancel()


@pytest.mark.one_loop
@pytest.mark.parametrize("error", [OSError("no device"), ModelCorrupt("no header"), ValueError("odd")])
async def test_a_digest_that_failed_is_tried_again_after_growing_pauses_and_people_are_told(
    error: Exception,
) -> None:
    """Also where a library raises what nobody thought of: the next model is hashed all the same."""
    daemon, now_s, tries, fails = CardDaemon(alone=True), 0.0, list[float](), True

    def digest(folder: ModelFolder) -> str:
        tries.append(now_s)
        if fails:
            raise error
        return "d"

    maker, again_s = daemon.maker, limits.DIGEST_AGAIN_S
    maker._models.digest = digest  # type: ignore[method-assign,assignment]
    maker._installed, maker._monotonic = [FOLDER], lambda: now_s
    for at_s in (0.0, again_s - 1, again_s, 3 * again_s - 1, 3 * again_s, 4 * again_s):
        now_s = at_s
        await maker._find_digest(FOLDER)
        assert (daemon.model.digest, maker.undigested) == ("", {"m": str(error)})
    assert tries == [0.0, again_s, 3 * again_s]
    now_s = 1e6
    await maker._find_digest(FOLDER)
    assert maker._undigested[_key(FOLDER)].again_s == now_s + 8 * again_s
    fails, now_s = False, 2e6
    await maker._find_digest(FOLDER)
    assert (daemon.model.digest, maker.undigested) == ("d", {})


@pytest.mark.one_loop
async def test_a_model_that_was_hashed_before_the_start_is_never_shown_without_its_digest() -> None:
    """Else a request right after the start finds no other machine with the same files."""
    daemon = CardDaemon(alone=True)
    daemon.remembered = lambda: "d"
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        running = group.create_task(daemon.maker.run())
        while not (models := daemon.maker.card().models):  # noqa: ASYNC110
            await asyncio.sleep(0)
        running.cancel()
    assert models[0].digest == "d"


@pytest.mark.one_loop
async def test_a_model_that_is_removed_while_it_is_looked_at_hides_no_other() -> None:
    def gone() -> str:
        raise FileNotFoundError

    daemon = CardDaemon()
    daemon.remembered = gone
    await daemon.listed()
    assert daemon.model.name == "m"


@pytest.mark.one_loop
async def test_what_a_model_computes_in_is_known_after_it_was_unloaded() -> None:
    daemon = CardDaemon()
    await daemon.listed()
    daemon.engines = [engine(7)]
    loaded = daemon.model
    daemon.engines = []
    cold = daemon.model
    assert (loaded.state, cold.state) == ("loaded", "installed")
    assert (cold.shape.dtype, cold.arithmetic) == (loaded.shape.dtype, loaded.arithmetic)
    assert cold.speed.prefill_context_s == loaded.speed.prefill_context_s


@pytest.mark.one_loop
@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (WeightRules("metal", available=True), ""),
        (WeightRules("cpu", available=True, budget_bytes=1 << 30), "float32"),
        (WeightRules("cpu", available=True), "int8"),
        (WeightRules("cpu", "int8", available=True, budget_bytes=1 << 30), "int8"),
        (WeightRules("cpu", "int8"), "float32"),
    ],
)
async def test_a_card_tells_what_a_load_would_compute_with(rules: WeightRules, expected: str) -> None:
    """The folder's weights have 16 bits each."""
    daemon = CardDaemon(rules=rules)
    await daemon.listed()
    assert daemon.model.shape.cpu_arithmetic == expected
    held = {"": 1000, "float32": 2000, "int8": 708}[expected]
    assert daemon.model.memory_bytes == held + WORKING_BYTES
    # What a load has chosen counts, once there was one.
    daemon.engines = [engine(7, shape=ModelShape(cpu_arithmetic="int8"))]
    assert daemon.model.shape.cpu_arithmetic == "int8"


@pytest.mark.one_loop
async def test_what_a_load_took_and_what_a_prefill_consists_of_is_known_after_it_was_unloaded() -> None:
    """Other machines price a load, and the help that this machine would get, by these."""
    daemon = CardDaemon()
    await daemon.listed()
    assert daemon.model.load_s == pytest.approx(LoadTimes().seconds("m", 1000), rel=0.1)
    assert daemon.model.shape == replace(FOLDER.shape, cpu_arithmetic="float32")
    took = [StepView("measuring", 33.0), StepView("reading", 8.0)]
    sizes = StateSizes(9, 6, 5, 4)
    told = ModelShape("llama", 1000, 2048, "float32", 30, sizes, 8, 3, 7, 5, any_chunks=True)
    told = replace(told, cpu_arithmetic="int8")
    # Weights may take more memory than they have in the files.
    daemon.engines = [engine(7, shape=replace(told, weights_bytes=2000), load_steps=took)]
    assert daemon.model.shape == told
    assert daemon.model.load_s == 8
    daemon.engines = [part(8, 0, 14, layers=30, load_steps=took[1:], token_bytes=4, cpu_arithmetic="int8")]
    cold = daemon.model
    assert (cold.state, cold.load_s) == ("installed", 8)
    assert cold.shape == told


@pytest.mark.one_loop
async def test_what_machines_measure_together_is_not_said_of_one_of_them() -> None:
    daemon = CardDaemon()
    await daemon.listed()
    daemon.engines = [engine(7, members=[HeldLayers("kitchen", 2, 4)])]
    model = daemon.model
    assert model.state == "loaded"
    assert (model.speed, model.arithmetic, model.scoring) == (MeasuredSpeed(), "", "")
    # Alone it is measured anew.
    daemon.engines = [engine(8)]
    assert daemon.model.speed.decode_tok_s == 25.0


@pytest.mark.one_loop
async def test_a_model_that_is_measured_again_was_loaded_once() -> None:
    daemon = CardDaemon()
    await daemon.listed()
    for pid, seconds, speed in ((7, 40.0, 100.0), (8, 20.0, 100.0), (8, 20.0, 120.0)):
        loaded = engine(pid, load_steps=[StepView("reading", seconds)])
        daemon.engines = [changed(loaded, prefill_tok_s=speed)]
        shown = daemon.model
    assert (shown.load_s, shown.speed.prefill_tok_s) == (30, 120)


@pytest.mark.one_loop
async def test_a_worker_is_believed_once_and_then_its_runs_are() -> None:
    daemon = CardDaemon()
    await daemon.listed()
    daemon.engines = [engine(7)]
    begun = daemon.model.speed.prefill_tok_s
    for _ in range(20):
        daemon.speeds.ran(
            "m",
            prompt_tokens=300,
            cached_tokens=0,
            completion_tokens=1,
            prefill_s=0.3,
            decode_s=0,
            now_s=0.0,
        )
    assert daemon.model.speed.prefill_tok_s > 1.5 * begun
    daemon.engines = [engine(8)]
    assert daemon.model.speed.prefill_tok_s == begun


@pytest.mark.one_loop
async def test_a_machine_that_has_some_layers_tells_which_and_how_fast_they_are() -> None:
    daemon = CardDaemon()
    await daemon.listed()
    daemon.engines = [part(7, 0, 4, kv_budget_bytes=5), part(8, 0, 14, kv_budget_bytes=9)]
    told = daemon.model
    # It answers nothing, so for a request it is as good as not loaded.
    assert (told.state, told.part_first, told.part_last, told.kv_budget_bytes) == ("installed", 0, 14, 9)
    assert (told.speed.prefill_tok_s, told.speed.prefill_context_s, told.speed.decode_tok_s) == (
        310,
        1.2e-6,
        0,
    )
    assert (told.shape.dtype, told.arithmetic) == ("float32", "")
    daemon.engines = [part(8, 0, 14, state="loading")]
    assert daemon.model.part_last == 0


@pytest.mark.one_loop
async def test_with_the_whole_model_loaded_a_part_says_nothing() -> None:
    daemon = CardDaemon()
    await daemon.listed()
    daemon.engines = [engine(7, kv_budget_bytes=5, prefix_budget_bytes=3), part(8, 0, 14)]
    told = daemon.model
    assert (told.state, told.part_last) == ("loaded", 0)
    assert (told.kv_budget_bytes, told.prefix_budget_bytes) == (5, 3)
    # What is known of the whole model outlasts it.
    daemon.engines = [part(9, 0, 14)]
    assert (daemon.model.speed.decode_tok_s, daemon.model.arithmetic) == (25, "0123456789abcdef")


@pytest.mark.one_loop
@pytest.mark.parametrize(("most", "usable"), [(0, 1 << 32), (1 << 31, 1 << 31), (1 << 40, 1 << 32)])
async def test_what_a_model_may_take_is_bounded_by_the_settings(most: int, usable: int) -> None:
    daemon = CardDaemon(fraction=0.5, max_bytes=most)
    assert daemon.maker.card().usable_bytes == usable


@pytest.mark.one_loop
async def test_a_card_says_that_its_speeds_are_in_doubt_until_they_are_measured_again() -> None:
    daemon = CardDaemon()
    await daemon.listed()
    daemon.engines = [engine(7, doubt="other programs had 60 % of the processor")]
    assert daemon.model.speed.doubtful
    daemon.speeds.ran(
        "m", prompt_tokens=300, cached_tokens=0, completion_tokens=1, prefill_s=0.1, decode_s=0, now_s=0.0
    )
    corrected = daemon.model.speed.prefill_tok_s
    assert corrected > 310
    # The same worker, which has just measured in idle time.
    daemon.engines = [engine(7, prefill_tok_s=900.0)]
    assert (daemon.model.speed.prefill_tok_s, daemon.model.speed.doubtful) == (900, False)
