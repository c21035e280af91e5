"""An index of kept prompts that fails at any statement: answers are the same, and the tier comes back."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from disk_worker import BLOCK, Worker
from failing_database import FAULTS, FailingDatabase

from fleetd import limits
from fleetd.cache.block_store import BlockStore
from fleetd.cache.settings import DiskCacheSettings

pytestmark = pytest.mark.usefixtures("on_cpu", "patient")
# A block and some.
PROMPT = tiny_models.prompt(BLOCK + 44)
FROM_THEN_ON = 1 << 30
WAYS = [(fault, times) for times in (1, FROM_THEN_ON) for fault in FAULTS]


class Lives:
    """One worker after another, on the same folder."""

    def __init__(self, model: Any, tokenizer: Any, folder: Path) -> None:
        self._model, self._tokenizer = model, tokenizer
        self.settings = DiskCacheSettings(str(folder / "kv"), str(folder / "kv.key"), 1 << 30)

    @contextmanager
    def worker(self) -> Iterator[Worker]:
        made = Worker(self._model, self._tokenizer, self.settings)
        try:
            yield made
        finally:
            made.stop()

    def answer(self) -> tuple[str, int, str]:
        """The text, the tokens that the disk had, and what is said of the disk once all is written."""
        with self.worker() as worker:
            done = worker.ask("asked", PROMPT, max_tokens=4)
            text = worker.text("asked")
        return text, done.timings.restored_tokens, worker.tier.figures.note


def left_unready(settings: DiskCacheSettings) -> bool:
    """True if the index has a block that was entered and not declared ready."""
    with suppress(sqlite3.OperationalError):  # no index, or nothing in it yet
        with closing(sqlite3.connect(f"file:{settings.folder}/index.db?mode=rw", uri=True)) as index:
            (blocks,) = index.execute("SELECT count(*) FROM blocks WHERE NOT ready").fetchone()
            return bool(blocks)
    return False


def fails_at(lives: Lives, fault: str, times: int, statement: int, expected: str) -> bool:
    """Fail at this statement while a worker reads a prompt and another one restores it. False if there are
    not so many."""
    database = FailingDatabase(statement, fault, times, only="index.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", database.connecting())
        for _ in range(2):
            text, restored, note = lives.answer()
            assert text == expected
            assert restored in (0, BLOCK)
            assert note == "" or "cannot be used" in note
        if times == FROM_THEN_ON and statement == 0:
            assert (restored, bool(note)) == (0, True)
    if left_unready(lives.settings):
        # A block that could be neither written nor taken back counts as being written for CACHE_WRITING_S, or
        # until a daemon starts.
        store = BlockStore(lives.settings)
        store.recover()
        store.close()
    # The disk is as before, and the next worker keeps and finds what there is.
    assert lives.answer()[0] == expected
    assert lives.answer() == (expected, BLOCK, "")
    return database.failed


@pytest.fixture
def expected(model: Any, tokenizer: Any, tmp_path: Path) -> str:
    return Lives(model, tokenizer, tmp_path / "undisturbed").answer()[0]


@pytest.mark.parametrize(("fault", "times"), WAYS)
def test_an_index_that_fails_changes_no_answer(
    model: Any, tokenizer: Any, tmp_path: Path, expected: str, fault: str, times: int
) -> None:
    number = WAYS.index((fault, times))
    statement = 11 + 3 * number if number % 3 else 0
    fails_at(Lives(model, tokenizer, tmp_path / "own"), fault, times, statement, expected)


@pytest.mark.long
@pytest.mark.parametrize(("fault", "times"), WAYS)
def test_an_index_that_fails_at_any_statement_changes_no_answer(
    model: Any, tokenizer: Any, tmp_path: Path, expected: str, fault: str, times: int
) -> None:
    statement = 0
    while fails_at(Lives(model, tokenizer, tmp_path / str(statement)), fault, times, statement, expected):
        statement += 1
    assert statement > 40


def test_a_writer_that_could_not_write_does_so_again_and_says_no_more(
    model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CACHE_AGAIN_S", 0.0)
    lives = Lives(model, tokenizer, tmp_path)
    database = FailingDatabase(0, "locked", FROM_THEN_ON, only="index.db")
    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", database.connecting())
        with lives.worker() as worker:
            worker.ask("locked", PROMPT, max_tokens=4)
            assert worker.tier.writer.flush(60)
            assert "injected" in worker.tier.figures.note
            assert worker.tier.figures.dropped > 0
            database.mend()
            worker.ask("again", PROMPT[:-7], max_tokens=4)
            assert worker.tier.writer.flush(60)
            assert worker.tier.figures.note == ""
    store = BlockStore(lives.settings)
    assert store.report().models[0].blocks == 1
    store.close()
