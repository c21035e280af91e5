"""`fleetctl usage`: what was asked of each model, day by day."""

from __future__ import annotations

from typing import Any

import click

from fleetctl.cli import Session, json_option, pass_session
from fleetctl.text import count, table

_HEADER = ("DAY", "MODEL", "REQUESTS", "FAILED", "PROMPT", "CACHED", "ANSWER", "PREFILL", "DECODE")


@click.command("usage")
@click.option("--days", type=click.IntRange(1, 3650), default=7, show_default=True, help="How far back.")
@json_option
@pass_session
def command(session: Session, days: int) -> None:
    """Show tokens and speeds per day and model. Prompts and answers are never recorded."""
    usage = session.client().get(f"/fleet/v1/usage?days={days}")
    session.emit(usage, lambda: render(usage, days))


def render(usage: dict[str, Any], days: int) -> str:
    """The table for people; speeds are tokens computed per second, so cached tokens do not count."""
    rows = usage.get("rows") or []
    if not rows:
        return f"No requests in the last {days} day{'s' if days > 1 else ''}."
    nodes = {row.get("node") for row in rows}
    lines = [_row(row, str(row.get("day")), _model(row, with_node=len(nodes) > 1)) for row in rows]
    lines.append(_row(usage.get("totals") or {}, "total", ""))
    return table(_HEADER, lines, right=range(2, len(_HEADER)))


def _model(row: dict[str, Any], *, with_node: bool) -> str:
    return f"{row.get('model')} @ {row.get('node')}" if with_node else str(row.get("model"))


def _row(row: dict[str, Any], day: str, model: str) -> tuple[str, ...]:
    prompt, cached, answer = (row.get(f"{kind}_tokens") or 0 for kind in ("prompt", "cached", "completion"))
    return (
        day,
        model,
        count(row.get("requests") or 0),
        count(row.get("failed") or 0),
        count(prompt),
        count(cached),
        count(answer),
        _speed(prompt - cached, row.get("prefill_s")),
        _speed(answer, row.get("decode_s")),
    )


def _speed(tokens: int, seconds: float | None) -> str:
    return f"{count(tokens / seconds)} tok/s" if seconds and tokens > 0 else "-"
