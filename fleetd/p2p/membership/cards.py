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
from fleetd.errors import ProtocolError
from fleetd.p2p.message_reader import reader

State = Literal["installed", "loading", "loaded"]
# Requests go to loaded models first, so a card that is too large keeps those.
_KEEP: dict[State, int] = {"loaded": 0, "loading": 1, "installed": 2}

Text = Annotated[str, Meta(max_length=limits.CARD_TEXT_CHARS)]
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Layer = Annotated[int, Meta(ge=0, le=limits.LAYERS)]
# The bounds also keep out NaN and infinity, which would break every comparison of prices.
Rate = Annotated[float, Meta(ge=0, le=1e12)]


class ModelCard(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model on that machine. ``memory_bytes`` is what it needs to run.

    ``digest`` is "" until its files were hashed. Speeds are measured there, of one request alone; 0 means not
    yet. ``prefill_context_s``: seconds that each token of context adds to each token's prefill;
    ``prefill_fixed_s``: those that each chunk takes however short it is. ``doubtful``: something else ran
    while they were measured, and too few requests have corrected them since. Two machines with the same
    ``arithmetic`` compute the same bytes; "" if it is not known.

    If it is not loaded, layers [``part_first``, ``part_last``) of it may be, to help others; (0, 0): none.
    ``load_s``: how long a load of it takes there; 0 if unknown. From ``layers`` to ``any_chunks``: what its
    prefill consists of, as ``engine.protocol.Ready`` has it; ``layers`` is 0 until it was loaded there, and
    where its prefills cannot be shared. ``any_chunks``: ``Arithmetic.chunks`` is "any".
    ``scoring``: "ready" if prompts can be scored with it at once, "unable" if they never can, "unmeasured" or
    "" before that is known. ``kv_budget_bytes``: for keys and values of what is loaded;
    ``prefix_budget_bytes``: for those of earlier prompts in its prefix cache. ``exactness``: the probe's
    verdict, whether drafts can be verified there without changing a byte
    (``engine.protocol.Ready.speculation``). ``sparse``: what is loaded helps with prompts of which tokens are
    left out.
    """

    name: Annotated[str, Meta(min_length=1, max_length=limits.MODEL_NAME_CHARS)]
    digest: Text = ""
    revision: Text | None = None
    source: Text = ""
    roles: Annotated[list[Text], Meta(max_length=16)] = []
    architecture: Text = ""
    weights_bytes: Count = 0
    memory_bytes: Count = 0
    context_tokens: Count = 0
    state: State = "installed"
    prefill_tok_s: Rate = 0.0
    decode_tok_s: Rate = 0.0
    prefill_context_s: Rate = 0.0
    prefill_fixed_s: Rate = 0.0
    doubtful: bool = False
    kv_budget_bytes: Count = 0
    prefix_budget_bytes: Count = 0
    part_first: Layer = 0
    part_last: Layer = 0
    dtype: Text = ""
    arithmetic: Text = ""
    exactness: Text = ""
    sparse: bool = False
    load_s: Rate = 0.0
    layers: Layer = 0
    kv_bytes_per_token: Count = 0
    state_bytes: Count = 0
    window_bytes_per_token: Count = 0
    window_tokens: Count = 0
    hidden_bytes: Count = 0
    hidden_width: Count = 0
    outside_bytes: Count = 0
    any_chunks: bool = False
    scoring: Text = ""

    @property
    def prefix_tokens(self) -> int:
        """About how many tokens of prompts its prefix cache keeps; 0 if unknown."""
        return self.prefix_budget_bytes // self.kv_bytes_per_token if self.kv_bytes_per_token else 0


class MachineFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Facts that hold while a daemon runs. ``chip`` is the part that computes: "Apple M3 Ultra"."""

    platform: Text = ""
    product: Text = ""
    chip: Text = ""
    cores: Count = 0
    memory_bytes: Count = 0
    tier: Text = ""
    accelerator: Text = ""


class Card(msgspec.Struct, frozen=True, omit_defaults=True):
    """One machine at one moment.

    ``usable_bytes``: what is free and a model may take, weights and all, by the machine's settings.
    ``evictable_bytes``: memory of idle loaded models, which may be unloaded for another one. ``load``: the
    operating system's load average over its cores. ``unread_tokens``: of its running requests' prompts, those
    that are not prefilled yet. ``wake``: hardware addresses that Wake on LAN may be sent
    to while it sleeps; none if it is not to be woken.
    """

    node_id: Annotated[str, Meta(min_length=1, max_length=64)]
    epoch: Count
    sequence: Count
    name: Text = ""
    software: Text = ""
    versions: Annotated[dict[Text, Text], Meta(max_length=16)] = {}
    machine: MachineFacts = MachineFacts()
    models: Annotated[list[ModelCard], Meta(max_length=limits.CARD_MODELS)] = []
    available_bytes: Count = 0
    usable_bytes: Count = 0
    evictable_bytes: Count = 0
    running: Count = 0
    waiting: Count = 0
    unread_tokens: Count = 0
    max_streams: Count = 0
    draining: bool = False
    load: Rate = 0.0
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
    bare = msgspec.structs.replace(_fitting(card), machine=_fitting(card.machine), models=[])
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
    """A copy with every text field cut to the bound and made UTF-8 (names of files need not be)."""
    changed = {}
    for name in struct.__struct_fields__:
        if isinstance(text := getattr(struct, name), str):
            fitting = text[: limits.CARD_TEXT_CHARS].encode(errors="replace").decode()
            # msgspec omits a default from the encoding only if it is the same object.
            if fitting != text:
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
