"""What other machines sent is labelled, and thrown away once one of them lies or leaves the fleet."""

from __future__ import annotations

import asyncio
from pathlib import Path

import kv_blocks
import pytest
from keepers import fleet

from fleetd import limits
from fleetd.cache.block_store import BlockStore, CacheUnavailable
from fleetd.cache.service import DiskCache
from fleetd.errors import PeerLate, PeerLost, PeerWrong
from fleetd.requests.kv_fetching import messages
from fleetd.requests.kv_fetching.kept_prompts import links
from fleetd.requests.members.members import Members
from fleetd.requests.row_origins import RowOrigins

NAMES = kv_blocks.prompt(1, 4)


class Machine:
    """Origins over a disk; what its workers were told to forget."""

    def __init__(self, folder: Path) -> None:
        self.told: list[str] = []
        self.settings = kv_blocks.settings(folder)
        self.disk = DiskCache(self.settings, on=True, note=lambda: "")
        self.disk.start()
        self.heard = asyncio.Event()
        self.origins = RowOrigins(self.disk, self._tell)

    def _tell(self, labels: list[str]) -> None:
        self.told += labels
        self.heard.set()

    async def fetch(self, seed: int, machine: str) -> str:
        """As if a worker had written what came from there."""
        label = await self.origins.label(machine)
        with kv_blocks.opened(self.settings) as store:
            kv_blocks.write(store, kv_blocks.prompt(seed, 2), origins=(label,))
        return label

    def blocks(self, seed: int) -> int:
        return self.disk.find(kv_blocks.prompt(seed, 2)).blocks

    def restarted(self) -> Machine:
        self.disk.close()
        return Machine(Path(self.settings.folder).parents[1])


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


async def test_a_machine_has_one_label_until_it_is_not_believed(machine: Machine) -> None:
    first = await machine.fetch(1, "alpha")
    other = await machine.fetch(2, "beta")
    assert await machine.origins.label("alpha") == first != other
    forgetting = machine.origins.forget("alpha")
    assert machine.told == [first], "at once"
    await forgetting
    assert (machine.blocks(1), machine.blocks(2)) == (0, 2)
    assert await machine.origins.label("alpha") not in (first, other)
    machine.disk.close()


async def test_what_was_fetched_before_a_restart_goes_from_disk_and_memory(machine: Machine) -> None:
    before = await machine.fetch(1, "alpha")
    again = machine.restarted()
    assert again.blocks(1) == 2
    now = await again.fetch(2, "alpha")
    await again.origins.forget("alpha")
    assert set(again.told) == {before, now}
    assert (again.blocks(1), again.blocks(2)) == (0, 0)
    again.disk.close()


async def test_a_machine_that_left_while_this_one_was_off_is_not_believed_at_the_start(
    machine: Machine,
) -> None:
    await machine.fetch(1, "alpha")
    await machine.fetch(2, "beta")
    again = machine.restarted()
    await again.origins.begin({"beta": 0})
    assert (again.blocks(1), again.blocks(2)) == (0, 2)
    again.disk.close()


@pytest.mark.parametrize("after", [{"beta": 1}, {"alpha": 2, "beta": 1}], ids=["it left", "paired anew"])
async def test_whoever_removes_a_machine_what_it_sent_goes(machine: Machine, after: dict[str, int]) -> None:
    await machine.fetch(1, "alpha")
    await machine.fetch(2, "beta")
    members, changed = {"alpha": 0, "beta": 1}, asyncio.Event()
    watching = asyncio.create_task(machine.origins.watch(changed, lambda: dict(members)))
    await asyncio.sleep(0)  # it has seen who is there
    members.clear()
    members.update(after)
    changed.set()
    changed.clear()
    await machine.heard.wait()
    await machine.origins._work.finish()
    watching.cancel()
    assert (machine.blocks(1), machine.blocks(2)) == (0, 2)
    machine.disk.close()


async def test_a_disk_that_refuses_is_asked_again(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CACHE_AGAIN_S", 0.0)
    label, real, refusals = await machine.fetch(1, "alpha"), BlockStore.forget_machine, iter(range(2))

    def refuses(self: BlockStore, name: str) -> list[str]:
        if next(refusals, None) is not None:
            raise CacheUnavailable("its index cannot be used: database is locked")
        return real(self, name)

    monkeypatch.setattr(BlockStore, "forget_machine", refuses)
    await machine.origins.forget("alpha")
    assert machine.blocks(1) == 0
    assert set(machine.told) == {label}
    machine.disk.close()


def test_wrong_keys_and_values_are_told_of_and_nothing_else_is() -> None:
    members, lied = Members(), list[str]()
    members.lied = lied.append
    members.failed("late", "fetch", PeerLate("Its keys and values came too late."))
    members.failed("lost", "prefill", PeerLost("It is gone."))
    members.failed("refuses", "answer", PeerWrong("It refused what another machine served."))
    assert lied == []
    members.failed("alpha", "fetch", PeerWrong("Its keys and values are not those that are computed here."))
    members.failed("beta", "prefill", PeerWrong("It computes other keys than this machine does."))
    assert lied == ["alpha", "beta"]


@pytest.mark.parametrize("states", [False, True])
async def test_attack_what_a_third_machine_sent_is_neither_offered_nor_sent_on(
    tmp_path: Path, states: bool
) -> None:
    async with fleet(tmp_path, True) as (home, (keeper,)):
        keeper.keep(NAMES, states=(2, 3), origins=("a label",))

        async def found() -> messages.BlocksFound:
            question = messages.encode(messages.BlocksQuestion(NAMES, states=states))
            answer = await home.ask(keeper.node_id, messages.FIND, question, within_s=60.0)
            return messages.decode(answer, messages.BlocksFound)

        assert (await found()).blocks == 0
        text = "a text that fills blocks " * 200
        keeper.cache.begin_with("0" * 64, links(text), NAMES, 0.5)
        assert keeper.prompts.look("0" * 64, links(text)).on_disk > 0
        question = messages.encode(messages.TextQuestion("0" * 64, links(text)))
        answer = await home.ask(keeper.node_id, messages.LOOK, question, within_s=60.0)
        assert messages.decode(answer, messages.TextFound) == messages.TextFound()
        # What it computed itself it has for everybody.
        with kv_blocks.opened(kv_blocks.settings(tmp_path / "disk0")) as store:
            store.forget_machine("another machine")
        keeper.keep(NAMES, states=(2, 3))
        assert (await found()).blocks == len(NAMES)
