"""Blocks that another machine sent are known as such, and none of them is used once it is not believed."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from kv_blocks import files, keep, opened, payload, prompt, read, write

from fleetd import limits
from fleetd.cache.block_store import BlockStore, NotKept
from fleetd.cache.settings import DiskCacheSettings

OWN, SENT, BOTH = prompt(1, 3), prompt(2, 3), prompt(3, 3)


@pytest.fixture
def kept(store: BlockStore) -> BlockStore:
    """Blocks of this machine, of one other, and of two others."""
    store.add_origin("a", "alpha")
    store.add_origin("b", "beta")
    write(store, OWN)
    write(store, SENT, origins=("a",))
    write(store, BOTH, origins=("b", "a"))
    return store


def found(store: BlockStore) -> tuple[int, int, int]:
    return store.find(OWN).blocks, store.find(SENT).blocks, store.find(BOTH).blocks


def index_of(settings: DiskCacheSettings) -> Path:
    return Path(settings.folder) / "index.db"


def test_what_came_from_a_machine_goes_with_what_rests_on_it(kept: BlockStore) -> None:
    assert found(kept) == (3, 3, 3)
    assert kept.machines() == {"alpha", "beta"}
    assert kept.forget_machine("beta") == ["b"]
    assert found(kept) == (3, 3, 0)
    assert kept.forget_machine("alpha") == ["a"]
    assert found(kept) == (3, 0, 0)
    kept.validate()


def test_another_process_sees_it_and_keeps_nothing_more_of_it(
    kept: BlockStore, settings: DiskCacheSettings
) -> None:
    with opened(settings) as other:
        assert read(other, SENT[0], 0) == payload(SENT[0])
        kept.forget_machine("alpha")
        assert read(other, SENT[0], 0) is None
        with pytest.raises(NotKept):
            write(other, SENT, origins=("a",))
        # It is believed again, from now on.
        kept.add_origin("c", "alpha")
        write(other, SENT, origins=("c",))
        with pytest.raises(NotKept):
            write(other, prompt(4, 1), origins=("c", "a"))
        assert found(kept) == (3, 3, 0)


def test_one_without_a_label_that_is_known_is_not_kept(store: BlockStore) -> None:
    for origins in [("",), ("unknown",)]:
        with pytest.raises(NotKept):
            write(store, OWN, origins=origins)


def test_only_what_was_computed_here_is_found_for_others(kept: BlockStore) -> None:
    assert [kept.find(names, own=True).blocks for names in (OWN, SENT, BOTH)] == [3, 0, 0]
    kept.begin_with([(b"link of own", OWN[2]), (b"link of sent", SENT[2])])
    assert kept.longest([b"link of own", b"link of sent"]).links == 2
    assert kept.longest([b"link of own", b"link of sent"], own=True).links == 1


def test_a_snapshot_that_was_sent_is_not_found_for_others(store: BlockStore) -> None:
    store.add_origin("a", "alpha")
    keep(store, OWN, states=[0, 1, 2])
    keep(store, SENT, states=[0, 1, 2], origins=("a",))
    store.forget_machine("alpha")
    assert store.find(SENT).blocks == 0
    store.validate()


def test_attack_an_older_index_does_not_bring_back_what_was_thrown_away(
    kept: BlockStore, settings: DiskCacheSettings, tmp_path: Path
) -> None:
    kept.close()
    shutil.copy(index_of(settings), tmp_path / "older")
    kept.forget_machine("alpha")
    kept.close()
    shutil.copy(tmp_path / "older", index_of(settings))
    # Its rows say so much, but the files are gone.
    assert [read(kept, name, n) for n, name in enumerate(SENT)] == [None] * 3
    kept.recover()
    assert found(kept) == (3, 0, 0)
    kept.validate()


def test_attack_files_of_another_age_than_the_index_are_misses(
    kept: BlockStore, settings: DiskCacheSettings, tmp_path: Path
) -> None:
    blocks = Path(settings.folder) / "blocks"
    shutil.copytree(blocks, tmp_path / "older")
    kept.forget_machine("alpha")
    shutil.copytree(tmp_path / "older", blocks, dirs_exist_ok=True)
    assert [read(kept, name, n) for names in (SENT, BOTH) for n, name in enumerate(names)] == [None] * 6
    assert found(kept) == (3, 0, 0)
    kept.recover()
    kept.validate()
    assert len(files(settings)) == 3


def test_attack_an_index_that_calls_a_block_this_machine_s_own_does_not_make_it_so(
    store: BlockStore, settings: DiskCacheSettings, tmp_path: Path
) -> None:
    write(store, SENT)
    store.close()
    shutil.copy(index_of(settings), tmp_path / "older")
    # The same blocks are thrown away, and fetched again.
    store.clear()
    store.add_origin("a", "alpha")
    write(store, SENT, origins=("a",))
    store.close()
    shutil.copy(tmp_path / "older", index_of(settings))
    with opened(settings) as again:
        again.recover()
        # The key is another one, too: nothing of the older index counts.
        assert again.find(SENT, own=True).blocks == 0


def test_attack_an_older_index_under_the_same_key_sends_nothing_on(
    store: BlockStore, settings: DiskCacheSettings, tmp_path: Path
) -> None:
    write(store, SENT)
    store.close()
    shutil.copy(index_of(settings), tmp_path / "older")
    with opened(settings) as other:
        other.add_origin("a", "alpha")
        for file in files(settings):
            file.unlink()
        for number, name in enumerate(SENT):
            assert read(other, name, number) is None
        write(other, SENT, origins=("a",))
    shutil.copy(tmp_path / "older", index_of(settings))
    assert store.find(SENT, own=True).blocks == 3, "as the older index has it"
    # The file itself says where it is from; its label is not known to this index.
    assert [read(store, name, n) for n, name in enumerate(SENT)] == [None] * 3
    assert store.find(SENT).blocks == 0


def test_labels_of_which_nothing_is_kept_are_forgotten_at_the_next_start(kept: BlockStore) -> None:
    kept.add_origin("d", "delta")
    kept.recover()
    assert kept.machines() == {"alpha", "beta"}


# ---- Blocks whose writer is gone -------------------------------------------------------------------------


class KilledWriter(BaseException):
    """The process ends here."""


def begun(settings: DiskCacheSettings, *, clock: float) -> None:
    """A worker that is killed while it writes the first block."""

    def at(place: str) -> None:
        if place == "writing":
            raise KilledWriter

    store = BlockStore(settings, clock=lambda: clock, at=at)
    store._drop = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(KilledWriter):
        write(store, OWN)
    store.close()


def test_a_block_whose_writer_was_killed_is_written_again_once_that_is_known(
    settings: DiskCacheSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getpid", lambda: 4321)
    begun(settings, clock=time.time())
    monkeypatch.undo()
    with opened(settings) as store:
        assert write(store, OWN[:1]) == 0
        store.writer_ended(1234)
        assert write(store, OWN[:1]) == 0, "another worker is none of its business"
        store.writer_ended(4321)
        assert files(settings) == []
        write(store, OWN)
        assert store.find(OWN).blocks == 3
        store.validate()


def test_a_block_that_was_begun_long_ago_is_written_again(settings: DiskCacheSettings) -> None:
    begun(settings, clock=1000.0)
    store = BlockStore(settings, clock=lambda: 1000.0 + limits.CACHE_WRITING_S)
    assert write(store, OWN[:1]) == 0
    store.close()
    store = BlockStore(settings, clock=lambda: 1001.0 + limits.CACHE_WRITING_S)
    write(store, OWN)
    assert store.find(OWN).blocks == 3
    store.validate()
    store.close()


def test_a_writer_that_was_given_up_does_not_take_the_new_block_with_it(
    settings: DiskCacheSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a worker of a laptop that slept for an hour in mid-block."""
    later = BlockStore(settings, clock=lambda: 1001.0 + limits.CACHE_WRITING_S)

    def at(place: str) -> None:
        if place == "on the disk":
            monkeypatch.setattr("os.getpid", lambda: 2)
            write(later, OWN[:1])

    early = BlockStore(settings, clock=lambda: 1000.0, at=at)
    monkeypatch.setattr("os.getpid", lambda: 1)
    write(early, OWN[:1])
    assert read(later, OWN[0], 0) == payload(OWN[0])
    later.validate()
    early.close()
    later.close()
