"""The bodies of POST /fleet/v1/plan: a question about a prompt, and the ways to answer it.

Times are seconds. Machines have their names; "this" is the one that answers.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.control.group_view import GroupView
from fleetd.control.smart_prefill_result import Form

_Text = Annotated[str, Meta(max_length=limits.CONTROL_TEXT_CHARS)]
_Tokens = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class PlanQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt's length in tokens, or a text whose tokens are estimated.

    ``cached``: of these, tokens that this machine holds already. ``smart``: as if smart prefill were asked
    for, with this share of the tokens or, 0, as many as scores usually call for.
    """

    model: _Text = ""
    tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    text: str | None = None
    cached: _Tokens = 0
    smart: Annotated[float, Meta(ge=0, le=1)] | None = None
    # The machines that are to hold the model, "this" first; none leaves it to the planner.
    placement: Annotated[list[_Text], Meta(max_length=limits.PLACEMENT_MACHINES)] = []


class AddedQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /fleet/v1/plan/added: what another machine would give."""

    model: _Text = ""
    # One of ``KnownMachines``; "": this fleet as it is.
    machine: _Text = ""
    # How the machine would be connected to this one.
    link: Literal["wired", "wifi", "thunderbolt"] = "wired"


class AddedPoint(msgspec.Struct, frozen=True):
    """Modelled seconds to the first token of a prompt, with the model loaded and no other request."""

    tokens: int = 0
    # On this machine alone.
    alone_s: float = 0.0
    # With the machines of the fleet as it is.
    fleet_s: float = 0.0
    # With the added machine too; None if the question names none.
    added_s: float | None = None
    # The best way with all machines: its kind, and their names in the order of the chain.
    kind: str = ""
    nodes: list[str] = []


class AddedView(msgspec.Struct, frozen=True):
    """The answer, by prices of the planner: nothing of it was measured on the added machine."""

    model: str = ""
    machine: str = ""
    link: str = ""
    # How many of the model's layers the added machine has room for, of how many; (0, 0) without a machine.
    layers_held: int = 0
    layers: int = 0
    # This machine's own speed comes from its chip's published figures, too.
    modelled_here: bool = False
    # Why this machine's measured speed may be wrong, as a part of a sentence; "" if it can be believed.
    doubt: str = ""
    points: list[AddedPoint] = []


class KnownMachines(msgspec.Struct, frozen=True):
    """The body of GET /fleet/v1/plan/machines: the machines that can be added in thought."""

    machines: list[str] = []


class StepView(msgspec.Struct, frozen=True, omit_defaults=True):
    """A step as predicted or as measured. ``machine``: where it ran, "" if it belongs to no single one."""

    name: str
    seconds: float
    n_bytes: int = 0
    machine: str = ""


class OptionView(msgspec.Struct, frozen=True):
    """One way to answer a prompt, possible or not."""

    # local, a kind of split, whole, remote, group, smart, or "any" for a machine that cannot help at all.
    kind: str = ""
    # Helpers in the order of the chain, then "this". Of "remote": the machine that answers, then its helpers.
    nodes: list[str] = []
    # Seconds to the first token; None if the way is impossible, or not priced, as a group is.
    predicted_s: float | None = None
    steps: list[StepView] = []
    chosen: bool = False
    # Why it was not chosen, as a code and as a sentence; both "" for the chosen one.
    code: str = ""
    reason: str = ""
    # Tokens or layers, as in ``plan.prefill.split.Split``; of a group, the layers at which its model is cut.
    cuts: list[int] = []
    # Tokens that a turn computes.
    chunk: int = 0
    # Of remote: how that machine prefills. Of smart: the way to answer what is kept.
    prefill: str = ""
    # Tokens of the prompt that the machine which answers probably does not compute …
    cached_tokens: int = 0
    # … of these, tokens that come from its disk, …
    restored_tokens: int = 0
    # … and tokens that the machine ``fetched_from`` sends.
    fetched_tokens: int = 0
    fetched_from: str = ""
    # In how many bits helpers send keys and values; 0 is as they are held.
    wire_bits: int = 0
    # Of smart: the form in which the shortened prompt is read.
    form: Form = ""


class DraftsView(msgspec.Struct, frozen=True, omit_defaults=True):
    """How this machine would draft for the answer, if it decodes the answer alone and reads the prompt whole.

    ``sources``: of drafts, preferred ones first; if there are none, ``reason`` says why. ``width``: most
    tokens of one pass; an answer's acceptance and the cost of passes may leave fewer. ``verdict``: of the
    probe. ``draft_model`` drafts on the first of the machines ``drafters`` that can; ``no_room`` says why not
    on this one, if it does not fit beside what is loaded.
    """

    verdict: str
    sources: list[str] = []
    width: int = 1
    draft_model: str = ""
    drafters: list[str] = []
    reason: str = ""
    no_room: str = ""


class PlanView(msgspec.Struct, frozen=True):
    """The answer: the chosen option first, then the others, cheapest first.

    ``capped``: sentences about speeds that other machines claim and that are not believed.
    """

    model: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    options: list[OptionView] = []
    drafts: DraftsView | None = None
    capped: list[str] = []
    # How machines hold the model together; None if one holds it alone.
    group: GroupView | None = None
