"""What one more machine would give, as a page. Pure."""

from __future__ import annotations

from fleetctl.render.columns import Column, drawn, fitted
from fleetctl.render.plan_words import THIS
from fleetctl.render.text import brief, clause, count, one_line, wrapped
from fleetd.control.prefill_plan import AddedPoint, AddedView

_LINKS = {"wired": "gigabit Ethernet", "wifi": "Wi-Fi", "thunderbolt": "Thunderbolt"}


def added_page(view: AddedView, width: int | None) -> str:
    """The whole page; ``width`` None is for files and pipes."""
    machine = one_line(view.machine)
    parts = [
        wrapped(
            f"{one_line(view.model)} with {machine} over {_LINKS.get(view.link, one_line(view.link))}: "
            "modelled times to the first token",
            width,
        )
    ]
    columns = [
        Column("PROMPT", [count(point.tokens) for point in view.points], 9, right=True),
        Column("ALONE", [brief(point.alone_s) for point in view.points], 9, right=True),
        Column("FLEET NOW", [brief(point.fleet_s) for point in view.points], 7, right=True),
        Column("WITH IT", [brief(point.added_s) for point in view.points], 9, right=True),
        Column("GAIN", [_gain(point) for point in view.points], 8, right=True),
        Column("HOW", [_how(point) for point in view.points], 5),
    ]
    if all(point.fleet_s == point.alone_s for point in view.points):
        del columns[2]  # there is no other machine, or it helps with no prompt
    parts.append("\n".join(drawn(fitted(columns, width))))
    parts += [wrapped(line, width) for line in _remarks(view)]
    return "\n\n".join(parts)


def _remarks(view: AddedView) -> list[str]:
    machine, here = one_line(view.machine), "this machine's speed as measured"
    if view.modelled_here:
        here = "this machine's speed modelled too, as the model has not been measured here"
    lines = [
        f"Modelled: by the published figures of {machine}, {here}, the model loaded everywhere, and no other "
        "request. Real machines and networks differ."
    ]
    if view.doubt:
        lines.append(f"This machine's speed is in doubt: {clause(view.doubt)}.")
    if view.layers_held < view.layers:
        room = f"{view.layers_held} of {view.layers} layers" if view.layers_held else "no layer"
        lines.append(
            f"{machine} has room for {room} of {one_line(view.model)}: it can help with prompts, and cannot "
            "answer alone."
            if view.layers_held
            else f"{machine} has room for {room} of {one_line(view.model)}: it cannot help."
        )
    return lines


def _gain(point: AddedPoint) -> str:
    """Against the fleet as it is."""
    if not point.added_s:
        return "-"
    times = point.fleet_s / point.added_s
    return f"{times:.2f}x" if times < 9.995 else f"{times:.0f}x"


def _how(point: AddedPoint) -> str:
    others = [one_line(node) for node in point.nodes if node != THIS]
    kind = one_line(point.kind)
    if kind in ("whole", "remote"):
        return f"all on {others[0]}" if others else kind
    return f"{kind} shared with {' and '.join(others)}" if others else "alone"
