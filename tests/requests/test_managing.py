"""Models of one machine, managed from another: two real nodes over loopback, models and engines played."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "p2p"))

from fakes import FakeModels, FakePool, FakePullStep
from fleet_nodes import card, introduce, running, settings, together, until

from fleetd import limits
from fleetd.control.model_change import VERBS, ModelDone, ModelProgress, Verb
from fleetd.control.model_listing import FoundModel, FoundModels, InstalledModel, ModelListing, OfferedModel
from fleetd.engine.protocol import Loading
from fleetd.errors import (
    DiskFull,
    Draining,
    FleetError,
    Forbidden,
    InvalidValue,
    ModelNotFound,
    NotFound,
    Overloaded,
    PeerLost,
    PeerUnreachable,
    ProtocolError,
    VersionMismatch,
)
from fleetd.fleet.service import Fleet
from fleetd.p2p.node import Node
from fleetd.requests.admission import ServingContext
from fleetd.requests.managing import messages
from fleetd.requests.managing.messages import LookQuestion, LookTold, ManageQuestion
from fleetd.requests.managing.operations import ModelOperations
from fleetd.requests.managing.server import ManageServer

pytestmark = pytest.mark.one_loop

LISTING = ModelListing(installed=[InstalledModel("m", loaded=True)], catalog=[OfferedModel("qwen3-8b")])


@dataclass
class Pins:
    names: set[str] = field(default_factory=set)

    def pin(self, name: str) -> None:
        self.names.add(name)

    def unpin(self, name: str) -> None:
        self.names.discard(name)


class Studio:
    """The machine that is managed."""

    def __init__(
        self, folder: Path, *, enabled: bool = True, knows: bool = True, confirmed: bool = True
    ) -> None:
        self.node = Node(settings(folder, "studio"))
        self.models = FakeModels(pull_steps=[])
        self.pool = FakePool()
        self.pins = Pins()
        self.changes = 0
        self.draining = False
        self.outcomes: list[tuple[str, str]] = []
        self.ended = asyncio.Event()
        self.listing: ModelListing | FleetError = LISTING
        if not knows:
            return
        operations = ModelOperations(
            self.models,  # type: ignore[arg-type]
            self.pool,  # type: ignore[arg-type]
            self.pins,  # type: ignore[arg-type]
            self.models.pull,  # type: ignore[arg-type]
            self._changed,
        )
        context = ServingContext(
            self.models,  # type: ignore[arg-type]
            lambda: pytest.fail("no card is looked at"),
            draining=lambda: self.draining,
            finished=self._finished,
        )
        server = ManageServer(
            operations,
            self._look,
            context,
            enabled=enabled,
            confirmed=lambda node_id: confirmed and self.node.roster.members[node_id].confirmed,
            name_of=self.node.name_of,
        )
        self.node.handle(messages.RUN, server.run)
        self.node.handle(messages.LOOK, server.look)

    def _finished(self, kind: str, outcome: str) -> None:
        self.outcomes.append((kind, outcome))
        self.ended.set()

    def _changed(self) -> None:
        self.changes += 1

    async def _look(self, words: str) -> ModelListing | FoundModels:
        if isinstance(self.listing, FleetError):
            raise self.listing
        return FoundModels(words, [FoundModel("org/x")]) if words else self.listing


@dataclass
class Both:
    fleet: Fleet
    studio: Studio

    def manage(self, verb: Verb, model: str = "m", on: str = "studio") -> Any:
        return self.fleet.manage(on, verb, model)

    async def done(self, verb: Verb, model: str = "m") -> list[Any]:
        """All events of an operation that ends well, but for the last."""
        *events, last = [event async for event in self.manage(verb, model)]
        assert last == ModelDone(name=model)
        return events


@asynccontextmanager
async def two(folder: Path, **options: Any) -> AsyncIterator[Both]:
    mini, studio = Node(settings(folder, "mini")), Studio(folder, **options)
    fleet = Fleet(mini, local_only=False)
    async with running(mini, studio.node):
        await introduce(mini, studio.node)
        await together([mini, studio.node])
        studio.node.publish(card(studio.node, software="0.9"))
        await until(mini, lambda: len(mini.mesh.cards) == 1)
        yield Both(fleet, studio)


async def test_a_model_is_pulled_loaded_pinned_unloaded_and_removed_there(tmp_path: Path) -> None:
    async with two(tmp_path) as both:
        studio = both.studio
        studio.models.pull_steps = [FakePullStep("w", 1, 2), FakePullStep("w", 2, 2)]
        assert await both.done("pull", "org/new") == [
            ModelProgress("w", 1, 2, "downloading"),
            ModelProgress("w", 2, 2, "downloading"),
        ]
        assert "org/new" in studio.models.names
        studio.pool.load_steps = [Loading("reading", 1, 4), Loading("measuring")]
        assert await both.done("load", "org/new") == [
            ModelProgress("", 1, 4, "reading"),
            ModelProgress("", 0, 0, "measuring"),
        ]
        assert studio.pool.loaded == ["org/new"]
        await both.done("pin", "org/new")
        assert studio.pins.names == {"org/new"}
        await both.done("unpin", "org/new")
        assert studio.pins.names == set()
        studio.pool.loaded = ["org/new"]
        await both.done("unload", "org/new")
        assert studio.pool.loaded == []
        await both.done("remove", "org/new")
        assert (studio.models.removed, studio.changes) == (["org/new"], 1)
        assert set(studio.outcomes) == {("manage", "done")}


async def test_what_goes_wrong_there_is_told_here_with_the_machines_name(tmp_path: Path) -> None:
    async with two(tmp_path) as both:
        with pytest.raises(ModelNotFound, match=r"studio: m is not loaded"):
            await both.done("unload")
        with pytest.raises(ModelNotFound, match=r"studio: m is not pinned"):
            await both.done("unpin")
        both.studio.models.pull_steps = [FakePullStep("w", 1, 2), DiskFull("No space.", hint="Free 1 GB.")]
        with pytest.raises(DiskFull, match=r"studio: No space") as error:
            await both.done("pull", "org/new")
        assert error.value.hint == "Free 1 GB."
        assert both.studio.outcomes[-1] == ("manage", "disk_full")


@pytest.mark.parametrize("verb", ["pull", "load"])
async def test_who_leaves_in_the_middle_ends_it_there(tmp_path: Path, verb: Verb) -> None:
    async with two(tmp_path) as both:
        studio = both.studio
        studio.models.pull_steps = [FakePullStep("w", 1, 2), asyncio.Event()]
        studio.pool.load_steps = [Loading("reading", 1, 2), asyncio.Event()]
        async with aclosing(both.manage(verb)) as events:
            assert isinstance(await anext(events), ModelProgress)
        await studio.ended.wait()
        assert studio.outcomes == [("manage", "cancelled")]
        assert studio.models.cancelled_pulls + studio.pool.cancelled == 1
        assert studio.pool.loaded == []


async def test_a_machine_that_leaves_in_the_middle_is_an_error_here(tmp_path: Path) -> None:
    async with two(tmp_path) as both:
        both.studio.models.pull_steps = [FakePullStep("w", 1, 2), asyncio.Event()]
        async with aclosing(both.manage("pull")) as events:
            await anext(events)
            for connection in both.studio.node.connections:
                connection.abort(PeerLost("The cable is out."))
            with pytest.raises(PeerLost, match="studio"):
                await anext(events)


async def test_a_machine_that_stops_in_the_middle_says_so(tmp_path: Path) -> None:
    async with two(tmp_path) as both:
        both.studio.models.pull_steps = [FakePullStep("w", 1, 2), asyncio.Event()]
        async with aclosing(both.manage("pull")) as events:
            await anext(events)
            await both.studio.node.goodbye()
            with pytest.raises((Draining, PeerLost), match="studio"):
                await anext(events)


async def test_a_load_that_says_nothing_for_long_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "JOB_ALIVE_S", 0.02)
    monkeypatch.setattr(limits, "JOB_SILENCE_S", 2.0)
    go = asyncio.Event()
    async with two(tmp_path) as both:
        both.studio.pool.load_steps = [go]
        asyncio.get_running_loop().call_later(2.5, go.set)
        assert await both.done("load") == []


@pytest.mark.parametrize("verb", VERBS)
async def test_a_setting_refuses_each_verb_and_the_list(tmp_path: Path, verb: Verb) -> None:
    async with two(tmp_path, enabled=False) as both:
        with pytest.raises(Forbidden, match=r"studio: .*fleet\.manage is off there") as error:
            await both.done(verb)
        assert "fleet.manage = true" in error.value.hint
        with pytest.raises(Forbidden, match=r"fleet\.manage"):
            await both.fleet.look("studio")
        assert (both.studio.models.pulls, both.studio.pool.loaded, both.studio.models.removed) == (0, [], [])


async def test_attack_a_machine_that_nobody_has_confirmed_manages_nothing(tmp_path: Path) -> None:
    async with two(tmp_path, confirmed=False) as both:
        with pytest.raises(Forbidden, match="confirmed") as error:
            await both.done("remove")
        assert "fleetctl peers prompts" in error.value.hint
        assert both.studio.models.removed == []


async def test_an_earlier_version_is_told_apart_and_can_be_updated(tmp_path: Path) -> None:
    async with two(tmp_path, knows=False) as both:
        for asked in (both.done("load"), both.fleet.look("studio")):
            with pytest.raises(VersionMismatch, match=r"studio runs fleetd 0\.9") as error:
                await asked
            assert "Update fleetd on studio" in error.value.hint


async def test_machines_that_cannot_be_asked_are_named_with_what_to_do(tmp_path: Path) -> None:
    async with two(tmp_path) as both:
        with pytest.raises(NotFound, match="kitchen") as unknown:
            both.manage("load", on="kitchen")
        assert (unknown.value.param, "studio" in unknown.value.hint) == ("on", True)
        assert both.fleet.is_here("mini")
        assert not both.fleet.is_here("studio")
        await both.studio.node.goodbye()
        await until(both.fleet.node, lambda: not both.fleet.view().peers[0].usable)
        with pytest.raises(PeerUnreachable, match="studio: ") as gone:
            both.manage("load")
        assert gone.value.hint


async def test_the_list_and_a_search_are_those_of_the_other_machine(tmp_path: Path) -> None:
    async with two(tmp_path) as both:
        assert await both.fleet.look("studio") == LISTING
        found = await both.fleet.look("STUDIO", "small qwen")
        assert isinstance(found, FoundModels)
        assert (found.words, found.models[0].hub_id) == ("small qwen", "org/x")


@pytest.mark.parametrize(
    "installed",
    [
        [InstalledModel("../../etc")],
        [InstalledModel("m", architecture="\x1b[2J")],
        [InstalledModel("m", weights_bytes=-1)],
        [InstalledModel(f"m{number}", architecture="x" * 1000) for number in range(2000)],
    ],
    ids=["path", "escape", "below zero", "huge"],
)
async def test_attack_a_list_that_no_honest_machine_sends(
    tmp_path: Path, installed: list[InstalledModel]
) -> None:
    async with two(tmp_path) as both:
        both.studio.listing = ModelListing(installed=installed)
        with pytest.raises(ProtocolError, match="studio"):
            await both.fleet.look("studio")


@pytest.mark.parametrize("model", ["/etc/passwd", "~/m", "../m", "a/b/c", "a/../b", "-rf", "", "x" * 300])
async def test_attack_a_model_by_what_is_no_name(tmp_path: Path, model: str) -> None:
    """Neither is it sent nor, if it is sent all the same, taken."""
    async with two(tmp_path) as both:
        with pytest.raises(InvalidValue) as error:
            await both.done("remove", model)
        assert error.value.param == "model"
    with pytest.raises(ProtocolError):
        messages.decode(messages.encode(ManageQuestion("remove", model)), ManageQuestion)


@pytest.mark.parametrize("verb", ["verify", "add", "settings", ""])
def test_attack_a_verb_that_is_not_offered(verb: Any) -> None:
    with pytest.raises(ProtocolError):
        messages.decode(messages.encode(ManageQuestion(verb, "m")), ManageQuestion)


def test_words_and_answers_are_bounded() -> None:
    with pytest.raises(ProtocolError):
        messages.decode(messages.encode(LookQuestion("x" * (limits.HUB_SEARCH_CHARS + 1))), LookQuestion)
    whole = LookTold(listing=LISTING)
    assert messages.decode(messages.encode(whole), LookTold) == whole


async def test_attack_a_machine_asks_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MANAGE_BURST", 3)
    monkeypatch.setattr(limits, "MANAGE_PER_S", 0.0)
    async with two(tmp_path) as both:
        for _ in range(3):
            await both.done("load")
        with pytest.raises(Overloaded, match="too much at once"):
            await both.done("load")


async def test_attack_one_machine_takes_not_all_places(tmp_path: Path) -> None:
    async with two(tmp_path) as both:
        both.studio.pool.load_steps = [Loading("reading", 1, 2), asyncio.Event()]
        begun = [both.manage("load") for _ in range(limits.MANAGED_PER_PEER)]
        for events in begun:
            await anext(events)
        with pytest.raises(Overloaded, match=str(limits.MANAGED_PER_PEER)):
            await anext(both.manage("load"))
        for events in begun:
            await events.aclose()


async def test_a_machine_that_is_stopping_takes_no_orders(tmp_path: Path) -> None:
    async with two(tmp_path) as both:
        both.studio.draining = True
        with pytest.raises(Draining, match="studio"):
            await both.done("load")
