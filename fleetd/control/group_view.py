"""How several machines hold one model together: part of the answer to POST /fleet/v1/plan."""

from __future__ import annotations

import msgspec


class GroupPartView(msgspec.Struct, frozen=True):
    """Layers [``first``, ``last``) of a model on one machine."""

    # Its name; "this" is the machine that answers, which also holds the embedding and the head.
    machine: str = ""
    first: int = 0
    last: int = 0
    # Bytes of memory that its weights take there.
    weights_bytes: int = 0
    # Tokens whose keys and values have room beside the weights.
    kv_tokens: int = 0
    # Seconds that its layers take for one token of an answer, modelled.
    step_s: float = 0.0
    # Seconds that a token's hidden state travels to it, and from the last machine back, too; 0 for "this".
    hop_s: float = 0.0
    # It has no file of the model, and fetches its layers before it loads them: from "this", or from the hub
    # if that has the model in part only.
    fetches: bool = False


class DividedView(msgspec.Struct, frozen=True):
    """The same machines with a part of every layer each, instead of some of the layers."""

    # Tokens of one answer per second, modelled or measured as that of the group; 0 if it cannot be done.
    tok_s: float = 0.0
    # Seconds of a token in the weights of the slowest machine.
    weights_s: float = 0.0
    # Sums over all machines that a token waits for, and seconds of each.
    sums: int = 0
    sum_s: float = 0.0
    # ``sum_s`` was measured by these machines; else it comes from the links.
    measured: bool = False
    # A load over these machines divides the layers if it is not told how.
    chosen: bool = False
    # Why it would, or why not: sentences.
    why: str = ""


class GroupView(msgspec.Struct, frozen=True):
    """The parts in the order of their layers, or what is missing."""

    parts: list[GroupPartView] = []
    # Of the model.
    layers: int = 0
    # Tokens whose keys and values have room on every machine.
    tokens: int = 0
    # Tokens of one answer per second: measured once it is loaded; before, by the machines' figures and the
    # measured links. 0 without parts.
    tok_s: float = 0.0
    # Tokens of a prompt per second, measured; 0 before it is loaded.
    prompt_tok_s: float = 0.0
    # Why it is cut so, or what is missing: sentences.
    why: str = ""
    # The group is loaded now.
    loaded: bool = False
    # What it would be like if the machines divided every layer; None if that was not looked at.
    divided: DividedView | None = None
