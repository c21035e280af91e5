"""Cards converge to the newest word of each machine, age on the receiver's clock, and are bounded."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetd import limits
from fleetd.control.model_facts import MeasuredSpeed, ModelShape
from fleetd.errors import ProtocolError
from fleetd.p2p.membership import cards
from fleetd.p2p.membership.cards import Card, CardTable, MachineFacts, ModelCard

NODE = "a" * 56
OTHER = "b" * 56


def card(epoch: int = 1, sequence: int = 1, node: str = NODE, **fields: Any) -> Card:
    return Card(node_id=node, epoch=epoch, sequence=sequence, **fields)


def wire(**fields: Any) -> bytes:
    return msgspec.msgpack.encode({"node_id": NODE, "epoch": 1, "sequence": 1, **fields})


# ---- The newest wins -------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.sampled_from([NODE, OTHER]), st.integers(0, 5), st.integers(0, 5)), max_size=40),
    st.randoms(use_true_random=False),
)
def test_any_order_repetition_and_loss_ends_in_the_newest_that_arrived(
    sent: list[tuple[str, int, int]], chance: random.Random
) -> None:
    arriving = [item for item in sent if chance.random() < 0.8]
    arriving += [item for item in arriving if chance.random() < 0.5]
    chance.shuffle(arriving)
    table, best = CardTable(), dict[str, tuple[int, int]]()
    for node, epoch, sequence in arriving:
        news = table.accept(card(epoch, sequence, node), node, now=0.0)
        assert news == (node not in best or (epoch, sequence) > best[node])
        best[node] = max(best.get(node, (-1, -1)), (epoch, sequence))
    assert {held.node_id: held.version for held in table} == best
    assert len(table) == len(best)


def test_a_restarted_machine_counts_from_one_again() -> None:
    table = CardTable()
    assert table.accept(card(1, 900), NODE, 0.0)
    assert table.accept(card(2, 1), NODE, 0.0)
    assert not table.accept(card(1, 901), NODE, 0.0)
    assert table.get(NODE) == card(2, 1)


def test_attack_a_machine_speaks_for_another() -> None:
    table = CardTable()
    table.accept(card(1, 1, OTHER), OTHER, 0.0)
    with pytest.raises(ProtocolError, match="aaaaaaa sent a card of bbbbbbb"):
        table.accept(card(9, 9, OTHER, draining=True), NODE, 1.0)
    assert table.get(OTHER) == card(1, 1, OTHER)


def test_a_dropped_machine_starts_from_nothing() -> None:
    table = CardTable()
    table.accept(card(5, 5), NODE, 0.0)
    table.drop(NODE)
    table.drop(NODE)
    assert table.get(NODE) is None
    assert table.accept(card(1, 1), NODE, 0.0)


# ---- Age -------------------------------------------------------------------------------------------------


@given(st.floats(0, 1e9))
def test_a_card_ends_exactly_at_its_time_to_live(heard_s: float) -> None:
    table = CardTable()
    table.accept(card(), NODE, heard_s)
    assert table.heard_s(NODE) == heard_s
    # Half a second stays far from where floats of this size are rounded.
    assert table.expire(heard_s + limits.CARD_TTL_S - 0.5) == []
    assert table.get(NODE) == card()
    assert table.expire(heard_s + limits.CARD_TTL_S + 0.5) == [NODE]
    assert table.expire(heard_s + limits.CARD_TTL_S + 1) == []
    assert (table.get(NODE), table.heard_s(NODE), list(table), len(table)) == (None, None, [], 0)


def test_the_last_moment_of_a_card() -> None:
    table = CardTable()
    table.accept(card(), NODE, 1024.0)
    assert table.expire(1024.0 + limits.CARD_TTL_S - 2**-10) == []
    assert table.expire(1024.0 + limits.CARD_TTL_S) == [NODE]


def test_attack_a_replayed_card_keeps_no_machine_alive() -> None:
    table = CardTable()
    table.accept(card(1, 2), NODE, 0.0)
    assert not table.accept(card(1, 2), NODE, limits.CARD_TTL_S / 2)
    assert not table.accept(card(1, 1), NODE, limits.CARD_TTL_S / 2)
    assert table.expire(limits.CARD_TTL_S) == [NODE]
    assert not table.accept(card(1, 1), NODE, limits.CARD_TTL_S)


def test_an_expired_machine_that_speaks_again_is_back() -> None:
    table = CardTable()
    table.accept(card(1, 2), NODE, 0.0)
    table.expire(limits.CARD_TTL_S)
    assert table.accept(card(1, 2), NODE, 100.0)
    assert table.heard_s(NODE) == 100.0


def test_each_new_card_renews_the_time() -> None:
    table = CardTable()
    for i in range(10):
        assert table.accept(card(1, i), NODE, i * (limits.CARD_TTL_S - 1))
        assert table.expire(i * (limits.CARD_TTL_S - 1)) == []


# ---- On the wire -----------------------------------------------------------------------------------------

texts = st.text(max_size=limits.CARD_TEXT_CHARS + 5)
counts = st.integers(0, (1 << 63) - 1)
rates = st.floats(0, 1e12)
model_cards = st.builds(
    ModelCard,
    name=st.text(min_size=1, max_size=limits.MODEL_NAME_CHARS),
    digest=texts,
    roles=st.lists(st.sampled_from(["chat", "draft"]), max_size=2),
    state=st.sampled_from(["installed", "loading", "loaded"]),
    shape=st.builds(ModelShape, architecture=texts, weights_bytes=counts),
    speed=st.builds(MeasuredSpeed, prefill_tok_s=rates, doubt=texts),
)
any_card = st.builds(
    Card,
    node_id=st.just(NODE),
    epoch=counts,
    sequence=counts,
    name=texts,
    versions=st.dictionaries(st.just("mlx"), st.text(max_size=20)),
    machine=st.builds(MachineFacts, chip=texts, cores=counts),
    models=st.lists(model_cards, max_size=3),
    available_bytes=counts,
    load=rates,
)


@given(any_card)
def test_what_is_written_is_read(sent: Card) -> None:
    got = cards.decode(cards.encode(sent))
    assert got.version == sent.version
    assert got.name == sent.name[: limits.CARD_TEXT_CHARS]
    assert got.machine.chip == sent.machine.chip[: limits.CARD_TEXT_CHARS]
    assert (got.available_bytes, got.load) == (sent.available_bytes, sent.load)
    assert sorted(m.name for m in got.models) == sorted(m.name for m in sent.models)
    assert cards.decode(cards.encode(got)) == got


def test_fields_of_a_newer_version_are_ignored() -> None:
    got = cards.decode(wire(name="studio", colour="silver", models=[{"name": "m", "size": 3}]))
    assert got == card(name="studio", models=[ModelCard("m")])


@given(st.binary(max_size=200))
def test_garbage_is_a_protocol_error_and_nothing_else(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        cards.decode(body)


@given(st.data())
def test_a_damaged_card_is_read_or_refused(data: st.DataObject) -> None:
    body = bytearray(cards.encode(card(name="studio", models=[ModelCard("m", roles=["chat"])])))
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        cards.decode(bytes(body))
    except ProtocolError:
        pass


@pytest.mark.parametrize(
    "fields",
    [
        {"epoch": -1},
        {"sequence": 1 << 63},
        {"load": float("nan")},
        {"load": float("inf")},
        {"available_bytes": "much"},
        {"name": "x" * (limits.CARD_TEXT_CHARS + 1)},
        {"node_id": ""},
        {"versions": {str(i): "1" for i in range(17)}},
        {"machine": {"cores": -1}},
        {"models": [{"name": ""}]},
        {"models": [{"name": "x" * (limits.MODEL_NAME_CHARS + 1)}]},
        {"models": [{"name": "m", "speed": {"decode_tok_s": float("nan")}}]},
        {"models": [{"name": "m", "speed": {"decode_tok_s": -1.0}}]},
        {"models": [{"name": "m", "state": "borrowed"}]},
        {"models": [{"name": "m", "roles": ["chat"] * 17}]},
    ],
)
def test_attack_a_card_out_of_bounds(fields: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="A card cannot be read"):
        cards.decode(wire(**fields))


def test_attack_a_card_nested_without_end() -> None:
    with pytest.raises(ProtocolError):
        cards.decode(b"\x81\xa1x" + b"\x91" * 50_000 + b"\xc0")


def test_the_longest_text_and_the_most_models_are_allowed() -> None:
    models = [{"name": f"m{i}"} for i in range(limits.CARD_MODELS)]
    got = cards.decode(wire(name="x" * limits.CARD_TEXT_CHARS, models=models))
    assert (len(got.name), len(got.models)) == (limits.CARD_TEXT_CHARS, limits.CARD_MODELS)
    with pytest.raises(ProtocolError, match=f"length <= {limits.CARD_MODELS}"):
        cards.decode(wire(models=[*models, {"name": "one more"}]))


def test_the_largest_card_is_read_and_one_byte_more_is_not() -> None:
    padding = limits.CARD_BYTES - len(wire(later=b"")) - 1  # the length of so many bytes takes one more
    assert cards.decode(wire(later=bytes(padding))) == card()
    with pytest.raises(ProtocolError, match=f"{limits.CARD_BYTES + 1} bytes is over the limit"):
        cards.decode(wire(later=bytes(padding + 1)))


# ---- What a machine's own oddities may not do ------------------------------------------------------------


def test_a_machine_with_too_many_models_tells_of_the_loaded_ones_first() -> None:
    models = [ModelCard(f"m{i}") for i in range(limits.CARD_MODELS)]
    models += [ModelCard("loaded", state="loaded"), ModelCard("loading", state="loading")]
    names = [m.name for m in cards.decode(cards.encode(card(models=models))).models]
    assert names == ["loaded", "loading", *(f"m{i}" for i in range(limits.CARD_MODELS - 2))]


def test_models_with_long_texts_are_left_out_where_the_card_is_full() -> None:
    long = "x" * limits.CARD_TEXT_CHARS
    models = [ModelCard(f"m{i}", long, long, shape=ModelShape(long)) for i in range(limits.CARD_MODELS)]
    body = cards.encode(card(models=models))
    kept = cards.decode(body).models
    each = len(msgspec.msgpack.encode(models[-1]))
    assert limits.CARD_BYTES - each < len(body) <= limits.CARD_BYTES
    assert kept == models[: len(kept)]


@pytest.mark.parametrize("spare", range(-3, 7))
def test_a_card_that_just_fits_loses_nothing_and_never_grows_over_the_limit(spare: int) -> None:
    """Around the very byte at which the last model no longer fits."""
    models = [ModelCard("m", "x" * 255, "y" * 113)] * 164
    size = len(msgspec.msgpack.encode(card(models=models)))
    # Texts over 31 and under 256 characters have a header of two bytes.
    filler = limits.CARD_BYTES - size - len(msgspec.msgpack.encode("name")) - 2 - spare
    assert 31 < filler <= limits.CARD_TEXT_CHARS
    body = cards.encode(card(name="n" * filler, models=models))
    # Up to two bytes are kept for headers that did not grow.
    assert len(cards.decode(body).models) == (164 if spare >= 2 else 163)
    assert len(body) <= limits.CARD_BYTES


def test_what_a_models_files_say_cannot_make_the_card_unreadable() -> None:
    odd = [
        ModelCard("a", shape=ModelShape("x" * 10_000)),
        ModelCard("b", shape=ModelShape("\udc80")),
        ModelCard("c" * (limits.MODEL_NAME_CHARS + 1)),
    ]
    got = cards.decode(cards.encode(card(models=odd, machine=MachineFacts(product="\udcff"))))
    assert [m.name for m in got.models] == ["a", "b"]
    assert got.models[0].shape.architecture == "x" * limits.CARD_TEXT_CHARS
    assert got.machine.product == "?"
