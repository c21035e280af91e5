"""`fleetctl usage`: tokens and speeds per day and model."""

from __future__ import annotations

import click

from fleetctl.cli import CliSession, json_option, pass_session
from fleetctl.connection.replies import read
from fleetctl.render.columns import Column, drawn, fitted, terminal_width
from fleetctl.render.text import brief, count
from fleetd.control.usage_report import UsageReport, UsageRow, UsageTotals

# Each with its worth: without room, the column of the least goes first.
_HEADER = {
    "DAY": 9,
    "MODEL": 9,
    "REQUESTS": 9,
    "FAILED": 4,
    "PROMPT": 6,
    "CACHED": 5,
    "ANSWER": 6,
    "PREFILL": 7,
    "DECODE": 7,
    "SCORED": 1,
    "FIRST": 8,
    "SAVED": 8,
}


@click.command("usage")
@click.option(
    "--days", type=click.IntRange(1, 3650), metavar="N", default=7, show_default=True, help="How far back."
)
@json_option
@pass_session
def command(session: CliSession, days: int) -> None:
    """Show tokens and speeds per day and model. Prompts and answers are never recorded.

    SCORED counts prompt tokens that a model scored for smart prefill; scoring is not one of the REQUESTS.
    FIRST is the mean time from a request to its first token. SAVED is what other machines and drafts saved,
    as estimated.
    """
    usage = session.client().get(f"/fleet/v1/usage?days={days}")
    session.emit(usage, lambda: render(read(usage, UsageReport), days, terminal_width()))


def render(usage: UsageReport, days: int, width: int | None) -> str:
    """The whole table; speeds are tokens computed per second, so cached tokens do not count."""
    if not usage.rows:
        return f"No requests in the last {days} day{'s' if days > 1 else ''}."
    with_node = len({row.node for row in usage.rows}) > 1
    lines = [_cells(row.day, _model(row, with_node=with_node), row) for row in usage.rows]
    lines.append(_cells("total", "", usage.totals))
    by_column = zip(_HEADER.items(), zip(*lines, strict=True), strict=True)
    columns = [
        Column(name, [*cells], keep, right=at > 1) for at, ((name, keep), cells) in enumerate(by_column)
    ]
    return "\n".join(drawn(fitted(columns, width)))


def _model(row: UsageRow, *, with_node: bool) -> str:
    return f"{row.model} @ {row.node}" if with_node else row.model


def _cells(day: str, model: str, used: UsageTotals) -> tuple[str, ...]:
    return (
        day,
        model,
        count(used.requests),
        count(used.failed),
        count(used.prompt_tokens),
        count(used.cached_tokens),
        count(used.completion_tokens),
        _speed(used.prompt_tokens - used.cached_tokens, used.prefill_s),
        _speed(used.completion_tokens, used.decode_s),
        count(used.scored_tokens) if used.scored_tokens else "-",
        brief(used.first_s / used.first_tokens) if used.first_tokens else "-",
        _signed(used.saved_s) if used.saved_s else "-",
    )


def _speed(tokens: int, seconds: float) -> str:
    return f"{count(tokens / seconds)} tok/s" if seconds and tokens > 0 else "-"


def _signed(seconds: float) -> str:
    return f"-{brief(-seconds)}" if seconds < 0 else brief(seconds)
