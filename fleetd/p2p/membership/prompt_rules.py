"""This machine's own rules about who sees prompts typed here: a file in its home that no other machine gets.

    prompt-rules.json    ["node id", ...]: the machines that may not

The roster says who sees prompts for the whole fleet. A machine sees a prompt that is typed here only if both
allow it, and a person here has confirmed it: an entry of this machine's own in the roster says so, which a
removal ends. A rule holds until a person at this machine changes it or unpairs the machine; records that
others sign, a removal and a new entry too, do not end it.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.errors import ConfigError
from fleetd.p2p.membership import keys
from fleetd.process.joined_threads import joined
from fleetd.storage import durable
from fleetd.text.decoding import json_decoder

_NodeId = Annotated[str, Meta(min_length=keys.ID_CHARS, max_length=keys.ID_CHARS)]
_decode = json_decoder(list[_NodeId]).decode


class PromptRules:
    """The machines that may not see prompts typed here. Only the process that owns the home uses the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._denied: frozenset[str] = frozenset()
        self._lock = asyncio.Lock()

    async def load(self) -> None:
        """Read the file. Raises ConfigError for a damaged one: without it, a rule would be forgotten."""
        await asyncio.to_thread(durable.sweep, self._path)
        written = await asyncio.to_thread(durable.read, self._path, limits.PROMPT_RULES_BYTES)
        try:
            self._denied = frozenset(_decode(written or b"[]"))
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"The rules about who sees prompts typed here, {self._path}, are damaged: {error}.",
                hint="Restore the file from a backup; or delete it and give each rule again with "
                "`fleetctl peers prompts NAME no`.",
            ) from None

    def allows(self, node_id: str) -> bool:
        return node_id not in self._denied

    async def allow(self, node_id: str, allowed: bool) -> None:
        """Set the rule for a machine; on the disk on return.

        Raises DiskFull or ConfigError; then a denial holds until the daemon ends, a permission does not.
        """
        async with self._lock:
            if self.allows(node_id) == allowed:
                return
            denied = self._denied - {node_id} if allowed else self._denied | {node_id}
            if not allowed:
                self._denied = denied
            # To its end, even if this is cancelled: the next rule must not reach the disk before it.
            await joined(partial(self._write, denied))

    def _write(self, denied: frozenset[str]) -> None:
        durable.replace(self._path, msgspec.json.encode(sorted(denied)))
        self._denied = denied
