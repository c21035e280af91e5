"""A table of the fleet, fitted to a width: the least important columns are dropped first. Pure.

The lines below a machine that cannot be used say why, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Sequence

import click

from fleetctl.render.columns import Column, drawn, fitted, shortened, total
from fleetctl.render.fleet_words import OFF, crowd_of, label_of, newcomer, removal, state_word, summary
from fleetctl.render.text import layers, one_line, size, wrapped
from fleetd.control.fleet_view import FleetView, PeerModel, PeerView

_COLOURS = {"usable": "green", "connecting": "yellow", "quiet": "yellow", "draining": "yellow"}
_NAME_CHARS = 18


def render(fleet: FleetView, width: int | None) -> str:
    """The whole page; ``width`` None is for files and pipes, where nothing is cut."""
    if not fleet.enabled:
        return f"The fleet is {OFF}: this machine works alone."
    parts = [wrapped(_summary(fleet), width)]
    if fleet.removed_by:
        parts.append(click.style(wrapped(removal(fleet.removed_by), width), fg="yellow"))
    if fleet.peers:
        parts.append(
            "\n".join(_rows(sorted(fleet.peers, key=lambda p: (p.name.casefold(), p.node_id)), width))
        )
    else:
        alone = "Pair one: `fleetctl pair` here, then `fleetctl join CODE` there."
        parts.append(f"No other machine is paired with this one.\n{wrapped(alone, width)}")
    if fleet.late:
        parts.append(click.style(wrapped(crowd_of(fleet.late), width), fg="yellow"))
    for configured in fleet.unanswered:
        text = f"{one_line(configured.address)}, named in the settings: {configured.reason} {configured.hint}"
        parts.append(wrapped(one_line(text).strip(), width))
    if fleet.neighbours:
        parts.append(_neighbours(fleet, width))
    return "\n\n".join(parts)


def _summary(fleet: FleetView) -> str:
    return summary(
        label_of(fleet),
        port=fleet.port,
        usable=sum(peer.usable for peer in fleet.peers),
        peers=len(fleet.peers),
        mdns=fleet.mdns,
        local_only=fleet.local_only,
        pairing=fleet.pairing,
    )


def _neighbours(fleet: FleetView, width: int | None) -> str:
    lines = []
    if shown := [label_of(neighbour) for neighbour in fleet.neighbours if neighbour.pairing]:
        lines.append(f"Showing a code: {', '.join(shown)}. Join with `fleetctl join CODE` here.")
    if others := [label_of(neighbour) for neighbour in fleet.neighbours if not neighbour.pairing]:
        what = f"Seen on this network, not paired: {', '.join(others)}."
        lines.append(f"{what} Pair with `fleetctl pair` here, then `fleetctl join CODE` there.")
    return "\n".join(wrapped(line, width) for line in lines)


def _rows(peers: Sequence[PeerView], width: int | None) -> list[str]:
    columns = _columns(peers, cut=width is not None)
    beside = width is None or total(columns) <= width
    if not beside:
        # Models then stand on a line of their own, below their machine.
        columns = fitted(columns[:-1], width)
    header, *rows = drawn(columns)
    at = header.index("STATE")
    lines = [header]
    for peer, row in zip(peers, rows, strict=True):
        end = at + len(one_line(state_word(peer.state)))
        lines.append(row[:at] + click.style(row[at:end], fg=_COLOURS.get(peer.state, "red")) + row[end:])
        if not beside and peer.models:
            lines.append("  " + _models(peer.models, (width or 0) - 2))
        lines += _why(peer, width)
    legend = []
    if any(peer.usable and (peer.running or peer.waiting) for peer in peers):
        legend.append("LOAD: running+waiting")
    if any(peer.usable and peer.vectors for peer in peers):
        legend.append("vectors: computes vectors or scores of texts")
    if any(model.state == "loaded" for peer in peers for model in peer.models):
        legend.append("* loaded")
    if any(peer.link_doubtful or any(model.speed.doubtful for model in peer.models) for peer in peers):
        legend.append("~ measured beside other work")
    if any(model.capped for peer in peers for model in peer.models):
        legend.append("! claims speeds that its hardware cannot have; they are not believed")
    return [*lines, click.style(" · ".join(legend), dim=True)] if legend else lines


def _columns(peers: Sequence[PeerView], *, cut: bool) -> list[Column]:
    names = [one_line(peer.name) for peer in peers]
    # Where two machines have one name, only the id tells which is meant.
    ambiguous = len(set(names)) < len(names)
    return [
        Column("NAME", [shortened(name, _NAME_CHARS) if cut else name for name in names], 9),
        Column("STATE", [one_line(state_word(peer.state)) for peer in peers], 9),
        Column("ID", [one_line(peer.short_id) for peer in peers], 8 if ambiguous else 2),
        Column("TIER", [one_line(peer.tier) or "-" for peer in peers], 3),
        Column("FREE/MEMORY", [_memory(peer) for peer in peers], 6, right=True),
        Column("LOAD", [_load(peer) for peer in peers], 7, right=True),
        Column("RTT", [_rtt(peer) for peer in peers], 5, right=True),
        Column("BANDWIDTH", [_bandwidth(peer) for peer in peers], 1, right=True),
        Column("PROMPTS", [_prompts(peer) for peer in peers], 4),
        Column("MODELS", [_known_models(peer) for peer in peers], 8),
    ]


def _known_models(peer: PeerView) -> str:
    """All of a machine's models; "?" if it could not tell of any."""
    return _models(peer.models, None) if peer.models or peer.usable else "?"


def _models(models: Sequence[PeerModel], room: int | None) -> str:
    """Names of models, loaded ones first and marked; those beyond ``room`` are counted."""
    ranked = sorted(models, key=lambda model: (model.state != "loaded", model.state != "loading"))
    names = [_model(model, model.name) for model in ranked]
    full = ", ".join(names) or "-"
    if room is None or len(full) <= room:
        return full
    # Before the slash is the publisher of a model, after it the model itself.
    names = [_model(model, model.name.rpartition("/")[2]) for model in ranked]
    for shown in range(len(names), 0, -1):
        rest = f", +{len(names) - shown}" if shown < len(names) else ""
        text = ", ".join(names[:shown]) + rest
        if len(text) <= room:
            return text
    rest = f", +{len(names) - 1}" if len(names) > 1 else ""
    return shortened(names[0], max(2, room - len(rest))) + rest


def _model(model: PeerModel, name: str) -> str:
    mark = {"loaded": "*", "loading": " (loading)"}.get(model.state, "")
    if model.part_last and not mark:
        total = f" of {model.part_total}" if model.part_total else ""
        asked_by = f", for {one_line(model.part_asked_by)}" if model.part_asked_by else ""
        mark = f" ({layers(model.part_first, model.part_last)}{total}{asked_by})"
    return one_line(name) + mark + ("~" if model.speed.doubtful else "") + ("!" if model.capped else "")


def _why(peer: PeerView, width: int | None) -> list[str]:
    lines = []
    if peer.new:
        what, fix = newcomer(peer.name, peer.short_id, peer.through)
        lines += [wrapped(what, width, indent="  "), wrapped(f"→ {fix}", width, indent="  ")]
    if peer.usable:
        return lines
    if peer.reason:
        lines.append(wrapped(one_line(peer.reason), width, indent="  "))
    if peer.hint:
        lines.append(wrapped(f"→ {one_line(peer.hint)}", width, indent="  "))
    return lines


def _memory(peer: PeerView) -> str:
    if not peer.memory_bytes:
        return "-"
    free, total = size(peer.available_bytes) if peer.usable else "-", size(peer.memory_bytes)
    unit = total.rpartition(" ")[2]
    return f"{free.removesuffix(f' {unit}')}/{total}"


def _prompts(peer: PeerView) -> str:
    """Whether it sees prompts typed here, or who does not allow it: this machine, the fleet, or both."""
    if peer.sees_prompts:
        return "yes"
    if peer.new:
        return "not yet"
    if peer.allowed_by_fleet:
        return "not from here"
    return "no (fleet)" if peer.allowed_here else "no (both)"


def _load(peer: PeerView) -> str:
    if not peer.usable:
        return "-"
    load = [f"{peer.running}+{peer.waiting}"] if peer.running or peer.waiting else []
    return ", ".join([*load, "vectors"] if peer.vectors else load) or "idle"


def _rtt(peer: PeerView) -> str:
    if peer.rtt_ms is None:
        return "-"
    return f"{peer.rtt_ms:.{2 if peer.rtt_ms < 9.995 else 0}f} ms"


def _bandwidth(peer: PeerView) -> str:
    if peer.bytes_per_s is None:
        return "-"
    return f"{'~' if peer.link_doubtful else ''}{size(peer.bytes_per_s)}/s"
