"""`fleetctl compress`: shows what smart prefill would keep of a text, without asking the model."""

from __future__ import annotations

import sys
from typing import Any

import click

from fleetctl import completion
from fleetctl.cli import CliSession, json_option, note, pass_session
from fleetctl.connection.replies import read
from fleetctl.render.kept_text import page, summary
from fleetctl.text_files import read_text
from fleetd import limits
from fleetd.control.compression_reply import Compression


@click.command("compress")
@click.argument("file")
@click.option("-q", "--question", metavar="TEXT", help="What the text is read for, if that is not in it.")
@click.option("--without-question", is_flag=True, help="Choose by the text alone, whatever asks in it.")
@click.option(
    "-r",
    "--ratio",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="SHARE",
    help="Keep this share of the tokens (default: as many as the scores call for).",
)
@click.option(
    "-m",
    "--model",
    metavar="NAME",
    help="The compressor, if not the smallest suitable one.",
    shell_complete=completion.models,
)
@click.option("--min-keep", type=click.IntRange(min=0), metavar="N", help="Keep at least so many tokens.")
@click.option("--max-keep", type=click.IntRange(min=1), metavar="N", help="Keep at most so many tokens.")
@click.option("--break-lines", is_flag=True, help="Leave out parts of paragraphs and statements as well.")
@click.option("--local-only", is_flag=True, help="No other machine sees the text.")
@json_option
@pass_session
def command(
    session: CliSession,
    file: str,
    question: str | None,
    without_question: bool,
    ratio: float | None,
    model: str | None,
    min_keep: int | None,
    max_keep: int | None,
    break_lines: bool,
    local_only: bool,
) -> None:
    """Show what smart prefill keeps of the text in FILE (- is stdin).

    On a terminal all of it is shown, what is left out struck through. A pipe or a file gets the compressed
    text, as a model would read it.
    """
    text = read_text(file)
    if not text.strip():
        raise click.UsageError("The text is empty.")
    body: dict[str, Any] = {
        "prompt": text,
        "question": question,
        "without_question": without_question or None,
        "target_ratio": ratio,
        "compressor_model": model,
        "min_keep_tokens": min_keep,
        "max_keep_tokens": max_keep,
        "preserve_boundaries": False if break_lines else None,
        "local_only": local_only or None,
    }
    given = {name: value for name, value in body.items() if value is not None}
    answer = session.client().post("/v1/compress", given, timeout_s=limits.CLIENT_LONG_CALL_S)
    found = read(answer, Compression)
    if session.json:
        session.emit(answer, "")
        return
    if sys.stdout.isatty():
        click.echo(page(_unmarked(text), found))
    else:
        sys.stdout.write(found.prompt or "")
        sys.stdout.flush()
    note(click.style(summary(found, asked=question is not None), dim=True))


def _unmarked(text: str) -> str:
    """The text without the user's own marks, which the spans do not count."""
    from fleetd.compression.document import unmark

    return unmark(text)[0]
