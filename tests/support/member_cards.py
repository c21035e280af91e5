"""Machines as the placement of jobs sees them: their cards, what they answer, and what comes of a job."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from msgspec.structs import replace
from nested_fields import changed

from fleetd.control.model_facts import MeasuredSpeed, ModelShape
from fleetd.limits import GIB
from fleetd.p2p.membership.cards import Card, MachineFacts, ModelCard
from fleetd.requests.members.members import Member
from fleetd.requests.remote import messages

FACTS = MachineFacts(tier="standard", chip="cpu", cores=8, memory_bytes=64 * GIB, accelerator="cpu")
MODEL = ModelCard(
    "big",
    digest="d",
    roles=["chat"],
    state="loaded",
    memory_bytes=GIB,
    shape=ModelShape(weights_bytes=GIB),
    speed=MeasuredSpeed(prefill_tok_s=100.0, decode_tok_s=10.0),
)


def machine(name: str, *, faster: float = 1.0, sees: bool = True, reach: str = "", **model: Any) -> Member:
    found = changed(MODEL, **model)
    speed = found.speed
    speed = replace(
        speed, prefill_tok_s=faster * speed.prefill_tok_s, decode_tok_s=faster * speed.decode_tok_s
    )
    card = Card(
        name,
        1,
        1,
        name=name,
        machine=FACTS,
        models=[replace(found, speed=speed)],
        available_bytes=32 * GIB,
        usable_bytes=32 * GIB,
    )
    return Member(card, name, reach, sees, 0.001)


OWN = Card(
    "me", 1, 1, name="me", machine=FACTS, available_bytes=8 * GIB, usable_bytes=8 * GIB, max_streams=16
)


def spoken(*events: Any) -> list[bytes]:
    return [messages.encode(event) for event in events]


async def collect(events: AsyncGenerator[Any, None]) -> list[Any]:
    async with aclosing(events):
        return [event async for event in events]
