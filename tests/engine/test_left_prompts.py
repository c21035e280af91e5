"""A client that leaves while helpers read its prompt, and asks again, loses nothing; others wait for no such
prompt; and what helpers sent counts only once it is checked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sharing
from turned_pair import TurnedPair
from turned_scheduler import TinyFamily, family

from fleetd import limits
from fleetd.engine.prefixes.prefix_cache import DENSE, EQUIVALENT
from fleetd.engine.protocol import (
    Accepted,
    Cancel,
    Delta,
    Failed,
    Finished,
    Prefill,
    PrefillReport,
    TokenPrompt,
)
from fleetd.engine.sequence_state import row_memory
from fleetd.engine.shared_prefill import helper_work

pytestmark = pytest.mark.usefixtures("cpu_installed")
KINDS = ("layers", "tokens")
TOKENS = 800


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TinyFamily:
    return family(Path(tmp_path_factory.mktemp("llama")), "llama")


@pytest.fixture
def pair(llama: TinyFamily, monkeypatch: pytest.MonkeyPatch) -> Iterator[TurnedPair]:
    monkeypatch.setattr(limits, "SHARE_STEP_S", 0.0)  # a step is one chunk
    monkeypatch.setattr(limits, "ENGINE_BEAT_S", 0.02)
    for wait in ("SHARE_SETUP_S", "SHARE_GRACE_S", "TICKET_S"):
        monkeypatch.setattr(limits, wait, 600.0)  # however busy the machine is
    made = TurnedPair(llama)
    yield made
    made.close()


def the_tokens() -> list[int]:
    """Those of the prompt that is asked."""
    prompt = sharing.prompt("", TOKENS).prompt
    assert isinstance(prompt, TokenPrompt)
    return prompt.tokens


def answer(pair: TurnedPair, name: str) -> list[Any]:
    return [(event.text, event.logprobs) for event in pair.home.of(name, Delta)]


@pytest.fixture
def alone(llama: TinyFamily) -> list[Any]:
    pair = TurnedPair(llama)
    pair.ask("alone", TOKENS, shared=False)
    pair.finish("alone")
    return answer(pair, "alone")


def leave(pair: TurnedPair, name: str) -> None:
    pair.home.scheduler.tell(Cancel(name))
    pair.turn_until(lambda: bool(pair.home.of(name, Finished)))
    assert pair.home.of(name, Finished)[0].reason == "cancelled"


def cached(pair: TurnedPair, name: str) -> int:
    return int(pair.home.of(name, Finished)[0].usage.cached_tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_asks_again_goes_on_where_it_was(pair: TurnedPair, kind: str, alone: list[Any]) -> None:
    pair.ask("first")
    pair.share("first", kind)
    pair.turn()
    leave(pair, "first")
    told = len(pair.home.of("first"))
    pair.ask("again")
    pair.finish("again")
    assert answer(pair, "again") == alone
    assert not pair.home.of("again", Accepted)[0].waits, "it is not shared a second time"
    assert cached(pair, "again") == TOKENS - 1
    later = pair.home.of("first")[told:]
    assert not [event for event in later if isinstance(event, Failed | Finished | Delta)]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_read_to_its_end_though_nobody_has_asked_again_yet(pair: TurnedPair, kind: str) -> None:
    pair.ask("first")
    pair.share("first", kind)
    leave(pair, "first")
    pair.finish("first")
    assert pair.home.scheduler.budget.used_bytes == 0
    pair.ask("again")
    pair.finish("again")
    assert cached(pair, "again") == TOKENS - 1


@pytest.mark.parametrize("kind", KINDS)
def test_another_prompt_does_not_wait_for_it(pair: TurnedPair, kind: str, alone: list[Any]) -> None:
    pair.home.scheduler.max_streams = 1
    pair.ask("first")
    pair.share("first", kind)
    leave(pair, "first")
    pair.ask("other", 400, 6)
    pair.turn()
    assert [each.id for each in pair.home.scheduler._prefilling] == ["other"]
    assert pair.home.of("other", Accepted)[0].waits, "it is offered to helpers as if nothing were here"
    pair.home.scheduler.tell(Cancel("other"))
    pair.finish("other")
    # At the second try it is read alone, which can be kept half way, unless something could be kept already.
    pair.ask("again")
    pair.turn()
    (accepted,) = pair.home.of("again", Accepted)
    assert accepted.cached > 0 or not accepted.waits
    pair.home.scheduler.tell(Cancel("again"))
    pair.finish("again")
    pair.ask("last", shared=False)
    pair.finish("last")
    assert answer(pair, "last") == alone


@pytest.mark.parametrize("kind", KINDS)
def test_it_ends_once_its_time_is_up(pair: TurnedPair, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SHARE_LEFT_S", 0.0)
    pair.ask("first")
    pair.share("first", kind)
    leave(pair, "first")
    pair.turn()
    assert not pair.home.busy
    assert len(pair.home.scheduler.streams) == pair.home.scheduler.budget.used_bytes == 0


def test_it_ends_with_its_helper(pair: TurnedPair) -> None:
    pair.ask("first")
    pair.share("first", "tokens")
    leave(pair, "first")
    pair.helper.scheduler.tell(Cancel("first helped"))
    pair.finish("first")
    assert pair.home.scheduler.prefix.longest(the_tokens()) == 0


def read_on(pair: TurnedPair, name: str, cached: int) -> None:
    """Turns until more is there than was before, or it is read alone: what helpers send may come late."""
    pair.turn_until(lambda: (shared := pair.shared(name)) is None or shared.done > cached)


@pytest.mark.parametrize("kind", KINDS)
def test_after_tries_that_are_too_short_it_finishes(pair: TurnedPair, kind: str, alone: list[Any]) -> None:
    """Between two tries another prompt comes, so none is read on meanwhile; each try may take few turns."""
    begins = []
    for number in range(20):
        name = f"try {number}"
        pair.ask(name)
        pair.turn()
        (accepted,) = pair.home.of(name, Accepted)
        if accepted.waits:
            pair.share(name, kind)
        for _ in range(6):
            pair.turn()
        if number:
            read_on(pair, name, accepted.cached)
        if pair.home.of(name, Delta):
            break
        leave(pair, name)
        pair.ask(f"other {number}", 20, shared=False)
        pair.finish(f"other {number}")
        begins.append(max([each.cached for each in pair.home.of(name, Prefill)] + [accepted.cached]))
    else:
        pytest.fail(f"not done; they began at {begins}")
    pair.finish(name)
    assert answer(pair, name) == alone
    # Of the first one nothing may have been kept; each later one begins behind the one before.
    assert begins[1:] == sorted(set(begins[1:]))


@pytest.mark.parametrize("kept", [None, [n for n in range(TOKENS) if n % 10]])
def test_a_prompt_that_is_read_here_goes_on_where_it_was(pair: TurnedPair, kept: list[int] | None) -> None:
    fields: dict[str, Any] = {"shared": False} | ({} if kept is None else {"kept": kept})
    begins = []
    for number in range(3):
        pair.ask(f"try {number}", **fields)
        for _ in range(3):
            pair.turn()
        leave(pair, f"try {number}")
        begins.append(cached(pair, f"try {number}"))
    assert begins == sorted(set(begins)), "each begins later than the one before"


def test_a_worker_that_stops_keeps_what_was_read(pair: TurnedPair) -> None:
    pair.ask("first", shared=False)
    for _ in range(4):
        pair.turn()
    pair.close()
    assert pair.home.scheduler.prefix.longest(the_tokens()) >= 2 * sharing.CHUNK


# ---- Rows of helpers that are wrong ----------------------------------------------------------------------


@pytest.fixture
def lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The helper's first chunk is right, and its later ones are not, which the check of later tokens sees."""

    class Lying:
        def copied(self, cache: Any, start: int, stop: int) -> Any:
            keys, values = row_memory.copied(cache, start, stop)
            return keys, values if start < 2 * sharing.CHUNK else -values

    monkeypatch.setattr(helper_work, "row_memory", Lying())
    monkeypatch.setattr(limits, "SHARE_LATER_SHARE", 1e9)


def arrived(pair: TurnedPair, name: str, tokens: int) -> None:
    """So many tokens have come from the helper, as far as was checked until then."""
    pair.turn_until(lambda: (shared := pair.shared(name)) is not None and shared.done >= tokens)


@pytest.mark.usefixtures("lies")
def test_attack_rows_that_no_check_has_seen_are_not_kept(
    pair: TurnedPair, monkeypatch: pytest.MonkeyPatch, alone: list[Any]
) -> None:
    monkeypatch.setattr(limits, "SHARE_LEFT_S", -1.0)
    pair.ask("first")
    pair.share("first", "layers")
    arrived(pair, "first", 6 * sharing.CHUNK)
    leave(pair, "first")
    pair.finish("first")
    pair.ask("again", shared=False)
    pair.finish("again")
    assert answer(pair, "again") == alone


@pytest.mark.usefixtures("lies")
def test_attack_a_prompt_that_follows_a_shared_one_takes_no_unchecked_rows(pair: TurnedPair) -> None:
    follower = TokenPrompt([*the_tokens()[:600], 7, 8, 9])
    pair.ask("leader")
    pair.share("leader", "layers")
    pair.ask("follower", prompt=follower)
    pair.turn_until(lambda: bool(pair.home.of("follower", Finished)))
    pair.finish("leader")
    assert pair.gave_up("leader") == "peer_wrong"
    own = TurnedPair(pair.family)
    own.ask("follower", prompt=follower, shared=False)
    own.finish("follower")
    assert answer(pair, "follower") == answer(own, "follower")


# ---- Other accelerators' numbers -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", ["leaves", "is lost", "leaves once alone", "stops", "finishes"])
def test_numbers_of_another_accelerator_are_never_kept_as_exact(
    pair: TurnedPair, kind: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SHARE_LEFT_S", -1.0)
    pair.ask("first")
    pair.share("first", kind, exact=False)
    for _ in range(6):
        pair.turn()
    if end == "is lost" or end == "leaves once alone":
        pair.helper.scheduler.tell(Cancel("first helped"))
        pair.turn_until(lambda: bool(pair.home.of("first", PrefillReport)))
    if end == "leaves" or end == "leaves once alone":
        leave(pair, "first")
    if end == "stops":
        pair.close()
    else:
        pair.finish("first")
    prefix = pair.home.scheduler.prefix
    took_part = prefix.longest(the_tokens(), EQUIVALENT) > 0
    assert not (took_part and prefix.longest(the_tokens(), DENSE)), "exact only if no helper's rows are in it"
    if end == "finishes":
        assert took_part
