"""Machines that hold one model together: who has which layers, how fast that is, and why. Pure."""

from __future__ import annotations

from fleetctl.render.columns import Column, drawn, fitted
from fleetctl.render.text import brief, count, layers, one_line, size, wrapped
from fleetd.control.group_view import GroupView


def group_lines(group: GroupView, width: int | None) -> list[str]:
    """The lines of the table, and the sentences below it."""
    if not group.parts:
        return [wrapped(one_line(group.why), width)]
    parts = group.parts
    columns = [
        Column("MACHINE", [one_line(part.machine) for part in parts], 9),
        Column("LAYERS", [layers(part.first, part.last).partition(" ")[2] for part in parts], 9),
        Column("WEIGHTS", [size(part.weights_bytes) for part in parts], 8, right=True),
        Column("ROOM FOR TOKENS", [count(part.kv_tokens) for part in parts], 7, right=True),
        Column("PER TOKEN", [brief(part.step_s) for part in parts], 5, right=True),
        Column("LINK", [brief(part.hop_s) if part.hop_s else "-" for part in parts], 4, right=True),
    ]
    held = "hold" if group.loaded else "would hold"
    source = "measured" if group.loaded else "modelled"
    prompt = f" They read {count(round(group.prompt_tok_s))} tokens of a prompt per second."
    facts = (
        f"{len(parts)} machines {held} its {count(group.layers)} layers: about {group.tok_s:.1f} tokens per "
        f"second for one answer ({source}), with room for {count(group.tokens)} tokens."
        f"{prompt if group.prompt_tok_s else ''}"
    )
    return [
        *drawn(fitted(columns, width)),
        wrapped(facts, width),
        wrapped(one_line(group.why), width),
        *_divided(group, width),
    ]


def _divided(group: GroupView, width: int | None) -> list[str]:
    """The same machines with a part of every layer each, beside that: a table, and why."""
    if (divided := group.divided) is None:
        return []
    rows = [("layers", group.tok_s, not divided.chosen), ("tensors", divided.tok_s, divided.chosen)]
    columns = [
        Column("", ["*" if chosen else "" for _, _, chosen in rows], 1),
        Column("SPLIT", [name for name, _, _ in rows], 7),
        Column("TOK/S", [f"{tok_s:.1f}" if tok_s else "-" for _, tok_s, _ in rows], 5, right=True),
        Column("SUMS", ["-", count(divided.sums) if divided.sums else "-"], 4, right=True),
        Column("PER SUM", ["-", brief(divided.sum_s) if divided.sum_s else "-"], 7, right=True),
    ]
    return ["", *drawn(fitted(columns, width)), wrapped(one_line(divided.why), width)]
