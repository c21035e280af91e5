"""Kept keys and values for other machines: what is here of a prompt that they have, and sending it.

The daemon reads its own disk: no engine is needed, and none is disturbed.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial

from fleetd import limits
from fleetd.cache import block_names, block_stream
from fleetd.cache.block_file import BlockHeader
from fleetd.cache.block_store import BlockStore, CacheUnavailable
from fleetd.cache.index import FoundBlocks
from fleetd.cache.service import DiskCache
from fleetd.errors import Forbidden
from fleetd.p2p.session.transport import PeerStream
from fleetd.process.joined_threads import joined
from fleetd.process.used_socket import shut_down
from fleetd.requests.admission import ConcurrencyLimit, ServingContext
from fleetd.requests.kv_fetching import messages
from fleetd.requests.kv_fetching.choice import checked_by
from fleetd.requests.kv_fetching.fetch_counts import FetchCounts
from fleetd.requests.kv_fetching.kept_prompts import KeptPrompts
from fleetd.requests.remote.bulk_dialer import BulkDialer, invitation
from fleetd.requests.remote.peer_stream import own_id
from fleetd.sealed.stream import SealedSender


class BlockServer:
    """The handlers of ``messages.FIND``, ``LOOK`` and ``FETCH``.

    Args:
        prompts: what this machine keeps, by text.
        counts: told what is sent, by ``name_of`` the machine.
        may_see: whether a machine may see this one's prompts; it gets nothing otherwise.
    """

    def __init__(
        self,
        dialer: BulkDialer,
        cache: DiskCache,
        prompts: KeptPrompts,
        context: ServingContext,
        may_see: Callable[[str], bool],
        counts: FetchCounts,
        name_of: Callable[[str], str],
    ) -> None:
        self._dialer = dialer
        self._cache = cache
        self._prompts = prompts
        self._may_see = may_see
        self._counts = counts
        self._name_of = name_of
        self._context = context
        most, each = limits.FETCHES, limits.FETCHES_PER_PEER
        self._limit = ConcurrencyLimit(context, "fetch", most, f"sends {most} prompts", most_per_peer=each)
        # Threads of their own: whatever else this daemon does on a thread must not wait for slow readers.
        self._threads = ThreadPoolExecutor(most, "block-send")

    async def find(self, peer: str, body: bytes, stream: PeerStream) -> None:
        asked = messages.decode(body, messages.BlocksQuestion)
        self._check(peer)
        found = await self._found(asked)
        blocks, state_bytes = found.blocks, 0
        if asked.states:
            snapshots = checked_by(found.states)
            blocks = snapshots[-1][0] if snapshots else 0
            state_bytes = sum(n_bytes for _, n_bytes in snapshots)
        answer = messages.BlocksFound(blocks, found.bytes_per_s, state_bytes, found.cached or 0.0)
        stream.send(messages.encode(answer))

    async def _found(self, asked: messages.BlocksQuestion) -> FoundBlocks:
        """The blocks that are on the disk. Blocks of a prompt that was just read are written now, and waited
        for a moment: subagents go to other machines just then."""
        found = await asyncio.to_thread(_own, self._cache, asked)
        first = found.blocks
        # Behind the last snapshot nothing is of use, so nothing is waited for there.
        coming = 0 if asked.states and first else self._prompts.hurry(asked.names[first:])
        wanted = first + (min(coming, 1) if asked.states else coming)
        until_s = time.monotonic() + limits.FETCH_WRITING_S
        while found.blocks < wanted and time.monotonic() < until_s:
            await asyncio.sleep(limits.FETCH_WRITING_POLL_S)
            found = await asyncio.to_thread(_own, self._cache, asked)
        if coming and found.blocks == first:
            self._prompts.not_written(asked.names[first])
        return found

    async def look(self, peer: str, body: bytes, stream: PeerStream) -> None:
        asked = messages.decode(body, messages.TextQuestion)
        self._check(peer)
        found = await asyncio.to_thread(partial(self._prompts.look, own=True), asked.digest, asked.links)
        if found.in_memory > found.on_disk:
            # It will be asked for by the names of its blocks in a moment.
            self._prompts.hurry_model(asked.digest)
        stream.send(messages.encode(found))

    async def fetch(self, peer: str, body: bytes, stream: PeerStream) -> None:
        asked = messages.decode(body, messages.FetchQuestion)
        self._check(peer)
        names = await asyncio.to_thread(parts_to_send, self._cache, asked)
        with self._limit.serving(peer, own_id(asked.id)):
            with self._dialer.expect() as expected:
                stream.send(messages.encode(messages.FetchOffer(invitation(expected))))
                sock = await expected.socket()
            await self._send(self._name_of(peer), sock, expected.key, names)

    def _check(self, peer: str) -> None:
        self._context.admit()
        if not self._may_see(peer):
            raise Forbidden("This machine's prompts are not for that one.")

    async def _send(self, machine: str, sock: socket.socket, key: bytes, names: list[bytes]) -> None:
        work = partial(self._send_all, machine, sock, key, names)
        # Stopped, the thread ends at its next byte.
        await joined(work, stop=partial(shut_down, sock), threads=self._threads)

    def _send_all(self, machine: str, sock: socket.socket, key: bytes, names: list[bytes]) -> None:
        store: BlockStore = self._cache.open_store()
        read_s, following = 0.0, iter(names[1:])

        def read(name: bytes, targets: Callable[[BlockHeader], Sequence[memoryview]]) -> BlockHeader | None:
            nonlocal read_s
            begun_s = time.monotonic()
            try:
                if (after := next(following, None)) is not None:
                    store.read_soon(after)
                return store.read(name, targets, own=True)
            except CacheUnavailable:
                return None  # the stream ends early, and as it should: what was sent is whole
            finally:
                read_s += time.monotonic() - begun_s

        cached: float | None = None
        with closing(store):
            with sock:
                with suppress(CacheUnavailable):
                    cached = store.cached_share(names)
                sent = block_stream.send(SealedSender(sock, key, "acceptor", steady=True), names, read)
            self._counts.sent(machine, sent)
            with suppress(CacheUnavailable):
                store.sent(sent, read_s, cached)


def parts_to_send(cache: DiskCache, asked: messages.FetchQuestion) -> list[bytes]:
    """The names of the blocks and then of the snapshots, as they lie here. Blocks."""
    names, states = _kept(asked)
    if not asked.states:
        return names[::-1] if asked.last_first else names
    found = cache.find(names, states, own=True)
    return names + [states[n - 1] for n, _ in checked_by(found.states, blocks=len(states))]


def _own(cache: DiskCache, asked: messages.BlocksQuestion) -> FoundBlocks:
    """The blocks that this machine computed itself: what came from another one is not sent on."""
    return cache.find(*_kept(asked), own=True)


def _kept(asked: messages.BlocksQuestion | messages.FetchQuestion) -> tuple[list[bytes], list[bytes]]:
    """The names under which its blocks and its snapshots lie here."""
    kept = [block_names.kept_as(name, local_only=False) for name in asked.names]
    states = [block_names.state_name(name) for name in kept] if asked.states else []
    return kept if asked.rows else [], states
