"""Machines that may help with a prompt, and ways to prefill it, as the planner sees them. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fleetd.plan.costs import LinkSpeed, PrefillSpeed
from fleetd.plan.prefill.search import Part
from fleetd.plan.prefill.split import Split

# Ways to prefill a prompt on the machine that answers.
Way = Literal["local", "layers", "tokens", "whole"]
# "any" stands for a machine that cannot help in any way.
Kind = Literal[Way, "any"]
Code = Literal[
    "",
    # what the prompt is
    "unshareable",
    "short",
    # what the machine is, or does
    "private",
    "unusable",
    "other_files",
    "dtype",
    "sparse",
    "draining",
    "failed",
    "busy",
    "cold",
    "no_room",
    "part",
    "slow_link",
    # what comes out
    "slower",
    "margin",
    "unmeasured",
    "kept",
]


@dataclass(frozen=True, slots=True)
class Refusal:
    code: Code
    sentence: str


@dataclass(frozen=True, slots=True)
class HelperSpec:
    """A machine as the planner sees it; ``link`` leads to the one that answers, and is None for itself.

    ``load_s``: until the model would be loaded, where it is not. ``room_bytes``: for this prompt's keys and
    values, and for the weights where they are not loaded. ``running``: what else computes there. ``exact``:
    its bytes would be those of the machine that answers. ``modelled``: nobody measured ``speed``.
    ``sparse``: it helps with prompts of which tokens are left out.
    ``first_token_s``: of the machine that answers, what the prompt's last token takes, which it decodes.
    ``held``: the only layers [first, last) that are loaded; None where all are, or none. ``refusal``: why it
    is out, whatever it could do.
    """

    node_id: str
    name: str
    speed: PrefillSpeed
    link: LinkSpeed | None = None
    loaded: bool = True
    load_s: float = 0.0
    room_bytes: int = 1 << 62
    running: int = 0
    exact: bool = True
    modelled: bool = False
    held: Part | None = None
    refusal: Refusal | None = None
    first_token_s: float = 0.0
    sparse: bool = True


@dataclass(frozen=True, slots=True)
class Load:
    """What a machine should load to be a better helper: layers [first, last), or all of them for (0, 0)."""

    node_id: str
    first: int = 0
    last: int = 0


@dataclass(frozen=True, slots=True)
class PrefillOption:
    """A way to prefill the prompt.

    ``helpers`` in the order of the chain, ``names`` theirs. ``split`` is None for local, and where nothing
    was priced (``predicted_s`` 0). ``steps`` add up to ``predicted_s``: from now to the first token.
    ``code`` "" may be chosen; any other says why not, and ``reason`` says it in a sentence. ``cold``: what
    helpers would have to load first, which takes ``load_s`` of ``predicted_s``.
    """

    kind: Kind
    helpers: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    split: Split | None = None
    predicted_s: float = 0.0
    steps: tuple[tuple[str, float], ...] = ()
    code: Code = ""
    reason: str = ""
    exact: bool = True
    modelled: bool = False
    cold: tuple[Load, ...] = ()
    load_s: float = 0.0

    @property
    def priced(self) -> bool:
        return self.kind == "local" or self.split is not None


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """``rejected``: all others, with reasons, cheapest first. ``warm``: what helpers should load now, because
    with it the next such prompt would be clearly faster."""

    best: PrefillOption
    rejected: tuple[PrefillOption, ...]
    warm: tuple[Load, ...] = ()


_SENTENCES: dict[Code, str] = {
    "private": "{name} may not see prompts.",
    "other_files": "{name} has no model with these files.",
    "dtype": "{name} computes in another precision.",
    "sparse": "{name} helps with whole prompts only.",
    "draining": "{name} is stopping.",
    "failed": "{name} failed to help a short while ago.",
    "unusable": "{name} cannot be reached.",
}


def refusal(code: Code, name: str) -> Refusal:
    """What the caller knows of a machine, in the planner's words."""
    return Refusal(code, _SENTENCES[code].format(name=name))
