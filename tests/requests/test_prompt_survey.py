"""What machines keep of a prompt counts before it is placed: told by its text, priced, shown to people."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kv_blocks
import pytest
from fakes import FakeFolder
from keepers import Keeper, fleet
from msgspec.structs import replace
from nested_fields import changed
from requests_driver import answered, request_of
from sharing_fakes import DIGEST, HomePartners, own_card

from fleetd import limits
from fleetd.cache.service import DiskCache
from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.control.prefill_plan import PlanQuestion
from fleetd.engine.protocol import Accepted, Delta, Finished, Generate, KvStored, TextPrompt
from fleetd.errors import Forbidden, PeerUnreachable
from fleetd.p2p.membership.cards import Card
from fleetd.p2p.node import Node
from fleetd.plan.beginnings import KeptBeginning
from fleetd.plan.refusals import THIS_NODE
from fleetd.requests.job import CHARS_PER_TOKEN, Job
from fleetd.requests.kv_fetching import messages
from fleetd.requests.kv_fetching.kept_prompts import LINK_TOKENS, KeptPrompts, links
from fleetd.requests.kv_fetching.prompt_survey import PromptSurvey
from fleetd.requests.members.members import Members
from fleetd.requests.pipeline import Pipeline
from fleetd.requests.placement.placement import Placer, WantedModel
from fleetd.requests.plan_service import PlanService
from fleetd.requests.request import LocatedModel

BLOCKS = 24
TOKENS = BLOCKS * limits.CACHE_BLOCK_TOKENS
TEXT = "".join(chr(65 + n % 26) * 512 for n in range(TOKENS * CHARS_PER_TOKEN // 512))
NAMES = kv_blocks.prompt(1, BLOCKS)
FOLDER = FakeFolder("m")


def job(text: str = TEXT, **fields: Any) -> Job:
    return Job("m", Generate("r1", TextPrompt(text), max_tokens=8), "socket", "chat", **fields)


async def read(prompts: KeptPrompts, asked: Job, names: list[bytes] = NAMES, *, own: bool = True) -> Generate:
    """A request through the step, whose engine tells which blocks it fills; what the engine was asked."""
    told: list[Generate] = []

    async def engine(generate: Generate) -> Any:
        told.append(generate)
        yield Accepted("r1", TOKENS)
        if generate.tells_blocks:
            yield KvStored("r1", names, own)
        yield Delta("r1", "ok", 1)
        yield Finished("r1", "stop")

    events = [event async for event in answered(Pipeline([prompts]), request_of(asked, FOLDER), engine)]
    assert not any(isinstance(event, KvStored) for event in events), "it is no matter of the client's"
    await prompts.close()
    return told[0]


_opened: list[Asking] = []


def closing_later(home: Asking) -> Asking:
    _opened.append(home)
    return home


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """These tests wait for answers, however busy the machine is; what they opened is closed."""
    monkeypatch.setattr(limits, "FETCH_LOOK_S", 60.0)
    monkeypatch.setattr(limits, "FETCH_LOOK_SHARE", 1e9)
    yield
    while _opened:
        _opened.pop().close()


class Asking:
    """The machine that has a prompt to place."""

    def __init__(self, folder: Path, node: Node, keepers: list[Keeper], **fields: Any) -> None:
        self.card: Card = own_card("home", arithmetic="same", token_bytes=100)
        for keeper in keepers:
            keeper.card = own_card(keeper.node.name, arithmetic="same", token_bytes=100)
        self.partners = HomePartners(node, keepers, **fields)  # type: ignore[arg-type]
        self.members = Members(self.partners.machines, lambda: self.card)
        for keeper in keepers:
            self.members.succeeded(keeper.node_id, "answer")
        self.disk = DiskCache(kv_blocks.settings(folder / "own"), on=True, note=lambda: "")
        self.disk.start()
        self.prompts = KeptPrompts(self.disk, lambda name: self.card.models[0])
        self.survey = PromptSurvey(self.partners, self.members, self.prompts)
        self.placer = Placer(self.members, self.partners.request)
        self.wanted = WantedModel("m", here=True, folder=FOLDER)  # type: ignore[arg-type]

    def close(self) -> None:
        self.disk.close()

    async def places(self, asked: Job) -> Any:
        return await self.survey.of_job(asked, "m")

    async def choose(self, asked: Job) -> Any:
        places = await self.places(asked)
        return self.placer.choose(asked, self.wanted, tried=frozenset(), why=None, places=places)


async def test_a_machine_tells_how_much_of_a_text_its_memory_and_its_disk_have(tmp_path: Path) -> None:
    async with fleet(tmp_path, True) as (node, [keeper]):
        home = closing_later(Asking(tmp_path, node, [keeper]))
        assert await home.places(job()) == {THIS_NODE: KeptBeginning(), keeper.node_id: KeptBeginning()}
        await read(keeper.prompts, job())
        keeper.keep(NAMES)
        found = (await home.places(job()))[keeper.node_id]
        assert (found.memory_tokens, found.disk_tokens) == (TOKENS, TOKENS)
        assert found.n_bytes == keeper.cache.report().n_bytes
        # Of the next turn it is the beginning; of another text nothing.
        assert (await home.places(job(TEXT + "y" * 9000)))[keeper.node_id] == found
        assert (await home.places(job("y" + TEXT)))[keeper.node_id] == KeptBeginning()


async def test_attack_what_began_with_another_machine_s_rows_is_told_to_nobody(tmp_path: Path) -> None:
    async with fleet(tmp_path, True) as (node, [keeper]):
        told: list[Any] = []
        keeper.prompts._write_now = told.append
        home = closing_later(Asking(tmp_path, node, [keeper]))
        await read(keeper.prompts, job(), own=False)
        keeper.keep(NAMES, origins=("a label",))
        assert (await home.places(job()))[keeper.node_id] == KeptBeginning()
        assert told == [], "nor is it written for anybody"
        # The machine itself counts on it.
        asked = links(TEXT)
        found = keeper.prompts.look(home.card.models[0].digest, asked)
        assert (found.in_memory, found.on_disk) == (len(asked), len(asked))


async def test_a_prompt_that_was_just_read_is_written_at_once_when_another_machine_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FETCH_WRITING_S", 60.0)
    async with fleet(tmp_path, True) as (node, [keeper]):
        told: list[Any] = []
        keeper.prompts._write_now = told.append
        home = closing_later(Asking(tmp_path, node, [keeper]))
        await read(keeper.prompts, job())
        # By its text: it is in memory there, and not on the disk.
        assert (await home.places(job()))[keeper.node_id].memory_tokens == TOKENS
        assert told == [FOLDER]
        # By the names of its blocks: the answer waits for what is being written.
        keeper.prompts._write_now = lambda folder: keeper.keep(NAMES)
        body = messages.encode(messages.BlocksQuestion([*NAMES, b"n" * 32]))
        answer = await node.ask(keeper.node_id, messages.FIND, body, within_s=60)
        assert messages.decode(answer, messages.BlocksFound).blocks == BLOCKS


async def test_what_is_not_written_in_time_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FETCH_WRITING_S", 0.01)
    async with fleet(tmp_path, True) as (node, [keeper]):
        told: list[Any] = []
        keeper.prompts._write_now = told.append
        await read(keeper.prompts, job())
        body = messages.encode(messages.BlocksQuestion(NAMES))
        for _ in range(2):
            answer = await node.ask(keeper.node_id, messages.FIND, body, within_s=60)
            assert messages.decode(answer, messages.BlocksFound).blocks == 0
        assert told == [FOLDER]


async def test_what_others_keep_decides_between_fetching_going_there_and_computing(tmp_path: Path) -> None:
    async with fleet(tmp_path, True) as (node, [keeper]):
        home = closing_later(Asking(tmp_path, node, [keeper]))
        assert (await home.choose(job())).node_id == THIS_NODE
        await read(keeper.prompts, job())
        keeper.keep(NAMES)
        # The link is fast, and the other machine has it in its memory besides.
        assert (await home.choose(job())).node_id == keeper.node_id
        # It has unloaded the model, which takes long to load: its blocks come here.
        unloaded = changed(keeper.card.models[0], state="installed", load_s=300.0, weights_bytes=1)
        keeper.card = replace(keeper.card, models=[unloaded])
        stays = await home.choose(job())
        assert (stays.node_id, stays.fetches) == (THIS_NODE, True)
        assert stays.kept_where.startswith(
            "This machine fetches about 3072 tokens of the prompt from keeper0"
        )
        # Where it computes other bytes, nothing of it is of use here.
        keeper.card = replace(keeper.card, models=[replace(unloaded, arithmetic="other")])
        assert "fetches" not in (await home.choose(job())).kept_where


async def test_the_plan_of_a_text_says_what_is_restored_fetched_and_computed(tmp_path: Path) -> None:
    async with fleet(tmp_path, True) as (node, [keeper]):
        home = closing_later(Asking(tmp_path, node, [keeper]))
        await read(keeper.prompts, job())
        keeper.keep(NAMES)
        keeper.card = replace(
            keeper.card,
            models=[changed(keeper.card.models[0], state="installed", load_s=300.0, weights_bytes=1)],
        )

        class NoDrafts:
            async def plan(self, view: Any, folder: Any) -> Any:
                return view

        def service() -> PlanService:
            return PlanService(
                home.placer,
                lambda name: LocatedModel("m", "m", FOLDER),  # type: ignore[arg-type]
                None,  # type: ignore[arg-type]
                NoDrafts(),  # type: ignore[arg-type]
                SmartPrefillPolicy(),
                home.survey,
            )

        view = await service().plan(PlanQuestion("m", text=TEXT))
        chosen = view.options[0]
        assert (chosen.kind, chosen.cached_tokens) == ("local", TOKENS)
        assert (chosen.fetched_tokens, chosen.fetched_from) == (TOKENS, "keeper0")
        assert [step.machine for step in chosen.steps if step.name == "fetched"] == ["keeper0"]
        there = next(option for option in view.options if option.nodes[0] == "keeper0")
        assert (there.cached_tokens, there.restored_tokens) == (TOKENS, TOKENS)
        # Once half of it lies here, that is read first.
        with kv_blocks.opened(kv_blocks.settings(tmp_path / "own")) as store:
            kv_blocks.keep(store, NAMES[: BLOCKS // 2])
        home.disk.begin_with(DIGEST, links(TEXT)[:12], NAMES[: BLOCKS // 2], 0.5)
        chosen = (await service().plan(PlanQuestion("m", text=TEXT))).options[0]
        assert (chosen.restored_tokens, chosen.fetched_tokens) == (TOKENS // 2, TOKENS // 2)


async def test_prompts_that_stay_are_asked_for_nowhere_and_found_by_nobody(tmp_path: Path) -> None:
    async with fleet(tmp_path, True, False) as (node, keepers):
        home = closing_later(Asking(tmp_path, node, keepers))
        asked = await read(keepers[0].prompts, job(local_only=True))
        assert not asked.tells_blocks
        assert (await home.places(job()))[keepers[0].node_id] == KeptBeginning()
        assert await home.places(job(local_only=True)) == {}
        # A machine that this one may not ask answers nobody.
        body = messages.encode(messages.TextQuestion(DIGEST, links(TEXT)))
        with pytest.raises(Forbidden):
            await node.ask(keepers[1].node_id, messages.LOOK, body, within_s=60)


async def test_a_prompt_that_may_be_shortened_is_looked_for_on_this_disk_if_it_stays_too(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path, True) as (node, keepers):
        home = closing_later(Asking(tmp_path, node, keepers))
        asked = job(local_only=True, smart=SmartPrefillPolicy(enabled=True))
        assert await home.places(asked) == {THIS_NODE: KeptBeginning()}
        assert home.partners.asked == []


@pytest.mark.parametrize("fields", [{"sees_prompts": False}, {"unusable": "It does not answer."}])
async def test_machines_that_may_not_be_asked_are_told_no_links(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    async with fleet(tmp_path, True) as (node, keepers):
        home = closing_later(Asking(tmp_path, node, keepers, **fields))
        assert await home.places(job()) == {}
        assert home.partners.asked == []


async def test_short_prompts_and_those_that_were_just_read_here_ask_nobody(tmp_path: Path) -> None:
    async with fleet(tmp_path, True) as (node, keepers):
        home = closing_later(Asking(tmp_path, node, keepers))
        assert await home.places(job("hi")) == {}
        home.members.read(THIS_NODE, "m", job())
        assert await home.places(job(TEXT + "and a question?")) == {}
        assert home.partners.asked == []
        await home.places(job(TEXT + "z" * limits.FETCH_LEAST_TOKENS * CHARS_PER_TOKEN))
        assert len(home.partners.asked) == 1


async def test_what_was_just_read_here_may_be_fetched_from_here_while_this_machine_is_busy(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path, True) as (node, keepers):
        home = closing_later(Asking(tmp_path, node, keepers))
        await read(home.prompts, job())
        with kv_blocks.opened(kv_blocks.settings(tmp_path / "own")) as store:
            kv_blocks.keep(store, NAMES)
        home.members.read(THIS_NODE, "m", job())
        # A long answer is decoded sooner where no others are.
        slow = [changed(home.card.models[0], decode_tok_s=10.0)]
        home.card, keepers[0].card = (replace(card, models=slow) for card in (home.card, keepers[0].card))
        question = Generate("r2", TextPrompt(TEXT + "and a question?"), max_tokens=256)
        again = Job("m", question, "socket", "chat")
        assert (await home.choose(again)).node_id == THIS_NODE
        home.card = replace(home.card, running=3, max_streams=4, unread_tokens=9_000)
        assert (await home.places(again))[THIS_NODE].disk_tokens == TOKENS
        chosen = await home.choose(again)
        assert (chosen.node_id, chosen.planned.kind) == (keepers[0].node_id, "remote")
        assert chosen.kept_where.startswith("keeper0 fetches about 3072 tokens of the prompt")
        assert home.partners.asked == [], "it is all known here"


async def test_a_machine_that_does_not_answer_in_time_counts_as_having_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, True, True) as (node, keepers):
        home = closing_later(Asking(tmp_path, node, keepers))
        await read(keepers[1].prompts, job())
        ask = home.partners.ask

        async def silent(node_id: str, method: str, body: bytes, *, within_s: float) -> bytes:
            assert within_s == limits.FETCH_LOOK_S
            if node_id == keepers[0].node_id:
                raise PeerUnreachable("It did not answer in time.")
            return await ask(node_id, method, body, within_s=within_s)

        monkeypatch.setattr(home.partners, "ask", silent)
        places = await home.places(job())
        assert keepers[0].node_id not in places
        assert places[keepers[1].node_id].memory_tokens == TOKENS


@pytest.mark.parametrize(
    ("state", "tok_s", "within_s"),
    [
        ("loaded", 1000.0, 0.02 * TOKENS / 1000),
        ("loaded", 10.0, 0.15),
        ("loaded", 0.0, 0.15),
        ("installed", 1000.0, 0.15),
    ],
    ids=["soon read", "slowly read", "of unknown speed", "not loaded"],
)
async def test_a_prompt_waits_a_small_part_of_what_reading_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, tok_s: float, within_s: float
) -> None:
    monkeypatch.setattr(limits, "FETCH_LOOK_S", 0.15)
    monkeypatch.setattr(limits, "FETCH_LOOK_SHARE", 0.02)
    async with fleet(tmp_path, True) as (node, keepers):
        home = closing_later(Asking(tmp_path, node, keepers))
        model = changed(home.card.models[0], state=state, prefill_tok_s=tok_s)
        home.card = replace(home.card, models=[model])
        waits: list[float] = []
        silences: list[str] = []

        async def silent(node_id: str, method: str, body: bytes, *, within_s: float) -> bytes:
            waits.append(within_s)
            raise PeerUnreachable("It did not answer in time.")

        monkeypatch.setattr(home.partners, "ask", silent)
        monkeypatch.setattr(home.members, "unanswered", lambda node_id, asked_s: silences.append(node_id))
        assert keepers[0].node_id not in await home.places(job())
        assert waits == [pytest.approx(within_s)]
        # Silence for a moment says nothing of a machine.
        assert silences == ([] if within_s < 0.15 else [keepers[0].node_id])


async def test_a_machine_behind_a_long_path_is_asked_about_long_prompts_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, True) as (node, keepers):
        home = closing_later(Asking(tmp_path, node, keepers, rtt_s=0.05))
        model = changed(home.card.models[0], prefill_tok_s=1000.0)
        home.card = replace(home.card, models=[model])
        monkeypatch.setattr(limits, "FETCH_LOOK_SHARE", 0.049 / (TOKENS / 1000))
        assert await home.places(job()) == {THIS_NODE: KeptBeginning()}
        assert home.partners.asked == []
        monkeypatch.setattr(limits, "FETCH_LOOK_SHARE", 1e9)
        await home.places(job())
        assert len(home.partners.asked) == 1


async def test_a_long_text_asks_about_a_bounded_beginning() -> None:
    asked = links("x" * 512 * (limits.FETCH_LINKS + 5))
    assert len(asked) == limits.FETCH_LINKS
    assert len(messages.encode(messages.TextQuestion(DIGEST, asked))) < limits.FETCH_MESSAGE_BYTES
    assert LINK_TOKENS == 128
