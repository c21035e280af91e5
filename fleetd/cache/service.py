"""The daemon's part of the disk cache: agree at the start, report, clear. Workers read and write themselves.

Every method blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec

from fleetd.cache import text_links
from fleetd.cache.block_store import BlockStore, CacheUnavailable, NotKept
from fleetd.cache.index import FoundBlocks, FoundText
from fleetd.cache.settings import DiskCacheSettings
from fleetd.control.cache_report import CacheReport
from fleetd.errors import ConfigError
from fleetd.process.observe import get_logger

log = get_logger("fleetd.cache")

_Found = TypeVar("_Found", FoundBlocks, FoundText)


class DiskCache:
    """``on``: whether prompts are kept on the disk. ``note``: what workers say of the disk at the moment."""

    def __init__(self, settings: DiskCacheSettings, *, on: bool, note: Callable[[], str]) -> None:
        self._settings = settings
        self._on = on
        self._note = note
        self._store = BlockStore(settings)
        # A store is for one thread at a time; requests come on several.
        self._lock = threading.Lock()

    @property
    def for_workers(self) -> DiskCacheSettings | None:
        """None if nothing is kept."""
        return self._settings if self._on else None

    def start(self) -> None:
        """Before a worker runs: bring files, index, key and quota into agreement. If nothing is to be
        kept any more, throw away what was. A disk that refuses costs one line in the log."""
        with self._lock:
            try:
                if self._on:
                    self._store.recover()
                else:
                    self._store.clear()
            except CacheUnavailable as error:
                log.warning("cache.unavailable", reason=str(error), note="prompts are kept in memory only")
            finally:
                self._store.close()

    def close(self) -> None:
        """Close the index; the next look opens it again."""
        with self._lock:
            self._store.close()

    def open_store(self) -> BlockStore:
        """A store for one thread, which closes it."""
        return BlockStore(self._settings)

    def find(self, names: Sequence[bytes], states: Sequence[bytes] = (), *, own: bool = False) -> FoundBlocks:
        """How many of these blocks, from the first on, are here; see ``Index.find``. None if the disk
        cannot tell."""
        return self._looked_up(lambda: self._store.find(names, states, own=own), FoundBlocks(0, 0, 0.0))

    def _looked_up(self, find: Callable[[], _Found], nothing: _Found) -> _Found:
        if self._on:
            with self._lock, suppress(CacheUnavailable, NotKept):
                return find()
        return nothing

    def begin_with(self, digest: str, links: Sequence[bytes], names: Sequence[bytes], filled: float) -> None:
        """Remember which blocks a text fills, so that it is found before it is tokenized.

        Args:
            links: of the text's beginnings, as ``text_links.links``.
            names: of the blocks that its tokens fill.
            filled: how many blocks the text between two links fills, about.
        """
        if not self._on:
            return
        beginnings = text_links.filled_blocks(digest, links, names, filled)
        with self._lock:
            try:
                self._store.begin_with(beginnings)
            except (CacheUnavailable, NotKept):
                pass  # it is found once it is tokenized

    def longest(self, digest: str, links: Sequence[bytes], *, own: bool = False) -> FoundText:
        """What is here of a text, about; see ``Index.longest``. Nothing if the disk cannot tell."""
        asked = [text_links.kept_as(digest, link) for link in links]
        return self._looked_up(lambda: self._store.longest(asked, own=own), FoundText())

    # ---- whom to believe, and who writes -----------------------------------------------------------------

    def add_origin(self, label: str, machine: str) -> None:
        """Blocks with this label come from this machine. If the disk refuses, none are kept."""
        if self._on:
            with self._lock, suppress(CacheUnavailable):
                self._store.add_origin(label, machine)

    def machines(self) -> set[str]:
        """The machines that blocks may have come from. Raises CacheUnavailable."""
        if not self._on:
            return set()
        with self._lock:
            return self._store.machines()

    def forget_machine(self, machine: str) -> list[str]:
        """Throw away all that came from a machine, or rests on that; returns its labels. Raises
        CacheUnavailable."""
        if not self._on:
            return []
        with self._lock:
            return self._store.forget_machine(machine)

    def writer_ended(self, writer: int) -> None:
        """Throw away what a worker that has ended did not finish. If the disk refuses, that is done once
        the next one has waited for it."""
        if self._on:
            with self._lock, suppress(CacheUnavailable):
                self._store.writer_ended(writer)

    # ---- for people --------------------------------------------------------------------------------------

    def report(self) -> CacheReport:
        """Never fails: what cannot be told is named in the note."""
        if not self._on:
            return CacheReport(folder=self._settings.folder)
        with self._lock:
            try:
                found = self._store.report()
            except CacheUnavailable as error:
                return CacheReport(on=True, folder=self._settings.folder, note=str(error))
            finally:
                self._store.close()
        return msgspec.structs.replace(found, note=self._note())

    def clear(self) -> CacheReport:
        """Throw the key away, then the blocks; returns what there was.

        Raises ConfigError: the key is still there.
        """
        before = self.report()
        with self._lock:
            try:
                self._store.clear()
            except CacheUnavailable as error:
                raise ConfigError(
                    f"The kept prompts could not be cleared: {error}.",
                    hint=f"Delete {self._settings.key_file} yourself: without it they cannot be read.",
                ) from error
            finally:
                self._store.close()
        return before
