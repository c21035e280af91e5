"""Helpers for one prompt and ways to prefill it, as the planner sees them. Data only."""

from __future__ import annotations

from typing import Literal

import msgspec

from fleetd.control.model_facts import WireBits
from fleetd.plan.costs import LinkSpeed, PrefillSpeed
from fleetd.plan.prefill.split import Part, Split, SplitKind
from fleetd.plan.refusals import Code, Refusal

# Ways to prefill a prompt for the machine that answers. With "whole", that machine computes nothing.
Way = Literal["local", SplitKind, "whole"]
# "any" stands for a machine that cannot help in any way.
Kind = Literal[Way, "any"]
# "": the option may be chosen.
OptionCode = Literal["", Code]


NO_LINK = LinkSpeed(0.0)


class HelperSpec(msgspec.Struct, frozen=True):
    """A machine that may compute a part of a prompt, or the machine that answers."""

    node_id: str
    name: str
    speed: PrefillSpeed
    # The link to the machine that answers.
    link: LinkSpeed = NO_LINK
    # The machine has loaded the model, or the layers that are ``held``.
    loaded: bool = True
    # Seconds that loading the model would take.
    load_s: float = 0.0
    # Bytes for this prompt's keys and values, and for the weights if they are not loaded.
    room_bytes: int = 1 << 62
    # The number of the machine's other requests.
    running: int = 0
    # The machine computes the same bytes as the machine that answers.
    exact: bool = True
    # It can send keys and values in ``WIRE_BITS``.
    narrows: bool = False
    # ``speed`` comes from the chip's published figures.
    modelled: bool = False
    # ``speed`` was measured, but may be wrong.
    doubtful: bool = False
    # The only layers [first, last) that are loaded; None if all are, or none.
    held: Part | None = None
    # Why the machine cannot be asked, whatever it could do.
    refusal: Refusal | None = None
    # Seconds in which the machine that answers decodes the prompt's last token.
    first_token_s: float = 0.0


class Load(msgspec.Struct, frozen=True):
    """What a helper should load for later prompts: layers [first, last), or all of them for (0, 0)."""

    node_id: str
    first: int = 0
    last: int = 0


class PrefillOption(msgspec.Struct, frozen=True):
    """A way to prefill the prompt, with its price or the reason against it."""

    kind: Kind
    # The node ids of the helpers in the order of the chain, and their names.
    helpers: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    # None for "local", and if the option has no price.
    split: Split | None = None
    # Seconds from now to the first token; 0 without a price.
    predicted_s: float = 0.0
    # Names and seconds, which add up to ``predicted_s``.
    steps: tuple[tuple[str, float], ...] = ()
    # Why the option may not be chosen, and the same as a sentence. Both are "" if it may be.
    code: OptionCode = ""
    reason: str = ""
    # The result has the bytes that the machine which answers would compute.
    exact: bool = True
    # In how many bits helpers send keys and values; 0 is as they are held.
    wire_bits: WireBits = 0
    # Some machine's speed comes from published figures, or may be wrong.
    modelled: bool = False
    doubtful: bool = False
    # What helpers would have to load first, and the seconds of ``predicted_s`` that this takes.
    cold: tuple[Load, ...] = ()
    load_s: float = 0.0

    @property
    def priced(self) -> bool:
        return self.kind == "local" or self.split is not None


class PlanChoice(msgspec.Struct, frozen=True):
    """The option that was chosen, and what became of the others.

    ``rejected``: all other options with their reasons, cheapest first. ``warm``: what helpers should load
    now, because the next such prompt would then be clearly faster.
    """

    best: PrefillOption
    rejected: tuple[PrefillOption, ...]
    warm: tuple[Load, ...] = ()
