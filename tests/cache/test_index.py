"""The index holds the quota before anything is written, and lets the least worth go first."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from fleetd import limits
from fleetd.cache.index import Index, KeyReplaced, NewBlock, NoRoom, RestoredPrompt

KEY = "a key"


class Files:
    """Stands for the files of blocks: what was deleted is gone."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.there: dict[str, int] = {}

    def delete(self, name: str) -> None:
        del self.there[name]

    def write(self, prompt: list[str], worth: float, nbytes: int = 10) -> int:
        """Write a prompt's blocks; returns how many of it are there."""
        priority = self.index.price(prompt, worth)
        try:
            for depth, name in enumerate(prompt):
                block = NewBlock(name, "tiny", depth, nbytes, priority)
                if self.index.reserve(KEY, block, prompt, self.delete):
                    self.there[name] = nbytes
                    assert self.index.written(KEY, name)
                assert sum(self.there.values()) <= self.index.quota_bytes
        except NoRoom:
            pass
        self.index.price(prompt, worth)
        return sum(name in self.there for name in prompt)


@pytest.fixture
def index(tmp_path: Path) -> Index:
    opened = Index(tmp_path / "index.db", 100, most_blocks=8)
    opened.take_key(KEY)
    return opened


def test_what_is_worth_least_goes_first_and_old_worth_fades(index: Index) -> None:
    files = Files(index)
    files.write(["dear"], 5.0)
    files.write(["cheap"], 1.0)
    for number in range(7):
        files.write([f"new {number}"], 2.0)
    assert "dear" in files.there
    assert "cheap" not in files.there
    # Used by nobody any more, what was dear goes at last.
    for number in range(7, 40):
        files.write([f"new {number}"], 2.0)
    assert "dear" not in files.there
    index.validate()


def test_what_is_used_stays(index: Index) -> None:
    files = Files(index)
    files.write(["used"], 1.0)
    for number in range(40):
        files.write([f"new {number}"], 1.0)
        index.price(["used"], 1.0)
    assert "used" in files.there


def test_a_prompt_longer_than_the_quota_keeps_its_beginning(index: Index) -> None:
    files = Files(index)
    assert files.write([f"block {n}" for n in range(20)], 1.0) == 8
    assert set(files.there) == {f"block {n}" for n in range(8)}
    assert files.write(["huge"], 1.0, nbytes=101) == 0


@examples(60)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 4), st.sampled_from([1.0, 3.0])),
        max_size=25,
    )
)
def test_the_quota_holds_and_no_block_is_left_without_its_beginning(
    turns: list[tuple[int, int, int, float]],
) -> None:
    """Prompts share beginnings: one of four stems, then one of four branches."""
    index = Index(Path(":memory:"), 60, most_blocks=5)
    index.take_key(KEY)
    files = Files(index)
    for stem, branch, length, worth in turns:
        whole = [f"{stem}", f"{stem}", *(f"{stem}.{branch}" for _ in range(length))]
        files.write([f"{name}.{depth}" for depth, name in enumerate(whole)], worth, nbytes=10 + stem)
        index.validate()
        assert index.names() == files.there
        for name in files.there:
            start, _, depth = name.rpartition(".")
            for before in range(int(depth)):
                assert f"{start.split('.')[0] if before < 2 else start}.{before}" in files.there
    index.close()


def test_another_process_s_block_is_not_written_twice_unless_that_process_is_gone(tmp_path: Path) -> None:
    now = 1000.0
    index = Index(tmp_path / "index.db", 20, clock=lambda: now)
    index.take_key(KEY)
    gone: list[str] = []
    block = NewBlock("block", "tiny", 0, 15, 1.0)
    assert index.reserve(KEY, block, ["block"], gone.append)
    assert not index.reserve(KEY, block, ["block"], gone.append)
    assert index.find(KEY, ["block"]).blocks == 0  # it is not ready
    other = NewBlock("other", "tiny", 0, 15, 1.0)
    with pytest.raises(NoRoom):
        index.reserve(KEY, other, ["other"], gone.append)
    now += limits.CACHE_WRITING_S + 1
    assert index.reserve(KEY, other, ["other"], gone.append)
    assert gone == ["block"]
    assert not index.written(KEY, "block")
    index.close()


def test_nothing_is_entered_under_another_key(index: Index) -> None:
    files = Files(index)
    files.write(["block"], 1.0)
    index.take_key("another key")
    assert index.names() == {}
    with pytest.raises(KeyReplaced):
        index.reserve(KEY, NewBlock("late", "tiny", 0, 1, 1.0), [], files.delete)
    assert not index.written(KEY, "block")


def test_two_processes_fill_one_quota(tmp_path: Path) -> None:
    indexes = [Index(tmp_path / "index.db", 100) for _ in range(2)]
    indexes[0].take_key(KEY)
    both = [Files(index) for index in indexes]
    both[1].there = both[0].there
    for number in range(30):
        both[number % 2].write([f"{number}"], 1.0)
    assert len(both[0].there) == 10
    for index in indexes:
        index.validate()
        index.close()


def test_the_measured_speed_follows_what_is_measured_and_small_reads_do_not_count(index: Index) -> None:
    index.restored(RestoredPrompt("tiny", 256, 10, 1.0, 0.5))
    assert index.speeds.disk == 0
    index.restored(RestoredPrompt("tiny", 256, 100 * limits.MIB, 1.0, 0.5))
    assert index.speeds.disk == 100 * limits.MIB
    index.restored(RestoredPrompt("tiny", 256, 200 * limits.MIB, 1.0, -0.5))
    assert 100 * limits.MIB < index.speeds.disk < 200 * limits.MIB
    (model,) = index.models()
    assert (model.hits, model.restored_tokens, model.saved_s) == (3, 768, 1.0)


@pytest.mark.long
def test_a_full_index_answers_soon(tmp_path: Path) -> None:
    """No figure, a guard against a scan per block: a thousand evictions from a full index."""
    index = Index(tmp_path / "index.db", 1 << 40, most_blocks=20_000)
    index.take_key(KEY)
    files = Files(index)
    for prompt in range(200):
        files.write([f"{prompt}.{n}" for n in range(100)], 1.0)
    begun = time.monotonic()
    for prompt in range(200, 210):
        files.write([f"{prompt}.{n}" for n in range(100)], 1.0)
    assert time.monotonic() - begun < 60
    index.validate()
