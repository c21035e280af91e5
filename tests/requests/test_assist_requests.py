"""Both ends of an agreement over real sessions and sockets: reached, refused, broken; attacks are named."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import ARITHMETIC, FACTS, STEPS, WITHIN_S, FakeEngine
from msgspec.structs import replace
from sharing_fakes import DIGEST, HelperMachine, HomePartners, machines, own_card, split

from fleetd import limits
from fleetd.errors import (
    Draining,
    EngineDied,
    FleetError,
    Incompatible,
    ModelNotFound,
    NotFound,
    OutOfMemory,
    Overloaded,
    PeerLost,
    PeerUnreachable,
    ProtocolError,
)
from fleetd.p2p.node import Node
from fleetd.plan.prefill.split import Split
from fleetd.requests.prefill_sharing import messages
from fleetd.requests.prefill_sharing.agreement import Agreement, SharingTerms
from fleetd.requests.remote.message_codec import ALIVE

TERMS = SharingTerms("r1", "m", DIGEST, split(), ARITHMETIC, own_chunks=True)
ASK = messages.AssistQuestion("m", DIGEST, split(), 0, "r1", ARITHMETIC)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper waits for the word to begin, however busy the machine is."""
    monkeypatch.setattr(limits, "SHARE_SETUP_S", WITHIN_S)


@contextlib.asynccontextmanager
async def agreeing(
    home: Node, engine: FakeEngine, helpers: list[HelperMachine], terms: SharingTerms = TERMS
) -> AsyncIterator[Agreement]:
    chain = [(helper.node_id, helper.node.name) for helper in helpers]
    agreement = Agreement(HomePartners(home), engine, terms, chain)
    try:
        async with asyncio.timeout(WITHIN_S):
            yield agreement
    finally:
        agreement.close()
        engine.close()


async def ended(helper: HelperMachine, *outcomes: str) -> None:
    async with asyncio.timeout(WITHIN_S):
        while helper.outcomes != list(outcomes):  # noqa: ASYNC110  (a list of a callback, which announces nothing)
            await asyncio.sleep(0.01)
    assert helper.pool.used == 0


def terms(of: Split, **changes: Any) -> SharingTerms:
    fields = {name: getattr(TERMS, name) for name in TERMS.__struct_fields__} | changes
    return SharingTerms(**{**fields, "split": of})


@pytest.mark.parametrize(
    ("of", "here", "there"),
    [
        (split(1), {"helper0", "in"}, [{"home", "out"}]),
        (split(1, home=False), {"helper0"}, [{"home"}]),
        (split(1, "tokens"), {"helper0"}, [{"home"}]),
        (split(2), {"helper0", "helper1", "in"}, [{"home", "out"}, {"home", "in", "out"}]),
        (split(2, home=False), {"helper0", "helper1"}, [{"home", "out"}, {"home", "in"}]),
        (
            split(3, "tokens"),
            {"helper0", "helper1", "helper2"},
            [{"home", "out"}, {"home", "in", "out"}, {"home", "in"}],
        ),
    ],
    ids=lambda value: f"{value.kind}{value.cuts}" if isinstance(value, Split) else "",
)
async def test_everybody_gets_the_streams_of_the_split(
    tmp_path: Path, of: Split, here: set[str], there: list[set[str]]
) -> None:
    async with (
        machines(tmp_path, of.helpers) as (home, helpers),
        agreeing(home, FakeEngine(), helpers, terms(of)) as agreement,
    ):
        assert await agreement.reach(WITHIN_S)
        engine = agreement._engine
        assert isinstance(engine, FakeEngine)
        for helper, names in zip(helpers, there, strict=True):
            await helper.engine.until(lambda helper=helper, names=names: set(helper.engine.streams) == names)
            (assist,) = helper.engine.assists
            assert (assist.split, assist.rank) == (of, helpers.index(helper))
            assert {tag.job for tag in helper.engine.tags.values()} == {assist.id}
        assert set(engine.streams) == here
        assert {tag.job for tag in engine.tags.values()} == {"r1"}
        # Both ends of every stream have its key, and opposite roles.
        ends: dict[bytes, list[str]] = {}
        for each in [engine, *(helper.engine for helper in helpers)]:
            for tag in each.tags.values():
                ends.setdefault(tag.key, []).append(tag.role)
        assert all(sorted(roles) == ["acceptor", "connector"] for roles in ends.values())
        for helper in helpers:
            helper.engine.end.set()
        await agreement.watch()
        for found in agreement.helpers:
            assert found.steps == STEPS
            assert found.failed is None
        for helper in helpers:
            await ended(helper, "done")


async def test_what_is_written_at_one_end_arrives_at_the_other(tmp_path: Path) -> None:
    async with (
        machines(tmp_path, 2) as (home, helpers),
        agreeing(home, FakeEngine(), helpers, terms(split(2))) as agreement,
    ):
        await agreement.reach(WITHIN_S)
        loop, first, second = asyncio.get_running_loop(), helpers[0].engine, helpers[1].engine
        here = agreement._engine
        assert isinstance(here, FakeEngine)
        for engine, names in (
            (first, {"home", "out"}),
            (second, {"home", "in", "out"}),
            (here, {"helper0", "helper1", "in"}),
        ):
            await engine.until(lambda engine=engine, names=names: names <= engine.streams.keys())
        ways = [
            (here.streams["helper0"], first.streams["home"]),
            (here.streams["helper1"], second.streams["home"]),
            (first.streams["out"], second.streams["in"]),
            (second.streams["out"], here.streams["in"]),
        ]
        for number, (one, other) in enumerate(ways):
            await loop.sock_sendall(one, bytes([number]))
            assert await loop.sock_recv(other, 10) == bytes([number])


async def test_another_accelerator_is_no_exact_helper(tmp_path: Path) -> None:
    async with machines(tmp_path, 1) as (home, helpers), agreeing(home, FakeEngine(), helpers) as agreement:
        other = replace(ARITHMETIC, accelerator="metal", layers=[b"x" * 8] * 4)
        helpers[0].engine.facts = replace(FACTS, arithmetic=other)
        assert not await agreement.reach(WITHIN_S)


# ---- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype_at", ["home", "helper"])
async def test_other_arithmetic_is_refused_by_both_ends(tmp_path: Path, dtype_at: str) -> None:
    async with machines(tmp_path, 1) as (home, helpers):
        if dtype_at == "helper":
            helpers[0].engine.facts = replace(FACTS, arithmetic=replace(ARITHMETIC, dtype="float16"))
            this = TERMS
        else:
            this = terms(split(), arithmetic=replace(ARITHMETIC, dtype="float16"))
        async with agreeing(home, FakeEngine(), helpers, this) as agreement:
            with pytest.raises(Incompatible, match="helper0: dtype is"):
                await agreement.reach(WITHIN_S)
            assert isinstance(agreement.helpers[0].failed, Incompatible)
        assert helpers[0].engine.assists == []
        await ended(helpers[0], "incompatible")


async def test_a_helper_that_stops_takes_no_work(tmp_path: Path) -> None:
    async with machines(tmp_path, 1) as (home, helpers), agreeing(home, FakeEngine(), helpers) as agreement:
        helpers[0].draining = True
        with pytest.raises(Draining):
            await agreement.reach(WITHIN_S)


async def test_an_engine_without_room_refuses_before_anything_is_offered(tmp_path: Path) -> None:
    async with machines(tmp_path, 1) as (home, helpers), agreeing(home, FakeEngine(), helpers) as agreement:
        helpers[0].engine.error = OutOfMemory("No room for 1024 tokens.")
        with pytest.raises(OutOfMemory, match="helper0: No room"):
            await agreement.reach(WITHIN_S)
        await ended(helpers[0], "out_of_memory")


async def test_one_refusal_ends_the_others_work(tmp_path: Path) -> None:
    async with (
        machines(tmp_path, 2) as (home, helpers),
        agreeing(home, FakeEngine(), helpers, terms(split(2))) as agreement,
    ):
        helpers[1].card = own_card("helper1", digest="e" * 64)

        async def refused(peer: str, body: bytes, stream: Any) -> None:
            # A request that is taken back before anybody has looked at it ends in no way at all.
            while not helpers[0].engine.assists:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await helpers[1].assists.assist(peer, body, stream)

        helpers[1].node.handle(messages.ASSIST, refused)
        with pytest.raises(ModelNotFound):
            await agreement.reach(WITHIN_S)
        assert [type(helper.failed) for helper in agreement.helpers] == [type(None), ModelNotFound]
        agreement.close()
        await ended(helpers[0], "cancelled")


async def test_a_model_that_is_not_loaded_is_not_loaded_for_an_ask(tmp_path: Path) -> None:
    async with machines(tmp_path, 1) as (home, helpers), agreeing(home, FakeEngine(), helpers) as agreement:
        helpers[0].pool.loaded = False
        with pytest.raises(Overloaded, match="not loaded"):
            await agreement.reach(WITHIN_S)
        assert helpers[0].pool.loads == []


async def test_a_helper_that_does_not_answer_is_given_up_in_time(tmp_path: Path) -> None:
    async with machines(tmp_path, 1) as (home, helpers):

        async def silent(*_: Any) -> None:
            await asyncio.Event().wait()

        helpers[0].node.handle(messages.ASSIST, silent)
        async with agreeing(home, FakeEngine(), helpers) as agreement:
            with pytest.raises(PeerLost, match="helper0 did not agree"):
                await agreement.reach(0.3)
            assert isinstance(agreement.helpers[0].failed, PeerLost)


# ---- while it runs ---------------------------------------------------------------------------------------


async def test_a_helper_whose_engine_dies_is_heard_of_at_once(tmp_path: Path) -> None:
    async with (
        machines(tmp_path, 2) as (home, helpers),
        agreeing(home, FakeEngine(), helpers, terms(split(2))) as agreement,
    ):
        await agreement.reach(WITHIN_S)
        helpers[1].engine.error = EngineDied("The engine ended.")
        helpers[1].engine.end.set()
        with pytest.raises(EngineDied, match="helper1: The engine ended"):
            await agreement.watch()
        assert agreement.helpers[0].failed is None
        agreement.close()
        await ended(helpers[0], "cancelled")


async def test_a_helper_that_only_computes_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "JOB_ALIVE_S", 0.05)
    async with machines(tmp_path, 1) as (home, helpers), agreeing(home, FakeEngine(), helpers) as agreement:
        await agreement.reach(WITHIN_S)
        stream, beats = agreement.helpers[0].stream, asyncio.Queue[bytes | None]()
        receive = stream.receive

        async def heard() -> bytes | None:
            beats.put_nowait(body := await receive())
            return body

        monkeypatch.setattr(stream, "receive", heard)
        watching = asyncio.create_task(agreement.watch())
        for _ in range(5):
            assert await beats.get() == ALIVE
        assert not watching.done()
        helpers[0].engine.end.set()
        await watching


async def test_a_helper_that_falls_silent_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with machines(tmp_path, 1) as (home, helpers), agreeing(home, FakeEngine(), helpers) as agreement:
        await agreement.reach(WITHIN_S)
        monkeypatch.setattr(limits, "JOB_SILENCE_S", 0.1)
        with pytest.raises(PeerLost, match="helper0: No sign of life"):
            await agreement.watch()


async def test_a_helper_that_goes_away_is_heard_of_at_once(tmp_path: Path) -> None:
    async with machines(tmp_path, 1) as (home, helpers), agreeing(home, FakeEngine(), helpers) as agreement:
        await agreement.reach(WITHIN_S)
        watching = asyncio.create_task(agreement.watch())
        await helpers[0].node.goodbye()
        with pytest.raises(FleetError) as caught:
            await watching
        assert caught.value.code in ("draining", "peer_lost")


# ---- attacks ---------------------------------------------------------------------------------------------


async def test_an_assist_cannot_outlive_the_machine_that_asked(tmp_path: Path) -> None:
    async with machines(tmp_path, 1) as (home, helpers), agreeing(home, FakeEngine(), helpers) as agreement:
        await agreement.reach(WITHIN_S)
        await helpers[0].engine.until(lambda: "out" in helpers[0].engine.streams)
        await home.goodbye()
        await ended(helpers[0], "cancelled")
        assert helpers[0].engine.cancelled == 1


async def test_an_assist_that_is_not_begun_in_time_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks and never says Go would hold KV for ever."""
    monkeypatch.setattr(limits, "SHARE_SETUP_S", 0.1)
    async with machines(tmp_path, 1) as (home, helpers):
        stream = home.request(helpers[0].node_id, messages.ASSIST, messages.encode(ASK))
        assert messages.decode(await stream.receive() or b"", messages.AssistOffer).home.ticket
        with pytest.raises(PeerLost, match="No word to begin"):
            await stream.receive()
        await ended(helpers[0], "peer_lost")
        assert len(helpers[0].node.bulk._tickets) == 0


async def test_a_flood_of_assists_is_bounded(tmp_path: Path) -> None:
    async with machines(tmp_path, 1) as (home, helpers):
        helper = helpers[0].node_id
        held = [home.request(helper, messages.ASSIST, messages.encode(ASK)) for _ in range(limits.ASSISTS)]
        for stream in held:
            messages.decode(await stream.receive() or b"", messages.AssistOffer)
        for _ in range(20):
            with pytest.raises(Overloaded, match="helps with"):
                await home.ask(helper, messages.ASSIST, messages.encode(ASK), within_s=WITHIN_S)
        assert len(helpers[0].engine.assists) == limits.ASSISTS
        ids = {assist.id for assist in helpers[0].engine.assists}
        assert len(ids) == limits.ASSISTS, "two asks of one id are two assists"
        for stream in held:
            stream.cancel()
        await ended(helpers[0], *["cancelled"] * limits.ASSISTS)


@pytest.mark.parametrize(
    "ask",
    [
        replace(ASK, split=replace(ASK.split, tokens=2**31 - 1)),
        replace(ASK, split=replace(ASK.split, tokens=8192)),
        replace(ASK, split=replace(ASK.split, layers=8, cuts=(0, 4, 8))),
        replace(ASK, split=replace(ASK.split, cuts=(0, 0, 4))),
        replace(ASK, split=replace(ASK.split, cached=1024)),
        replace(ASK, rank=1),
        replace(ASK, model="/etc/passwd"),
        replace(ASK, id="x" * (limits.REQUEST_ID_CHARS + 1)),
    ],
    ids=["huge", "context", "layers", "empty", "nothing-new", "rank", "path", "id"],
)
async def test_an_absurd_ask_is_refused_before_memory_is_reserved(
    tmp_path: Path, ask: messages.AssistQuestion
) -> None:
    async with machines(tmp_path, 1) as (home, helpers):
        with pytest.raises(ProtocolError):
            await home.ask(helpers[0].node_id, messages.ASSIST, messages.encode(ask), within_s=WITHIN_S)
        assert helpers[0].engine.assists == []


async def test_files_that_were_not_announced_cannot_be_asked_for(tmp_path: Path) -> None:
    """Neither by their name nor by a digest that would have to be computed first."""
    async with machines(tmp_path, 1) as (home, helpers):
        ask = messages.encode(replace(ASK, digest="e" * 64))
        with pytest.raises(ModelNotFound):
            await home.ask(helpers[0].node_id, messages.ASSIST, ask, within_s=WITHIN_S)


async def test_an_output_cannot_be_sent_to_a_stranger(tmp_path: Path) -> None:
    """Hidden states go to members, at the addresses that this machine knows of them."""
    async with machines(tmp_path, 1) as (home, helpers):
        stream = home.request(helpers[0].node_id, messages.ASSIST, messages.encode(ASK))
        offer = messages.decode(await stream.receive() or b"", messages.AssistOffer)
        stream.send(messages.encode(messages.AssistGo("s" * 52, offer.home)))
        with pytest.raises(NotFound, match="No address"):
            await stream.receive()


async def test_a_ticket_is_good_once(tmp_path: Path) -> None:
    async with machines(tmp_path, 1) as (home, helpers):
        partners = HomePartners(home)
        stream = home.request(
            helpers[0].node_id, messages.ASSIST, messages.encode(replace(ASK, split=split(1, "tokens")))
        )
        offer = messages.decode(await stream.receive() or b"", messages.AssistOffer)
        first = await partners.connect(helpers[0].node_id, offer.home)
        stream.send(messages.encode(messages.AssistGo()))
        await helpers[0].engine.until(lambda: "home" in helpers[0].engine.streams)
        second = await partners.connect(helpers[0].node_id, offer.home)
        loop = asyncio.get_running_loop()
        with second, first:
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(loop.sock_recv(second, 1), WITHIN_S) == b""
            await loop.sock_sendall(first, b"x")
            assert await loop.sock_recv(helpers[0].engine.streams["home"], 1) == b"x"
        stream.cancel()


async def test_a_machine_that_is_not_paired_cannot_ask(tmp_path: Path) -> None:
    async with machines(tmp_path, 1) as (home, helpers):
        helpers[0].node.roster.remove(home.identity.node_id)
        await helpers[0].node.roster_changed()
        async with asyncio.timeout(WITHIN_S):
            while home.connection(helpers[0].node_id) is not None:
                await home.changed.wait()
        with pytest.raises(PeerUnreachable):
            home.request(helpers[0].node_id, messages.ASSIST, messages.encode(ASK))
        assert helpers[0].engine.assists == []


# ---- warming ---------------------------------------------------------------------------------------------

WARM = messages.WarmModel("m", DIGEST)


async def until(condition: Callable[[], Any]) -> None:
    """For what a fake only counts."""
    async with asyncio.timeout(WITHIN_S):
        while not condition():  # noqa: ASYNC110  (as it says)
            await asyncio.sleep(0.01)


async def warm(home: Node, helper: HelperMachine, message: messages.WarmModel = WARM) -> bytes:
    return await home.ask(helper.node_id, messages.WARM, messages.encode(message), within_s=WITHIN_S)


async def test_a_model_is_loaded_in_the_background_once(tmp_path: Path) -> None:
    async with machines(tmp_path, 1) as (home, helpers):
        helpers[0].pool.loaded = False
        assert await warm(home, helpers[0]) == b""
        with pytest.raises(Overloaded, match="already"):
            await warm(home, helpers[0])
        helpers[0].pool.gate.set()
        await until(lambda: helpers[0].pool.loaded and not helpers[0].pool.used)
        assert await warm(home, helpers[0]) == b""
        assert helpers[0].pool.loads == [(0, 0)]


async def test_where_it_does_not_fit_some_layers_are_loaded_and_no_others(tmp_path: Path) -> None:
    async with machines(tmp_path, 1) as (home, helpers):
        pool = helpers[0].pool
        pool.loaded = False
        # The whole model would be refused.
        helpers[0].card = own_card("helper0", memory_bytes=1 << 40)
        pool.gate.set()
        part = replace(WARM, first=0, last=3)
        assert await warm(home, helpers[0], part) == b""
        await until(lambda: pool.loaded and not pool.used)
        # What is in it needs no load; a second part would be one too many.
        assert await warm(home, helpers[0], replace(part, last=2)) == b""
        with pytest.raises(Overloaded, match="layers 0-2 of m already"):
            await warm(home, helpers[0], replace(part, last=4))
        with pytest.raises(Overloaded, match="layers 0-2 of m already"):
            await warm(home, helpers[0])
        assert pool.loads == [(0, 3)]


async def test_a_load_that_failed_is_not_tried_again_at_once(tmp_path: Path) -> None:
    async with machines(tmp_path, 1) as (home, helpers):
        pool, failed = helpers[0].pool, helpers[0].assists._unloadable_s
        pool.loaded, pool.refusal = False, OutOfMemory("It does not fit.")
        pool.gate.set()
        part = replace(WARM, last=3)
        assert await warm(home, helpers[0], part) == b""
        await until(lambda: "m" in failed)
        with pytest.raises(Overloaded, match="could not be loaded"):
            await warm(home, helpers[0], part)
        failed["m"], pool.refusal = 0.0, None
        assert await warm(home, helpers[0], part) == b""
        await until(lambda: pool.loaded)


@pytest.mark.parametrize(("first", "last"), [(3, 3), (3, 1), (1, 0), (-1, 2), (0, limits.LAYERS + 1)])
async def test_hostile_layers_to_load_are_refused(tmp_path: Path, first: int, last: int) -> None:
    async with machines(tmp_path, 1) as (home, helpers):
        helpers[0].pool.loaded = False
        with pytest.raises(ProtocolError):
            await warm(home, helpers[0], replace(WARM, first=first, last=last))
        assert helpers[0].pool.loads == []


async def test_what_is_loaded_here_gives_way_to_no_wish_of_others(tmp_path: Path) -> None:
    async with machines(tmp_path, 1) as (home, helpers):
        helpers[0].pool.loaded = False
        helpers[0].card = own_card("helper0", memory_bytes=1 << 40)
        with pytest.raises(Overloaded, match="needs more memory"):
            await warm(home, helpers[0])
        assert helpers[0].pool.loads == []
