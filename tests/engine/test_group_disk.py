"""Kept prompts of a model over several machines: each machine's disk has the part of its layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny_architectures
from disk_worker import BLOCK, SLOW, blocks_of, settings_in
from family_params import few, in_turn
from group_machines import Group, group_of
from turned_scheduler import TinyFamily, Turned, drawn, family

from fleetd import limits
from fleetd.cache.block_names import LateBasis
from fleetd.cache.index import FoundBlocks
from fleetd.cache.settings import DiskCacheSettings
from fleetd.engine.groups.group_tier import GroupTier, LayersAlone, longest_common
from fleetd.engine.groups.member_disk import PartDisk
from fleetd.engine.groups.messages import KeptTold
from fleetd.engine.layers.stage import Stage
from fleetd.engine.load.load_findings import FindingsKey, block_basis
from fleetd.engine.prefixes.disk_tier import DiskTier
from fleetd.engine.protocol import Cancel, Finished
from fleetd.engine.settings import GroupMember
from fleetd.engine.speculation.verdicts import VerdictKey

pytestmark = pytest.mark.usefixtures("on_cpu", "patient")
# Three blocks and more.
PROMPT = [token % tiny_architectures.VOCAB for token in drawn(3 * BLOCK + 40)]
ASKER = b"the machine that answers"


@pytest.fixture(autouse=True)
def a_state_for_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CHECKPOINT_BLOCK_TOKENS", BLOCK)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TinyFamily:
    return family(tmp_path_factory.mktemp("llama"), "llama")


def tier_of(kind: type[DiskTier], settings: DiskCacheSettings, model: Any, **fields: Any) -> Any:
    basis = LateBasis(lambda: b"this model on these machines")
    return kind(
        settings=settings,
        model=model,
        model_name="tiny",
        basis=basis,
        cost=SLOW,
        most_queued_bytes=1 << 30,
        **fields,
    )


class Machines:
    """A group's life, with disks in folders that outlive it."""

    def __init__(
        self,
        whole: TinyFamily,
        folder: Path,
        *cuts: int,
        asker: bytes = ASKER,
        without: Sequence[int] = (),
    ) -> None:
        self.folder = folder

        def disk(number: int, stage: Stage, dtype: mx.Dtype) -> PartDisk | None:
            if number in without:
                return None
            tier = tier_of(DiskTier, self.settings(number + 1), LayersAlone(stage, dtype))
            return PartDisk(tier, asker)

        self.group: Group = group_of(whole.model, *cuts, disk=disk)
        model = self.group.model
        front = LayersAlone(model.front, model.dtype)
        self.tier = tier_of(GroupTier, self.settings(0), front, members=model.members)
        self.bench = Turned(TinyFamily(model, whole.tokenizer, whole.sharable), disk=self.tier, sharable=None)
        for member in self.group.members:
            if member.disk is not None:
                member.disk.tier.wake = self.bench.scheduler.inbox.wake

    def settings(self, number: int) -> DiskCacheSettings:
        return settings_in(self.folder / f"machine{number}")

    def ask(self, name: str, tokens: list[int], **fields: Any) -> Finished:
        self.bench.ask(name, tokens, **{"max_tokens": 4, **fields})
        self.bench.finish()
        return self.bench.of(name, Finished)[-1]

    def stop(self) -> None:
        """As workers end: what is queued is written."""
        self.bench.scheduler._close()
        for member in self.group.members:
            member.close()


def kept(
    whole: TinyFamily, folder: Path, *cuts: int, prompt: list[int] = PROMPT, **options: Any
) -> list[Any]:
    """The answer of a group that ended after it, so that its prompt is on the disks."""
    machines = Machines(whole, folder, *cuts, **options)
    machines.ask("kept", prompt)
    machines.stop()
    return machines.bench.answer("kept")


@pytest.mark.parametrize("cuts", [(2,), (1, 3)])
def test_a_prompt_comes_back_from_all_disks_with_the_same_bytes(
    llama: TinyFamily, tmp_path: Path, cuts: tuple[int, ...]
) -> None:
    right = Turned(llama)
    right.ask("whole", PROMPT, max_tokens=4)
    right.finish()
    assert kept(llama, tmp_path, *cuts) == right.answer("whole")
    machines = Machines(llama, tmp_path, *cuts)
    ended = machines.ask("again", PROMPT)
    assert (ended.usage.cached_tokens, ended.timings.restored_tokens) == (3 * BLOCK, 3 * BLOCK)
    assert machines.bench.answer("again") == right.answer("whole")
    machines.stop()
    for number in range(len(cuts) + 1):
        assert len(blocks_of(machines.settings(number))) == 3


@pytest.mark.parametrize(
    "name",
    few(
        ["gemma3_text", "qwen3_next", "falcon_h1", "mamba2", "deepseek_v32"],
        ["gemma3_text", "falcon_h1", "deepseek_v32"],
    ),
)
def test_windows_and_states_come_back_from_all_disks(tmp_path: Path, name: str) -> None:
    whole = tiny_family(name, tmp_path)
    right = Turned(whole, sharable=None)
    right.ask("whole", PROMPT, max_tokens=4)
    right.finish()
    cut = len(whole.model.layers) // 2
    assert kept(whole, tmp_path, cut) == right.answer("whole")
    machines = Machines(whole, tmp_path, cut)
    ended = machines.ask("again", PROMPT)
    assert ended.timings.restored_tokens == 3 * BLOCK
    assert machines.bench.answer("again") == right.answer("whole")
    machines.stop()


def tiny_family(name: str, folder: Path) -> TinyFamily:
    llama = family(folder / "tokenizer", "llama")
    return TinyFamily(tiny_architectures.tiny(name), llama.tokenizer, llama.sharable)


def test_the_shortest_beginning_that_all_have_is_read(llama: TinyFamily, tmp_path: Path) -> None:
    # The member was away from the disk when the prompt went on.
    kept(llama, tmp_path, 2, prompt=PROMPT[: BLOCK + 5])
    answer = kept(llama, tmp_path, 2, without=[0])
    assert len(blocks_of(settings_in(tmp_path / "machine0"))) == 3
    assert len(blocks_of(settings_in(tmp_path / "machine1"))) == 1
    machines = Machines(llama, tmp_path, 2)
    assert machines.ask("again", PROMPT).timings.restored_tokens == BLOCK
    assert machines.bench.answer("again") == answer
    machines.stop()


def empty(folder: Path) -> None:
    for file in blocks_of(settings_in(folder)):
        file.unlink()


def damage(folder: Path) -> None:
    for file in blocks_of(settings_in(folder)):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(bytes(data))


@pytest.mark.parametrize(("lose", "number"), in_turn([empty, damage], [0, 1, 2]))
def test_what_one_machine_lost_is_computed_anew(
    llama: TinyFamily, tmp_path: Path, lose: Callable[[Path], None], number: int
) -> None:
    answer = kept(llama, tmp_path, 1, 3)
    lose(tmp_path / f"machine{number}")
    machines = Machines(llama, tmp_path, 1, 3)
    assert machines.ask("again", PROMPT).timings.restored_tokens == 0
    assert machines.bench.answer("again") == answer
    machines.stop()
    # Block by block it is there again.
    for blocks in (1, 2):
        machines = Machines(llama, tmp_path, 1, 3)
        assert machines.ask("and again", PROMPT).timings.restored_tokens == blocks * BLOCK
        assert machines.bench.answer("and again") == answer
        machines.stop()


def test_what_one_machine_had_written_is_not_read_for_another(llama: TinyFamily, tmp_path: Path) -> None:
    answer = kept(llama, tmp_path, 2)
    machines = Machines(llama, tmp_path, 2, asker=b"another machine")
    assert machines.ask("again", PROMPT).timings.restored_tokens == 0
    assert machines.bench.answer("again") == answer
    machines.stop()


def test_a_group_of_which_one_keeps_nothing_computes(llama: TinyFamily, tmp_path: Path) -> None:
    answer = kept(llama, tmp_path, 1, 3)
    machines = Machines(llama, tmp_path, 1, 3, without=[1])
    assert machines.ask("again", PROMPT).timings.restored_tokens == 0
    assert machines.bench.answer("again") == answer
    machines.stop()


def test_a_prompt_that_is_cancelled_while_it_is_read_leaves_nothing(
    llama: TinyFamily, tmp_path: Path
) -> None:
    answer = kept(llama, tmp_path, 2)
    machines = Machines(llama, tmp_path, 2)
    bench = machines.bench
    bench.ask("gone", PROMPT)
    while not (known := bench.scheduler._prefilling) or known[0].restoring is None:
        bench.turn()
    bench.scheduler.tell(Cancel("gone"))
    bench.finish()
    assert bench.of("gone", Finished)[-1].reason == "cancelled"
    assert machines.ask("next", PROMPT).timings.restored_tokens == 3 * BLOCK
    assert bench.answer("next") == answer
    assert not machines.group.members[0].rows.disk._questions
    machines.stop()


def test_other_machines_are_not_told_of_what_is_kept_in_parts(llama: TinyFamily, tmp_path: Path) -> None:
    machines = Machines(llama, tmp_path, 2)
    assert machines.tier.names_for_others(PROMPT) == []
    machines.stop()


def test_names_rest_on_the_cut_and_on_how_each_member_computes() -> None:
    def basis(*members: tuple[int, int, str], digest: str = "m") -> bytes:
        asked = [GroupMember(a, b, "s", "n", how, kind="one kind") for a, b, how in members]
        return block_basis(FindingsKey.now(VerdictKey.now(digest, "cpu", "", {}, members=asked)), None)

    assert len({basis((2, 4, "x")), basis((1, 4, "x")), basis((2, 4, "y")), basis()}) == 4
    # One that has not said how it computes, and files that are not hashed yet.
    assert basis((1, 2, "x"), (2, 4, "")) == b""
    assert basis((2, 4, "x"), digest="") == b""


def test_a_beginning_ends_where_each_machine_can_end() -> None:
    rows = FoundBlocks(5, 50, 1.0)
    states = FoundBlocks(5, 50, 1.0, ((1, 9), (3, 9), (5, 9)))
    assert longest_common(rows, [KeptTold(1, 7), KeptTold(2, 4)]) == 4
    assert longest_common(states, [KeptTold(1, 4)]) == 3
    assert longest_common(states, [KeptTold(1, 3, [2, 3])]) == 3
    assert longest_common(states, [KeptTold(1, 4, [2, 4])]) == 0
    assert longest_common(rows, [KeptTold(1)]) == 0
