"""A model over several machines says what it says whole, bit for bit."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable
from pipes import changed
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny_architectures
from group_machines import Group, group_of, rows_held
from mlx_lm.models.cache import make_prompt_cache
from msgspec.structs import replace
from tiny_architectures import VOCAB
from turned_scheduler import TinyFamily, Turned, drawn, family

from fleetd import limits
from fleetd.engine.failures import MemberLost
from fleetd.engine.groups import messages
from fleetd.engine.groups.member_rows import MemberRows
from fleetd.engine.groups.messages import (
    Copy,
    Extend,
    Extract,
    Filter,
    MakeUp,
    Merge,
    RunStage,
    StageRan,
    Trim,
)
from fleetd.engine.groups.remote_rows import CachesThere, KeptThere, RemoteRows
from fleetd.engine.layers.stage import Stage
from fleetd.engine.protocol import Cancel, Finished
from fleetd.engine.streams.frames import FrameHeader, Kind
from fleetd.errors import GroupLost, ModelUnsupported, ProtocolError
from fleetd.models.memory_need import together

SHORT = sorted(set(tiny_architectures.FAMILIES) - set(tiny_architectures.LONG))
CHUNKS = ([[5, 7, 11, 13, 17, 19, 23]], [[3]], [[4, 9]])


def same(ours: mx.array, theirs: mx.array) -> bool:
    return bool(np.array_equal(np.array(ours.view(mx.uint8)), np.array(theirs.view(mx.uint8))))


@pytest.mark.parametrize(
    "name",
    [
        *SHORT,
        *(pytest.param(name, marks=pytest.mark.long) for name in tiny_architectures.LONG),
    ],
)
def test_any_cut_gives_the_logits_of_the_whole_model(name: str, on_cpu: None) -> None:
    whole = tiny_architectures.tiny(name)
    cache, total = make_prompt_cache(whole), len(whole.layers)
    expected = [whole(mx.array(chunk), cache=cache) for chunk in CHUNKS]
    for cuts in [(1,), (total - 1,), (1, total - 1)]:
        group = group_of(whole, *cuts)
        cache = group.model.make_cache()
        for chunk, right in zip(CHUNKS, expected, strict=True):
            assert same(group.model(mx.array(chunk), cache), right), cuts


SHARED = {"num_kv_shared_layers": 1}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemma3n", {"text_config": {**tiny_architectures.config_of("gemma3n")["text_config"], **SHARED}}),
        ("gemma4_text", {**SHARED, "use_double_wide_mlp": False}),
    ],
)
def test_layers_that_read_what_others_keep_stay_with_them(
    name: str, changes: dict[str, Any], on_cpu: None
) -> None:
    whole = tiny_architectures.tiny(name, **changes)
    config = {**tiny_architectures.config_of(name), **changes}
    # The last layer reads what the one two before it keeps.
    assert Stage.of(whole).sources == (0, 1, 2, 1)
    assert together(config, 4) == 3
    cache = make_prompt_cache(whole)
    expected = [whole(mx.array(chunk), cache=cache) for chunk in CHUNKS]
    group = group_of(whole, 1)
    cache = group.model.make_cache()
    for chunk, right in zip(CHUNKS, expected, strict=True):
        assert same(group.model(mx.array(chunk), cache), right)
    for cuts in [(2,), (3,), (1, 2)]:
        with pytest.raises(ModelUnsupported, match="cannot be cut before layer"):
            group_of(whole, *cuts)


@pytest.mark.parametrize(
    ("config", "last"),
    [
        ({}, 1),
        ({"num_kv_shared_layers": 0}, 1),
        ({"num_kv_shared_layers": 2, "layer_types": ["s", "f", "s", "f", "s", "f"]}, 4),
        ({"text_config": {"num_kv_shared_layers": 1, "layer_types": ["s", "f", "s", "s", "s", "f"]}}, 5),
        ({"num_kv_shared_layers": 2}, 6),
        ({"num_kv_shared_layers": 9}, 1),
        ({"num_kv_shared_layers": "2"}, 1),
    ],
)
def test_a_config_says_which_layers_stay_together(config: dict[str, Any], last: int) -> None:
    assert together(config, 6) == last


# ---- under the scheduler ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TinyFamily:
    return family(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def grouped(llama: TinyFamily, on_cpu: None) -> Callable[..., tuple[Turned, Group]]:
    def make(*cuts: int, **options: Any) -> tuple[Turned, Group]:
        group = group_of(llama.model, *cuts)
        return Turned(TinyFamily(group.model, llama.tokenizer, llama.sharable), **options), group

    return make


PROMPTS = [drawn(100 + 37 * n, seed=n) for n in range(5)]


def answers(bench: Turned, *, together: bool) -> list[Any]:
    for number, prompt in enumerate(PROMPTS):
        bench.ask(f"r{number}", prompt, max_tokens=9)
        if not together:
            bench.finish()
    bench.finish()
    return [bench.answer(f"r{number}") for number in range(len(PROMPTS))]


@pytest.mark.usefixtures("cpu_installed")
@pytest.mark.parametrize("cuts", [(2,), (1, 3)])
@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
def test_answers_are_those_of_the_whole_model(
    llama: TinyFamily, grouped: Callable[..., tuple[Turned, Group]], cuts: tuple[int, ...], *, together: bool
) -> None:
    # With the arithmetic of a worker on a CPU: another's rounds otherwise when an answer joins the batch at
    # another token, as it does where no step begins ahead.
    expected = answers(Turned(llama), together=together)
    bench, _ = grouped(*cuts)
    assert answers(bench, together=together) == expected


def test_a_prompt_goes_on_from_one_that_was_kept(
    llama: TinyFamily, grouped: Callable[..., tuple[Turned, Group]]
) -> None:
    longer = [*PROMPTS[0], *drawn(40, seed=9)]

    def asked(bench: Turned) -> list[Any]:
        for name, prompt in (("first", PROMPTS[0]), ("longer", longer), ("again", longer)):
            bench.ask(name, prompt, max_tokens=5)
            bench.finish()
        return [bench.answer(name) for name in ("longer", "again")]

    bench, _ = grouped(2)
    assert asked(bench) == asked(Turned(llama))
    assert bench.of("longer", Finished)[-1].usage.cached_tokens >= len(PROMPTS[0]) - 1


def test_members_keep_what_is_kept_here_and_nothing_else(
    grouped: Callable[..., tuple[Turned, Group]],
) -> None:
    bench, group = grouped(1, 2)
    answers(bench, together=True)
    bench.ask("cancelled", PROMPTS[0], max_tokens=500)
    bench.turns_to("cancelled")
    bench.scheduler.tell(Cancel("cancelled"))
    bench.finish()
    bench.scheduler.prefix.trim(0)
    gc.collect()
    # What was thrown away is told with the next run.
    bench.ask("last", PROMPTS[1], max_tokens=1)
    bench.finish()
    bench.scheduler.prefix.trim(0)
    gc.collect()
    group.model.read(mx.array([[1]]), group.model.make_cache())
    group.model.settle()
    assert rows_held(group) == [1, 1]


# ---- what a member refuses -------------------------------------------------------------------------------


@pytest.fixture
def pair(llama: TinyFamily, on_cpu: None) -> Group:
    return group_of(llama.model, 2)


@pytest.mark.parametrize(
    "change", [Copy(77, 78), Copy(1, 99, 99), Trim(77, 1), Filter(77, [0]), Extract(77, 0, 3)]
)
def test_a_change_of_what_is_not_there_is_refused(pair: Group, change: Any) -> None:
    cache = pair.model.make_cache()
    pair.model(mx.array([[1, 2, 3]]), cache)
    cache[-1].there.tell(change)
    with pytest.raises(MemberLost, match=r"kept here|cannot be had"):
        pair.model(mx.array([[4]]), cache)


@pytest.mark.parametrize("change", [Filter(3, [0, 2]), Extract(3, 2, 4), Filter(1, [0]), Extract(1, 0, 4)])
def test_rows_that_a_batch_does_not_have_are_refused(llama: TinyFamily, on_cpu: None, change: Any) -> None:
    """What takes rows out of an array does not check their numbers: it would read other memory."""
    rows = MemberRows(Stage.of(llama.model).part(2, len(llama.model.layers)))
    for number in (1, 2):
        rows.caches(number)
    rows.change(Merge([1, 2], 3))
    rows.change(Copy(3, 5))
    rows.change(Filter(5, [1]))
    with pytest.raises(ProtocolError, match=r"of a batch of 2|No batch"):
        rows.change(change)
    with pytest.raises(ProtocolError, match="of a batch of 1"):
        rows.change(Extract(5, 1, 7))


def test_a_batch_of_more_rows_than_a_step_has_is_refused(llama: TinyFamily, on_cpu: None) -> None:
    rows = MemberRows(Stage.of(llama.model).part(2, len(llama.model.layers)))
    rows.caches(1)
    rows.change(Merge([1] * limits.GROUP_STREAMS, 2))
    rows.change(Merge([1], 3))
    with pytest.raises(ProtocolError, match="A batch of 65 rows"):
        rows.change(Extend(2, 3))


@pytest.mark.parametrize(
    ("family", "number", "tokens", "said"),
    [
        ("llama", 77, 9, "Nothing is kept"),
        ("llama", 1, 2, "cannot be made up to 2"),
        ("llama", 2, 9, "cannot be made up to 9"),
        ("llama", 1, (1 << 31) - 1, "more memory than was promised"),
        ("gemma3_text", 1, 9, "cannot be made up to 9"),
    ],
)
def test_rows_that_cannot_be_made_up_are_refused(
    family: str, number: int, tokens: int, said: str, on_cpu: None
) -> None:
    stage = Stage.of(tiny_architectures.tiny(family)).part(1, 4)
    rows = MemberRows(stage, most_bytes=1 << 20)
    hidden = mx.zeros((1, 3, stage.width))
    stage.run(hidden, stage.spread(rows.caches(1)), stage.inputs(mx.zeros((1, 3), mx.int32), 0))
    rows.caches(2)
    with pytest.raises(ProtocolError, match=said):
        rows.change(MakeUp(number, tokens))


@pytest.mark.parametrize("token", [VOCAB, (1 << 53) - 1])
def test_tokens_that_no_table_has_are_refused(token: int, on_cpu: None) -> None:
    whole = Stage.of(tiny_architectures.tiny("gemma3n"))
    inner = whole.part(1, 3)
    for stage in (whole, inner):
        stage.check_tokens([0, VOCAB - 1], 2)
        with pytest.raises(ProtocolError, match=f"vocabulary of {VOCAB}"):
            stage.check_tokens([1, token], 2)
    # Layers that take none of them have no table.
    Stage.of(tiny_architectures.tiny("llama")).part(1, 3).check_tokens([token], 1)


def test_positions_that_no_table_has_are_refused(on_cpu: None) -> None:
    model = tiny_architectures.tiny("gpt2")
    stage = Stage.of(model)
    most = int(stage.weights.positions.weight.shape[0])
    stage.check_tokens([1, 2], most)
    with pytest.raises(ProtocolError, match=f"behind the {most} positions"):
        stage.check_tokens([1, 2], most + 1)
    stage.part(1, stage.total).check_tokens([1, 2], most + 1)


def test_members_check_tokens_that_their_layers_take(on_cpu: None) -> None:
    group = group_of(tiny_architectures.tiny("gemma3n"), 1)
    other = group.pipes[0].other
    assert other is not None

    def tamper(head: FrameHeader, data: bytes) -> list[tuple[FrameHeader, bytes]]:
        first, second = head.sizes
        command = messages.decode(data[:first], RunStage)
        sent = messages.encode(replace(command, ids=[VOCAB] * len(command.ids)))
        return [(replace(head, sizes=(len(sent), second)), sent + data[first:])]

    group.pipes[0].tamper = tamper
    with pytest.raises(MemberLost, match="vocabulary"):
        group.model(mx.array([[1, 2]]), group.model.make_cache())


@pytest.mark.parametrize("kind", [RunStage, messages.StageRan, messages.KeptTold, messages.HopLost])
@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91\x91\x91\xa4\xff\xff\xff\xff", b"\x91" * 100_000])
def test_attack_bytes_that_are_no_message_are_a_protocol_error(kind: type, data: bytes) -> None:
    """Also texts that are no UTF-8, and lists in lists."""
    with pytest.raises(ProtocolError, match=kind.__name__):
        messages.decode(data, kind)


def test_no_more_room_is_made_at_once_than_was_promised(llama: TinyFamily, on_cpu: None) -> None:
    group = group_of(llama.model, 2)
    (member,) = group.members
    member._most_tokens = 300
    cache = group.model.make_cache()
    flight = group.model.begin(mx.array([[1, 2, 3]]), cache, room=1 << 30)
    flight.logits()
    (held,) = (caches for caches in member.rows._held.values())
    assert [each.keys.shape[2] for each in held] == [512] * len(held)


def test_a_batch_counts_the_tokens_that_it_takes_back() -> None:
    there = CachesThere(KeptThere())
    batch = RemoteRows.merge([RemoteRows(there, 5), RemoteRows(there, 9)])
    batch.grow(1)
    assert batch.trim(2) == 2
    assert (batch.tokens, batch.each) == (8, [4, 8])
    batch.filter([0])
    assert (batch.tokens, batch.extract(0).tokens) == (4, 4)


def test_hidden_states_of_another_shape_are_refused(pair: Group) -> None:
    def tamper(head: FrameHeader, data: bytes) -> list[tuple[FrameHeader, bytes]]:
        first, second = head.sizes
        return [(replace(head, sizes=(first, second - 4)), data[:-4])]

    pair.pipes[0].tamper = tamper
    with pytest.raises(MemberLost, match="were due"):
        pair.model(mx.array([[1, 2]]), pair.model.make_cache())


def test_no_answer_is_larger_than_what_was_asked_for(pair: Group) -> None:
    (stage,) = pair.model.members.stages
    pair.model(mx.array([[1, 2]]), pair.model.make_cache())
    asked = 2 * pair.model.width * pair.model.dtype.size
    stage._place(FrameHeader(Kind.STAGED, sizes=(9, asked)))
    with pytest.raises(ProtocolError, match=f"of 9 and {asked + 1} bytes"):
        stage._place(FrameHeader(Kind.STAGED, sizes=(9, asked + 1)))


@pytest.mark.parametrize("end", ["front", "member", "member behind"])
def test_what_is_sent_before_it_is_due_does_not_fill_the_memory(
    llama: TinyFamily, on_cpu: None, end: str
) -> None:
    group = group_of(llama.model, 1, 2)
    stage, (member, behind) = group.model.members.stages[0], group.members
    message = limits.GROUP_MESSAGE_BYTES
    place, head = {
        "front": (stage._place, FrameHeader(Kind.KEPT, sizes=(message, 0))),
        "member": (member._place, FrameHeader(Kind.STAGE, sizes=(message, 0))),
        "member behind": (behind.hops._place, FrameHeader(Kind.HOP, sizes=(member._most_hidden, 0))),
    }[end]
    sent = (place(head) for _ in range(1000))
    with pytest.raises(ProtocolError, match="before any of it was due"):
        deque(sent, maxlen=0)


def test_more_than_was_promised_is_refused(llama: TinyFamily, on_cpu: None) -> None:
    small = group_of(llama.model, 2, most_bytes=1)
    with pytest.raises(MemberLost, match="were promised"):
        small.model(mx.array([[1, 2]]), small.model.make_cache())


@pytest.mark.parametrize("kind", [Kind.STAGE, Kind.HIDDEN])
def test_a_frame_of_another_kind_loses_the_member(pair: Group, kind: Kind) -> None:
    other = pair.pipes[0].other
    assert other is not None
    other.tamper = changed(kind=kind)
    with pytest.raises(MemberLost) as lost:
        pair.model(mx.array([[1, 2]]), pair.model.make_cache())
    assert isinstance(lost.value.error, GroupLost)


def test_a_stream_that_breaks_loses_the_member(pair: Group) -> None:
    pair.pipes[0].fail()
    with pytest.raises(MemberLost) as lost:
        pair.model(mx.array([[1, 2]]), pair.model.make_cache())
    assert "machine 1 left the group" in lost.value.error.message


@pytest.mark.parametrize("data", [b"", b"\x01", messages.encode(StageRan())])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        messages.decode(data, RunStage)


def test_messages_come_back_as_they_were() -> None:
    run = RunStage([Copy(1, 2, 3), Filter(4, [0, 2]), Trim(5, 6)], 7, 1, 2, wanted=True, room=9, ids=[1, 2])
    assert messages.decode(messages.encode(run), RunStage) == run
