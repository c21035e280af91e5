"""Helpers for one prompt and ways to prefill it, as the planner sees them. Data only."""

from __future__ import annotations

from typing import Literal

import msgspec

from fleetd.plan.costs import LinkSpeed, PrefillSpeed
from fleetd.plan.prefill.split import Part, Split, SplitKind
from fleetd.plan.refusals import Code, Refusal

# Ways to prefill a prompt for the machine that answers; with "whole" it computes nothing itself.
Way = Literal["local", SplitKind, "whole"]
# "any" stands for a machine that cannot help in any way.
Kind = Literal[Way, "any"]
# "": the option may be chosen.
OptionCode = Literal["", Code]


NO_LINK = LinkSpeed(0.0)


class HelperSpec(msgspec.Struct, frozen=True):
    """A machine that may compute a part of a prompt. ``link`` leads to the machine that answers.

    ``load_s``: how long loading the model takes, if it is not loaded. ``room_bytes``: for this prompt's keys
    and values, and for the weights if they are not loaded. ``running``: its other requests. ``exact``: its
    bytes equal those of the machine that answers. ``modelled``: ``speed`` comes from the chip's published
    figures. ``doubtful``: as measured, it may be wrong. ``first_token_s``: how long the machine that answers
    decodes the prompt's last token. ``held``: the only layers [first, last) that are loaded; None if all are,
    or none. ``refusal``: why it cannot be asked, whatever it could do.
    """

    node_id: str
    name: str
    speed: PrefillSpeed
    link: LinkSpeed = NO_LINK
    loaded: bool = True
    load_s: float = 0.0
    room_bytes: int = 1 << 62
    running: int = 0
    exact: bool = True
    modelled: bool = False
    doubtful: bool = False
    held: Part | None = None
    refusal: Refusal | None = None
    first_token_s: float = 0.0


class Load(msgspec.Struct, frozen=True):
    """What a helper should load for later prompts: layers [first, last), or all of them for (0, 0)."""

    node_id: str
    first: int = 0
    last: int = 0


class PrefillOption(msgspec.Struct, frozen=True):
    """A way to prefill the prompt.

    ``helpers`` are in the order of the chain, and ``names`` are their names. ``split`` is None for "local",
    and if the option has no price (``predicted_s`` 0). ``steps`` add up to ``predicted_s``, the time from now
    to the first token. An option may be chosen if ``code`` is ""; otherwise ``code`` and ``reason`` say why
    not. ``cold``: what helpers would have to load first, which takes ``load_s`` of ``predicted_s``.
    """

    kind: Kind
    helpers: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    split: Split | None = None
    predicted_s: float = 0.0
    steps: tuple[tuple[str, float], ...] = ()
    code: OptionCode = ""
    reason: str = ""
    exact: bool = True
    modelled: bool = False
    doubtful: bool = False
    cold: tuple[Load, ...] = ()
    load_s: float = 0.0

    @property
    def priced(self) -> bool:
        return self.kind == "local" or self.split is not None


class PlanChoice(msgspec.Struct, frozen=True):
    """``rejected``: all other options with their reasons, cheapest first. ``warm``: what helpers should load
    now, because the next such prompt would then be clearly faster."""

    best: PrefillOption
    rejected: tuple[PrefillOption, ...]
    warm: tuple[Load, ...] = ()
