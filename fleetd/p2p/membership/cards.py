"""Cards: the description of each machine by itself, and the table of the newest card of each.

Pure. A card counts only on its own machine's session, so no machine can describe another. The card with the
higher (epoch, sequence) wins, in any order of arrival; a machine raises its epoch at every start and its
sequence with every card. Age is measured on the receiver's monotonic clock alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.control.model_facts import Count, Layers, MeasuredSpeed, ModelShape, Text
from fleetd.errors import ProtocolError
from fleetd.p2p.message_reader import reader
from fleetd.text.bounded import Rate, Share

State = Literal["installed", "loading", "loaded"]
# Requests go to loaded models first, so a card that is too large keeps those.
_KEEP: dict[State, int] = {"loaded": 0, "loading": 1, "installed": 2}


class ModelCard(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model on that machine."""

    name: Annotated[str, Meta(min_length=1, max_length=limits.MODEL_NAME_CHARS)]
    # Of its files; "" until they are hashed.
    digest: Text = ""
    revision: Text | None = None
    # Where its files came from: "hub", "lm-studio", "folder".
    source: Text = ""
    # What it is for: "chat", "compressor".
    roles: Annotated[list[Text], Meta(max_length=16)] = []
    # Bytes of memory that it needs to run.
    memory_bytes: Count = 0
    state: State = "installed"
    # What it is. ``layers`` is 0 until a load there has found out what only a load does.
    shape: ModelShape = ModelShape()
    # As measured there, corrected by requests.
    speed: MeasuredSpeed = MeasuredSpeed()
    # Bytes for keys and values of what is loaded.
    kv_budget_bytes: Count = 0
    # Bytes for the keys and values of earlier prompts, in its prefix cache.
    prefix_budget_bytes: Count = 0
    # The layers [first, last) that are loaded to help others, if not all are; (0, 0): none.
    part_first: Layers = 0
    part_last: Layers = 0
    # How many layers the model has of which it has these, and the machines for which it has them.
    part_total: Layers = 0
    part_asked_by: Text = ""
    # Two machines with the same one compute the same bytes; "" if it is not known.
    arithmetic: Text = ""
    # The probe's verdict, whether drafts can be verified there without changing a byte
    # (``engine.protocol.Ready.speculation``); "" while it is not loaded.
    exactness: Text = ""
    # Seconds that a load of it takes there; 0 if unknown.
    load_s: Rate = 0.0
    # "ready" if prompts can be scored with it at once, "unable" if they never can; "unmeasured" or "" before
    # that is known.
    scoring: Text = ""
    # ``Profile.recall`` of what scores with it there; 0 if it is not known.
    scoring_recall: Share = 0.0

    @property
    def prefix_tokens(self) -> int:
        """About how many tokens of prompts its prefix cache keeps; 0 if unknown."""
        token_bytes = self.shape.sizes.token_bytes
        return self.prefix_budget_bytes // token_bytes if token_bytes else 0


class MachineFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Facts that hold while a daemon runs."""

    platform: Text = ""
    product: Text = ""
    # The part that computes: "Apple M3 Ultra".
    chip: Text = ""
    cores: Count = 0
    # Bytes of the memory that models live in.
    memory_bytes: Count = 0
    tier: Text = ""
    accelerator: Text = ""


class Card(msgspec.Struct, frozen=True, omit_defaults=True):
    """One machine at one moment."""

    node_id: Annotated[str, Meta(min_length=1, max_length=64)]
    epoch: Count
    sequence: Count
    name: Text = ""
    software: Text = ""
    versions: Annotated[dict[Text, Text], Meta(max_length=16)] = {}
    machine: MachineFacts = MachineFacts()
    models: Annotated[list[ModelCard], Meta(max_length=limits.CARD_MODELS)] = []
    # Bytes of memory that are free.
    available_bytes: Count = 0
    # Bytes of them that a model may take, weights and all, by the machine's settings.
    usable_bytes: Count = 0
    # Bytes that idle loaded models hold, which may be unloaded for another one.
    evictable_bytes: Count = 0
    # Its requests that run, and that wait for their turn.
    running: Count = 0
    waiting: Count = 0
    # Requests for vectors or scores that it computes, or parts of, for itself or others. No prompt waits for
    # these.
    vectors: Count = 0
    # Of its running requests' prompts, the tokens that are not prefilled yet.
    unread_tokens: Count = 0
    # Requests that it runs at once at most.
    max_streams: Count = 0
    draining: bool = False
    # The operating system's load average over its cores.
    load: Rate = 0.0
    # Its cores that ranks of divided models keep busy while they wait for each other.
    rank_cores: Count = 0
    # What may carry the sums of ranks there besides a sealed ring, on a link that its owner has declared
    # private.
    collectives: Annotated[list[Text], Meta(max_length=8)] = []
    # Bytes of its disk that layers of other machines' models may take.
    part_bytes: Count = 0
    # Hardware addresses that Wake on LAN may be sent to while it sleeps; none if it is not to be woken.
    wake: Annotated[list[Text], Meta(max_length=limits.WAKE_ADDRESSES)] = []

    @property
    def version(self) -> tuple[int, int]:
        return self.epoch, self.sequence


# ---- On the wire -----------------------------------------------------------------------------------------

_encode = msgspec.msgpack.Encoder().encode
_read: Callable[[bytes], Card] = reader(Card, "A card", limits.CARD_BYTES)
# Growth of the headers of the card and of its models when there are many.
_HEADERS_BYTES = 5

S = TypeVar("S", bound=msgspec.Struct)


def encode(card: Card) -> bytes:
    """The card as bytes, at most ``limits.CARD_BYTES``.

    Texts that a model's files or the operating system made too long are cut, and models that do not fit are
    left out, the loaded ones last: one odd folder must not cost a machine its place in the fleet.
    """
    models = [_fitting(model) for model in card.models if 0 < len(model.name) <= limits.MODEL_NAME_CHARS]
    models = sorted(models, key=lambda model: _KEEP[model.state])[: limits.CARD_MODELS]
    bare = _fitting(msgspec.structs.replace(card, models=[]))
    room = limits.CARD_BYTES - len(_encode(bare)) - len(_encode("models")) - _HEADERS_BYTES
    kept = []
    for model in models:
        room -= len(_encode(model))
        if room < 0:
            break
        kept.append(model)
    return _encode(msgspec.structs.replace(bare, models=kept))


def decode(body: bytes) -> Card:
    """Fields that this version does not know are ignored. Raises ProtocolError."""
    return _read(body)


def _fitting(struct: S) -> S:
    """A copy with every text in it cut to the bound and made UTF-8 (names of files need not be)."""
    changed: dict[str, object] = {}
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        fitting: object
        if isinstance(value, str):
            fitting = value[: limits.CARD_TEXT_CHARS].encode(errors="replace").decode()
        elif isinstance(value, msgspec.Struct):
            fitting = _fitting(value)
        else:
            continue
        # msgspec omits a default from the encoding only if it is the same object.
        if fitting != value:
            changed[name] = fitting
    return msgspec.structs.replace(struct, **changed) if changed else struct


# ---- The newest of each ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Held:
    """``card`` is None once it expired; older versions stay refused even then."""

    card: Card | None
    version: tuple[int, int]
    heard_s: float


class CardTable:
    """The newest card of every machine that has a session; ``drop`` forgets one whose session ended."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}

    def accept(self, card: Card, from_node: str, now: float) -> bool:
        """Add a card; True if it is new. Raises ProtocolError if its sender is another machine."""
        if card.node_id != from_node:
            raise ProtocolError(f"The machine {from_node[:7]} sent a card of {card.node_id[:7]}.")
        held = self._held.get(from_node)
        # An expired card may be sent again, and counts from now. A copy of a current card renews nothing.
        if held is not None and (card.version < held.version or (card.version == held.version and held.card)):
            return False
        self._held[from_node] = _Held(card, card.version, now)
        return True

    def expire(self, now: float) -> list[str]:
        """Remove cards older than ``limits.CARD_TTL_S``; returns their node ids."""
        gone = [
            node_id
            for node_id, held in self._held.items()
            if held.card is not None and now - held.heard_s >= limits.CARD_TTL_S
        ]
        for node_id in gone:
            self._held[node_id].card = None
        return gone

    def drop(self, node_id: str) -> None:
        self._held.pop(node_id, None)

    def get(self, node_id: str) -> Card | None:
        held = self._held.get(node_id)
        return held.card if held is not None else None

    def heard_s(self, node_id: str) -> float | None:
        """The time of arrival of the card in the table, on the caller's clock."""
        held = self._held.get(node_id)
        return held.heard_s if held is not None and held.card is not None else None

    def __iter__(self) -> Iterator[Card]:
        return iter([held.card for held in self._held.values() if held.card is not None])

    def __len__(self) -> int:
        return sum(held.card is not None for held in self._held.values())
