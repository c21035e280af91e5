"""Two machines with disks of their own, of which one may fetch what the other one has read."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import tiny_models
from disk_worker import BLOCK, Worker, settings_in
from kv_blocks import opened
from wire_changes import chunks_of

from fleetd.cache import block_stream
from fleetd.cache.block_file import BlockHeader
from fleetd.cache.block_store import BlockStore
from fleetd.cache.machine_key import MachineKey
from fleetd.cache.service import DiskCache
from fleetd.cache.settings import DiskCacheSettings
from fleetd.engine.prefixes.prefix_cache import DENSE, EQUIVALENT
from fleetd.engine.protocol import BLOCKS, FetchBlocks, Finished, KvFetched, KvMissing, StreamTag
from fleetd.errors import FleetError
from fleetd.requests.kv_fetching import messages
from fleetd.requests.kv_fetching.server import parts_to_send
from fleetd.sealed.stream import SealedSender

# The machine that has read the prompt, and its label on the one that has not.
THERE, ORIGIN = "there", "from there"
# Blocks of the prompt that the tests ask, which has some tokens more.
WHOLE = 3
PROMPT = tiny_models.prompt(WHOLE * BLOCK + BLOCK // 2 + 4)


class TwoMachines:
    """One that has read the prompt and keeps it, ``there``, and one that has not, ``here``."""

    def __init__(
        self, model: Any, tokenizer: Any, root: Path, prompt: list[int], *, max_tokens: int = 8
    ) -> None:
        self.model, self.tokenizer, self.root, self.prompt = model, tokenizer, root, prompt
        self.max_tokens = max_tokens
        self.settings = settings_in(root / "there")
        self.there = Worker(model, tokenizer, self.settings)
        self.there.ask("first", prompt, max_tokens=max_tokens)
        self.there.stop()
        self.expected = self.there.text("first")
        self.here = Worker(model, tokenizer, settings_in(root / "here"))
        with opened(settings_in(root / "here")) as store:
            store.add_origin(ORIGIN, THERE)
        self.threads: list[threading.Thread] = []

    def ask(self, **fields: Any) -> None:
        self.here.put("second", self.prompt, fetches=True, max_tokens=self.max_tokens, **fields)

    def lacking(self) -> KvMissing:
        while not (found := [e for e in self.here.events if isinstance(e, KvMissing)]):
            self.here.turn()
        return found[0]

    def decide(
        self,
        blocks: int,
        *,
        equivalent: bool = False,
        last_first: bool = False,
        within_s: float = 0.0,
        since_s: float = 0.0,
    ) -> None:
        # As far as is known a block takes a second, as a token does where computing is slow.
        self.here.scheduler.tell(
            FetchBlocks("second", blocks, 1.0 * last_first, equivalent, last_first, within_s, since_s, ORIGIN)
        )

    def send(
        self,
        work: Callable[[socket.socket, SealedSender, list[bytes]], None],
        blocks: int = WHOLE,
        *,
        equivalent: bool = False,
        last_first: bool = False,
        within_s: float = 0.0,
        since_s: float = 0.0,
        change: Callable[[list[bytes]], list[bytes]] | None = None,
    ) -> None:
        """``work`` is what the other machine does with its end of the stream; ``change``: what a machine
        between the two makes of its chunks."""
        asked = self.lacking()
        cache = DiskCache(self.settings, on=True, note=lambda: "")
        wanted = (asked.equivalent_names if equivalent else asked.names)[:blocks]
        question = messages.FetchQuestion(wanted, "second", asked.rows, asked.states, last_first)
        names = parts_to_send(cache, question)
        cache.close()
        near, far = socket.socketpair()
        key = os.urandom(32)
        self.here.scheduler.put_stream(StreamTag("second", BLOCKS, key, "connector"), near)
        if change is not None:
            far = self._relayed(far, change)
        self.decide(blocks, equivalent=equivalent, last_first=last_first, within_s=within_s, since_s=since_s)

        def run() -> None:
            with far, suppress(FleetError, OSError):
                work(far, SealedSender(far, key, "acceptor"), names)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self.threads.append(thread)

    def _relayed(self, onwards: socket.socket, change: Callable[[list[bytes]], list[bytes]]) -> socket.socket:
        """The end of a stream whose chunks are changed on their way."""
        far, tap = socket.socketpair()

        def run() -> None:
            with tap, onwards, suppress(OSError):  # it hangs up once it has seen the lie
                wire = b"".join(iter(lambda: tap.recv(1 << 20), b""))
                onwards.sendall(b"".join(change(chunks_of(wire))))

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()
        return far

    def honest(self, sock: socket.socket, sender: SealedSender, names: list[bytes]) -> None:
        store = BlockStore(self.settings)
        block_stream.send(sender, names, store.read)
        store.close()

    def close(self) -> None:
        self.here.stop()
        for thread in self.threads:
            thread.join(60)

    def finish(self) -> tuple[Finished, KvFetched | None]:
        done = self.here.finish("second")
        assert self.here.text("second") == self.expected
        told = [e for e in self.here.events if isinstance(e, KvFetched)]
        return done, told[0] if told else None


def keep_as_equivalent(worker: Worker, tokens: list[int]) -> None:
    """As if a helper of another kind had computed some of it."""
    worker.ask("kept", tokens)
    found = worker.scheduler.prefix.fetch([*tokens, 0])
    assert found.cache
    worker.tier.store(tokens[: found.tokens], found.cache, EQUIVALENT, local_only=False)
    worker.stop()


def forget_exact(settings: DiskCacheSettings, machines: TwoMachines, tokens: list[int]) -> None:
    """Leave only the blocks of other numbers on the disk."""
    key = MachineKey.load_or_create(Path(settings.key_file))
    store = BlockStore(settings)
    for name in machines.here.tier._names(tokens, DENSE, local_only=False):
        (Path(settings.folder) / "blocks" / key.file_name(name)).unlink()
        assert store.read(name, lambda header: []) is None
    store.close()


# ---- What the machine that is asked may do with its end of the stream -----------------------------------


def damaged(
    machines: TwoMachines, change: Callable[[int, int, int, memoryview], None]
) -> Callable[..., None]:
    """Send other bytes than those on the disk. ``change`` is told the number of what is sent, and
    of the buffer in it."""

    def work(sock: socket.socket, sender: SealedSender, names: list[bytes]) -> None:
        store = BlockStore(machines.settings)
        count = iter(range(len(names)))

        def read(name: bytes, targets: Callable[[BlockHeader], Any]) -> BlockHeader | None:
            held: list[memoryview] = []

            def kept(header: BlockHeader) -> Any:
                buffers = targets(header)
                held.extend(buffers)
                return buffers

            header = store.read(name, kept)
            number = next(count)
            for part, buffer in enumerate(held):
                change(number, part, len(held), buffer)
            return header

        block_stream.send(sender, names, read)
        store.close()

    return work


def every_byte(number: int, part: int, parts: int, buffer: memoryview) -> None:
    """A change to all that is sent."""
    buffer[:] = bytes(b ^ 1 for b in buffer)


def gone(sock: socket.socket, sender: SealedSender, names: list[bytes]) -> None:
    """Hang up."""


def first_then(blocks: int, after: Callable[[], object], machines: TwoMachines) -> Callable[..., None]:
    """Send so many blocks, and the others after ``after``, or no others if it says None."""

    def work(sock: socket.socket, sender: SealedSender, names: list[bytes]) -> None:
        store = BlockStore(machines.settings)
        count = iter(range(len(names)))

        def read(name: bytes, targets: Callable[[BlockHeader], Any]) -> BlockHeader | None:
            if next(count) == blocks and after() is None:
                return None
            return store.read(name, targets)

        block_stream.send(sender, names, read)
        store.close()

    return work
