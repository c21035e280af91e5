"""Keeps the roster of this machine and its copy on disk in step.

A change is either used at once and saved soon after, or promised: written to disk first and used only when
the caller keeps it. Pairing needs the second form, because each machine must have the other on disk before it
says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fleetd.errors import FleetError
from fleetd.p2p.links import Address
from fleetd.p2p.membership.identity import Identity, short_id
from fleetd.p2p.membership.roster import Roster
from fleetd.p2p.membership.roster_file import AddressFile, RosterFile
from fleetd.p2p.membership.roster_record import RosterRecord
from fleetd.process.joined_threads import joined
from fleetd.process.observe import get_logger

log = get_logger("fleetd.p2p")

SAVE_AGAIN_S = 5.0
_T = TypeVar("_T")


class RosterKeeper:
    """The roster in use, the promised changes to it, and the two files that a restart reads."""

    def __init__(self, folder: Path) -> None:
        self.roster: Roster
        #: Addresses as they are on disk, by node id.
        self.saved_addresses: dict[str, list[Address]] = {}
        self._identity: Identity
        self._file = RosterFile(folder / "roster")
        self._address_file = AddressFile(folder / "addresses.json")
        # Changes that are on disk and not yet in the roster in use.
        self._promised: list[Callable[[Roster], Any]] = []
        self._saved_digest = b""
        self._save_due = asyncio.Event()
        self._lock = asyncio.Lock()

    async def load(self, identity: Identity) -> Roster:
        """Read both files; returns the roster in use. Raises RosterRefused for a damaged one."""
        self._identity = identity
        self.roster = Roster(identity, await asyncio.to_thread(self._file.load))
        self._saved_digest = self.roster.digest()
        self.saved_addresses = await asyncio.to_thread(self._address_file.load)
        return self.roster

    def name_of(self, node_id: str) -> str:
        """The name of a machine; of a removed one the name in its newest record."""
        member = self.roster.members.get(node_id)
        if member is not None:
            return member.name
        records = [record for record in self.roster.records() if record.subject == node_id]
        return max(records, key=lambda record: record.sequence).name if records else short_id(node_id)

    # ---- promised changes --------------------------------------------------------------------------------

    async def promise(self, change: Callable[[Roster], _T]) -> _T:
        """Write a change to disk without using it yet; ``keep`` or ``drop`` must follow.

        Returns what ``change`` returns, which must not depend on when it is called. Raises what it raises,
        and DiskFull or ConfigError: then nothing has changed.
        """
        promised = change(Roster(self._identity, self.roster.records()))
        self._promised.append(change)
        try:
            await self.save()
        except BaseException:
            self.drop(change)
            raise
        return promised

    def keep(self, change: Callable[[Roster], Any]) -> None:
        """Apply a promised change to the roster in use. Raises what it raises, and withdraws it then."""
        self._promised.remove(change)
        try:
            change(self.roster)
        except FleetError:
            self.save_soon()
            raise

    def drop(self, change: Callable[[Roster], Any]) -> None:
        """Withdraw a promised change, from the disk too."""
        self._promised.remove(change)
        self.save_soon()

    # ---- on disk -----------------------------------------------------------------------------------------

    async def save(self) -> None:
        """Write the roster with the promised changes, if the file differs. Raises DiskFull or ConfigError."""
        async with self._lock:
            roster = self.roster
            if self._promised:
                roster = Roster(self._identity, roster.records())
                for change in self._promised:
                    change(roster)
            records, digest = roster.records(), roster.digest()
            if digest != self._saved_digest:
                self._saved_digest = b""  # unknown if the write fails
                # To its end, even if this is cancelled: the next save must not reach the disk before it.
                await joined(partial(self._write, records, digest))

    def _write(self, records: Sequence[RosterRecord], digest: bytes) -> None:
        self._file.save(records)
        self._saved_digest = digest

    def save_soon(self) -> None:
        """Let ``save_when_due`` write both files."""
        self._save_due.set()

    async def save_when_due(self, addresses: Callable[[], Mapping[str, list[Address]]]) -> None:
        """Write roster and addresses after each ``save_soon``, until cancelled; retries on a full disk."""
        while True:
            await self._save_due.wait()
            self._save_due.clear()
            try:
                await self.save()
                if (found := dict(addresses())) != self.saved_addresses:
                    await asyncio.to_thread(self._address_file.save, found)
                    self.saved_addresses = found
            except FleetError as error:
                log.warning("roster.not_saved", error=str(error), again_in_s=SAVE_AGAIN_S)
                await asyncio.sleep(SAVE_AGAIN_S)
                self._save_due.set()
