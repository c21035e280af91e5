"""Keys and values that another machine keeps: asked for, priced, sent. No failure reaches an answer."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kv_blocks
import msgspec
import pytest
from fakes import WITHIN_S, FakeEngine, FakeFolder
from keepers import SIZE, Keeper, fleet
from requests_driver import answered, request_of
from sharing_fakes import HomePartners, own_card

from fleetd import limits
from fleetd.cache import block_names, block_stream
from fleetd.cache.block_file import BlockHeader
from fleetd.cache.block_store import BlockStore, CacheUnavailable
from fleetd.engine.protocol import (
    Accepted,
    ChatPrompt,
    Delta,
    Event,
    Finished,
    Generate,
    KvFetched,
    KvMissing,
    Timings,
)
from fleetd.errors import Forbidden, Overloaded, PeerLost
from fleetd.p2p.node import Node
from fleetd.p2p.session.transport import PeerStream
from fleetd.requests.job import Job
from fleetd.requests.kv_fetching import messages
from fleetd.requests.kv_fetching.client import BlockFetching
from fleetd.requests.kv_fetching.messages import FetchOffer
from fleetd.requests.kv_fetching.server import BlockServer
from fleetd.requests.members.members import Members
from fleetd.requests.pipeline import Pipeline
from fleetd.requests.remote.bulk_dialer import BulkDialer, invitation
from fleetd.sealed.stream import SealedReceiver

TARGET = FakeFolder("m")
NAMES = kv_blocks.prompt(1, 4)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine says what it keeps and begins to send it in time, however busy the machine is."""
    for wait in ("FETCH_FIND_S", "FETCH_DECIDE_S"):
        monkeypatch.setattr(limits, wait, WITHIN_S)


class Pool:
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    def engine(self, folder: Any) -> FakeEngine:
        return self._engine


class FetchingHome:
    """The machine that has a prompt and asks."""

    def __init__(self, node: Node, keepers: list[Keeper], **fields: Any) -> None:
        self.engine = FakeEngine()
        self.partners = HomePartners(node, keepers, **fields)  # type: ignore[arg-type]
        self.members = Members(self.partners.machines, lambda: own_card("home"))
        self.step = BlockFetching(self.partners, Pool(self.engine), self.members)  # type: ignore[arg-type]
        content = ChatPrompt(messages=[{"role": "user", "content": "hi"}])
        self.request = request_of(Job("m", Generate("r1", content), "socket", "chat"), TARGET)
        self.ended = asyncio.Event()
        self.asked: Generate | None = None
        self.fetched_tokens = 0

    async def run(
        self, lacking: KvMissing, fetched: Callable[[], KvFetched | None] = lambda: None
    ) -> list[Any]:
        """The request, whose engine reports ``lacking`` and, once it has its answer, what came of it."""

        async def stream(generate: Generate) -> AsyncGenerator[Event, None]:
            self.asked = generate
            yield Accepted("r1", 1100)
            if generate.fetches:
                yield lacking
                await self.engine.until(lambda: self.engine.fetches)
                if (told := await asyncio.to_thread(fetched)) is not None:
                    yield told
            yield Delta("r1", "ok", 1)
            yield Finished("r1", "stop", timings=Timings(fetched_tokens=self.fetched_tokens))

        pipeline = Pipeline([self.step])
        try:
            return [event async for event in answered(pipeline, self.request, stream)]
        finally:
            await self.step.close()
            self.engine.close()

    def receive(self, names: list[bytes]) -> list[bytes]:
        return self.receive_kept(range(len(names)))

    def receive_kept(self, numbers: Sequence[int], *, leave: bool = False) -> list[bytes]:
        """What the stream that the engine was given brings: blocks or snapshots of these numbers. Blocks.

        ``leave``: after these, whatever else comes.
        """
        tag, sock = self.engine.tags["blocks"], self.engine.streams["blocks"]
        wholes: list[bytearray] = []

        def targets(number: int, header: BlockHeader) -> list[memoryview]:
            assert header == kv_blocks.header(numbers[number], SIZE)
            wholes.append(bytearray(header.nbytes))
            return [memoryview(wholes[-1])[: header.sizes[0]], memoryview(wholes[-1])[header.sizes[0] :]]

        block_stream.receive(
            SealedReceiver(sock, tag.key, tag.role),
            range(len(numbers)),
            targets,
            lambda number: not leave or number + 1 < len(numbers),
        )
        return [bytes(whole) for whole in wholes]


def lacking(names: list[bytes], each_s: float = 5.0) -> KvMissing:
    return KvMissing("r1", names, [each_s * (i + 1) for i in range(len(names))], SIZE)


def payloads(names: list[bytes]) -> list[bytes]:
    return [kv_blocks.payload(block_names.kept_as(name, local_only=False), SIZE) for name in names]


async def test_blocks_come_from_the_machine_that_has_most_of_them(tmp_path: Path) -> None:
    async with fleet(tmp_path, True, True) as (node, keepers):
        keepers[0].keep(NAMES[:2])
        keepers[1].keep(NAMES)
        home = FetchingHome(node, keepers)

        def fetched() -> KvFetched:
            assert home.receive(NAMES) == payloads(NAMES)
            return KvFetched("r1", 4, 4 * SIZE, 0.5)

        told = await home.run(lacking(NAMES), fetched)
        assert [type(event).__name__ for event in told][-3:] == ["Accepted", "Delta", "Finished"]
        assert home.engine.fetches[0].blocks == 4
        assert home.request.attempt.fetched is not None
        assert (home.request.attempt.fetched.machine, home.request.attempt.fetched.n_bytes) == (
            "keeper1",
            4 * SIZE,
        )
        assert home.partners.came == [(keepers[1].node_id, 4 * SIZE, 0.5, False)]
        assert keepers[0].outcomes == []


@pytest.mark.parametrize("code", ["peer_wrong", "peer_late"])
async def test_what_comes_has_the_label_of_its_machine_which_a_lie_ends(tmp_path: Path, code: str) -> None:
    async with fleet(tmp_path, True) as (node, keepers):
        keepers[0].keep(NAMES)
        home, lied = FetchingHome(node, keepers), list[str]()

        async def label(node_id: str) -> str:
            return f"of {node_id}"

        def fetched() -> KvFetched:
            home.receive(NAMES)
            return KvFetched("r1", 0, 0, 0.5, code, "Its keys and values are wrong, or late.")

        home.step.label, home.members.lied = label, lied.append
        await home.run(lacking(NAMES), fetched)
        assert [asked.origin for asked in home.engine.fetches] == [f"of {keepers[0].node_id}"]
        assert lied == ([keepers[0].node_id] if code == "peer_wrong" else [])


@pytest.mark.parametrize(("rtt_s", "asked"), [(0.39, 1), (0.41, 0)])
async def test_a_machine_behind_a_path_that_is_long_beside_the_prefill_is_not_asked(
    tmp_path: Path, rtt_s: float, asked: int
) -> None:
    async with fleet(tmp_path, True) as (node, keepers):
        home = FetchingHome(node, keepers, rtt_s=rtt_s)
        assert pytest.approx(0.4) == limits.FETCH_LOOK_SHARE * 20.0
        told = await home.run(lacking(NAMES))
        assert isinstance(told[-1], Finished)
        assert [fetch.blocks for fetch in home.engine.fetches] == [0]
        assert len(home.partners.asked) == asked


async def test_over_a_slow_link_the_last_block_comes_first_and_to_leave_half_way_is_no_failure(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path, True) as (node, keepers):
        keepers[0].keep(NAMES)
        # A block takes about as long as computing it.
        home = FetchingHome(node, keepers, bytes_per_s=SIZE / 5)

        def fetched() -> KvFetched:
            assert home.receive_kept([3, 2], leave=True) == payloads(NAMES[:1:-1])
            home.engine.streams["blocks"].close()
            return KvFetched("r1", 2, 2 * SIZE, 0.5)

        await home.run(lacking(NAMES), fetched)
        (asked,) = home.engine.fetches
        assert (asked.blocks, asked.last_first) == (4, True)
        (came,) = home.step.counts.machines()
        # All of it would have been computed.
        assert (came.failed, came.saved_s) == (0, 4 * 5.0 - 0.5)


@pytest.mark.parametrize("rows", [True, False])
async def test_where_a_model_needs_snapshots_the_last_two_come_after_the_rows(
    tmp_path: Path, rows: bool
) -> None:
    async with fleet(tmp_path, True) as (node, keepers):
        keepers[0].keep(NAMES, states=[1, 2])
        home = FetchingHome(node, keepers)
        kept = [block_names.kept_as(name, local_only=False) for name in NAMES[:3]]
        sent = [*(kept if rows else []), *(block_names.state_name(name) for name in kept[1:])]

        def fetched() -> KvFetched:
            numbers = [*(range(3) if rows else []), 1, 2]
            assert home.receive_kept(numbers) == [kv_blocks.payload(name, SIZE) for name in sent]
            return KvFetched("r1", 3, 5 * SIZE, 0.5)

        await home.run(msgspec.structs.replace(lacking(NAMES), rows=rows, states=True), fetched)
        # Rows past the last snapshot are of no use.
        assert home.engine.fetches[0].blocks == 3


async def test_a_machine_that_takes_four_times_as_long_is_predicted_so_the_next_time(tmp_path: Path) -> None:
    size = limits.MIB
    async with fleet(tmp_path, True) as (node, keepers):
        keepers[0].keep(NAMES)
        members: Members | None = None
        seen = []
        for _ in range(2):
            # Two seconds by the figures of the link.
            home = FetchingHome(node, keepers, bytes_per_s=4 * size / 2)
            members = home.step.members = members or home.members

            def fetched(home: FetchingHome = home) -> KvFetched:
                home.receive(NAMES)
                return KvFetched("r1", 4, 4 * size, 8.0, opening_s=1.0)

            await home.run(msgspec.structs.replace(lacking(NAMES, each_s=100.0), block_bytes=size), fetched)
            (came,) = home.step.counts.machines()
            seen.append((came.took_s / came.predicted_s, home.partners.came[0][-1]))
        ratios, doubts = zip(*seen, strict=True)
        assert ratios[0] == pytest.approx(4, rel=0.05)
        assert ratios[1] == pytest.approx(1)
        # What is clearly late puts the link in doubt.
        assert doubts == (True, False)


async def test_a_fetch_has_a_bound_for_all_of_it(tmp_path: Path) -> None:
    async with fleet(tmp_path, True) as (node, keepers):
        keepers[0].keep(NAMES)
        home = FetchingHome(node, keepers)
        await home.run(lacking(NAMES), lambda: KvFetched("r1", 4, 4 * SIZE, 0.5))
        assert home.engine.fetches[0].within_s == limits.FETCH_BLOCK_S


async def test_a_machine_that_is_late_is_asked_for_other_work(tmp_path: Path) -> None:
    async with fleet(tmp_path, True) as (node, keepers):
        keepers[0].keep(NAMES)
        home = FetchingHome(node, keepers)
        await home.run(lacking(NAMES), lambda: KvFetched("r1", 1, SIZE, 2.5, "peer_late", "Too late."))
        assert home.members.left_out(keepers[0].node_id, "fetch")
        assert not home.members.left_out(keepers[0].node_id, "answer")


async def test_attack_a_machine_that_never_says_what_it_keeps_is_asked_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FETCH_FIND_S", 0.05)
    async with fleet(tmp_path, True) as (node, keepers):

        async def silent(peer: str, body: bytes, stream: PeerStream) -> None:
            await stream.receive()

        keepers[0].node.handle(messages.FIND, silent)
        home = FetchingHome(node, keepers)
        for left_out in (False, True):
            home.engine.fetches.clear()
            await home.run(lacking(NAMES))
            assert bool(home.members.left_out(keepers[0].node_id, "fetch")) is left_out


@pytest.mark.parametrize("exact_ones", [False, True])
async def test_blocks_of_other_numbers_come_where_there_are_fewer_exact_ones(
    tmp_path: Path, exact_ones: bool
) -> None:
    others = kv_blocks.prompt(1, 4, namespace="equivalent")
    async with fleet(tmp_path, True) as (node, keepers):
        keepers[0].keep(others)
        if exact_ones:
            keepers[0].keep(NAMES)
        home = FetchingHome(node, keepers)
        wanted = NAMES if exact_ones else others

        def fetched() -> KvFetched:
            assert home.receive(wanted) == payloads(wanted)
            return KvFetched("r1", 4, 4 * SIZE, 0.5)

        await home.run(msgspec.structs.replace(lacking(NAMES), equivalent_names=others), fetched)
        assert [(fetch.blocks, fetch.equivalent) for fetch in home.engine.fetches] == [(4, not exact_ones)]


@pytest.mark.parametrize("states", [[], [3], [0, 3]])
async def test_a_snapshot_that_could_not_be_checked_is_not_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: list[int]
) -> None:
    # Those at the ends of the first block and of the fourth are too far apart.
    monkeypatch.setattr(limits, "FETCH_CHECK_BLOCKS", 2)
    async with fleet(tmp_path, True) as (node, keepers):
        keepers[0].keep(NAMES, states=states)
        body = messages.encode(messages.BlocksQuestion(NAMES, states=True))
        answer = await node.ask(keepers[0].node_id, messages.FIND, body, within_s=60)
        found = messages.decode(answer, messages.BlocksFound)
        assert (found.blocks, found.state_bytes) == (0, 0)


async def test_what_came_is_counted_on_both_sides_and_named_in_the_answer(tmp_path: Path) -> None:
    async with fleet(tmp_path, True) as (node, keepers):
        keepers[0].keep(NAMES)
        home = FetchingHome(node, keepers)
        home.fetched_tokens = 4 * limits.CACHE_BLOCK_TOKENS

        def fetched() -> KvFetched:
            home.receive(NAMES)
            return KvFetched("r1", 4, 4 * SIZE, 0.5)

        finished = (await home.run(lacking(NAMES), fetched))[-1]
        assert finished.timings.fetched_from == "keeper0"
        (came,) = home.step.counts.machines()
        assert (came.machine, came.prompts) == ("keeper0", 1)
        assert (came.tokens, came.n_bytes) == (4 * limits.CACHE_BLOCK_TOKENS, 4 * SIZE)
        # Four blocks of five seconds each.
        assert (came.took_s, came.saved_s, came.failed) == (0.5, 19.5, 0)
        assert 0 < came.predicted_s < 1
        await keepers[0].served()
        (sent,) = keepers[0].counts.machines()
        assert (sent.machine, sent.sent_prompts, sent.sent_bytes) == ("home", 1, 4 * SIZE)


async def test_what_is_computed_sooner_is_not_fetched(tmp_path: Path) -> None:
    async with fleet(tmp_path, True) as (node, keepers):
        keepers[0].keep(NAMES)
        home = FetchingHome(node, keepers)
        await home.run(lacking(NAMES, each_s=0.001))
        assert [fetch.blocks for fetch in home.engine.fetches] == [0]
        assert keepers[0].outcomes == []


async def test_nothing_is_told_of_prompts_that_stay_or_to_who_may_not_see_them(tmp_path: Path) -> None:
    async with fleet(tmp_path, True, False) as (node, keepers):
        keepers[0].keep(NAMES, local_only=True)
        keepers[1].keep(NAMES)
        home = FetchingHome(node, keepers)
        await home.run(lacking(NAMES))
        assert [fetch.blocks for fetch in home.engine.fetches] == [0]
        # Nor by a name that says how such a block is kept.
        guess = [block_names.kept_as(name, local_only=True) for name in NAMES]
        body = messages.encode(messages.BlocksQuestion(guess))
        answer = await node.ask(keepers[0].node_id, messages.FIND, body, within_s=60)
        assert messages.decode(answer, messages.BlocksFound).blocks == 0
        with pytest.raises(Forbidden):
            await node.ask(keepers[1].node_id, messages.FIND, body, within_s=60)


@pytest.mark.parametrize(
    "fields", [{"sees_prompts": False}, {"unusable": "It does not answer."}, {"left_out": "It failed."}]
)
async def test_machines_that_may_not_be_asked_are_not(tmp_path: Path, fields: dict[str, Any]) -> None:
    async with fleet(tmp_path, True) as (node, keepers):
        keepers[0].keep(NAMES)
        home = FetchingHome(
            node, keepers, **{name: value for name, value in fields.items() if name != "left_out"}
        )
        if "left_out" in fields:
            home.members.failed(keepers[0].node_id, "fetch", PeerLost("gone"))
        await home.run(lacking(NAMES))
        assert home.asked is not None
        assert not home.asked.fetches
        assert home.partners.asked == []


async def test_a_machine_whose_bytes_were_wrong_is_left_out(tmp_path: Path) -> None:
    async with fleet(tmp_path, True) as (node, keepers):
        keepers[0].keep(NAMES)
        home = FetchingHome(node, keepers)

        def wrong() -> KvFetched:
            home.receive(NAMES)
            return KvFetched("r1", code="peer_wrong", reason="Its keys and values are not those.")

        await home.run(lacking(NAMES), wrong)
        assert home.members.left_out(keepers[0].node_id, "fetch")
        assert [(each.prompts, each.failed) for each in home.step.counts.machines()] == [(0, 1)]


async def test_a_machine_that_is_gone_costs_no_answer(tmp_path: Path) -> None:
    async with fleet(tmp_path, True) as (node, keepers):
        keepers[0].keep(NAMES)
        home = FetchingHome(node, keepers)
        home.partners.connect = _refused  # type: ignore[method-assign,assignment]
        told = await home.run(lacking(NAMES))
        assert [fetch.blocks for fetch in home.engine.fetches] == [0]
        assert isinstance(told[-1], Finished)
        assert home.members.left_out(keepers[0].node_id, "fetch")


async def test_attack_a_machine_that_says_it_keeps_a_prompt_and_then_nothing_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every long prompt would wait for it."""
    monkeypatch.setattr(limits, "FETCH_DECIDE_S", 0.2)
    async with fleet(tmp_path, True) as (node, keepers):
        keepers[0].keep(NAMES)

        async def silent(peer: str, body: bytes, stream: PeerStream) -> None:
            await stream.receive()

        keepers[0].node.handle(messages.FETCH, silent)
        home = FetchingHome(node, keepers)
        async with asyncio.timeout(30):
            told = await home.run(lacking(NAMES))
        assert [fetch.blocks for fetch in home.engine.fetches] == [0]
        assert isinstance(told[-1], Finished)
        assert home.members.left_out(keepers[0].node_id, "fetch")


async def test_attack_messages_without_end_beside_the_blocks_end_the_fetch(tmp_path: Path) -> None:
    """They would keep this daemon busy as long as the answer takes."""
    async with fleet(tmp_path, True) as (node, keepers):
        keepers[0].keep(NAMES)
        gone = asyncio.Event()

        async def talks(peer: str, body: bytes, stream: PeerStream) -> None:
            try:
                with BulkDialer(keepers[0].node).expect() as expected:
                    stream.send(messages.encode(FetchOffer(invitation(expected))))
                    with await expected.socket():
                        while True:
                            stream.send(b"more")
                            await stream.drained()
                            await asyncio.sleep(0)
            finally:
                gone.set()

        keepers[0].node.handle(messages.FETCH, talks)
        home = FetchingHome(node, keepers)
        loop = asyncio.get_running_loop()

        def fetched() -> KvFetched:
            asyncio.run_coroutine_threadsafe(gone.wait(), loop).result(30)
            return KvFetched("r1", code="peer_late", reason="The stream broke.")

        told = await home.run(lacking(NAMES), fetched)
        assert isinstance(told[-1], Finished)
        assert "protocol_error" in home.members.left_out(keepers[0].node_id, "answer")
        assert [each.failed for each in home.step.counts.machines()] == [1]


async def _refused(node_id: str, invited: Any) -> Any:
    raise PeerLost("It is gone.")


@pytest.mark.parametrize("failing", ["read", "cached_share", "sent"])
async def test_an_index_that_fails_while_blocks_are_sent_is_no_fault_of_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    real = getattr(BlockStore, failing)
    calls = 0

    def fails(self: BlockStore, *given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if failing != "read" or calls > 1:
            raise CacheUnavailable("its index cannot be used: database is locked")
        return real(self, *given, **named)

    async with fleet(tmp_path, True) as (node, keepers):
        keepers[0].keep(NAMES)
        monkeypatch.setattr(BlockStore, failing, fails)
        home = FetchingHome(node, keepers)
        came = NAMES[:1] if failing == "read" else NAMES

        def fetched() -> KvFetched:
            assert home.receive(NAMES) == payloads(came)
            return KvFetched("r1", len(came), len(came) * SIZE, 0.5)

        await home.run(lacking(NAMES), fetched)
        assert home.engine.fetches[0].blocks == 4
        assert not any(member.left_out for member in home.members.others("fetch"))


async def test_attack_a_machine_that_reads_nothing_takes_neither_all_places_nor_the_daemons_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = threading.Event()

    def waits(server: BlockServer, machine: str, sock: socket.socket, key: bytes, names: list[bytes]) -> None:
        with sock:
            left.wait()

    monkeypatch.setattr(BlockServer, "_send_all", waits)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    async with fleet(tmp_path, True) as (node, (keeper,)), asyncio.timeout(60):
        keeper.keep(NAMES)

        async def ask(number: int) -> FetchOffer:
            question = messages.FetchQuestion(NAMES, f"r{number}")
            stream = node.request(keeper.node_id, messages.FETCH, messages.encode(question))
            return messages.decode(await stream.receive() or b"", FetchOffer)

        try:
            for number in range(limits.FETCHES_PER_PEER):
                offer = await ask(number)
                (await BulkDialer(node).connect(keeper.node_id, offer.invitation)).close()
            await asyncio.to_thread(int)
            with pytest.raises(Overloaded, match="for that one already"):
                await ask(9)
        finally:
            left.set()
