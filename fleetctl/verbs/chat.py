"""`fleetctl chat`: one question from the arguments or stdin, or a conversation on a terminal."""

from __future__ import annotations

import os
import select
import stat
import sys
from typing import Any

import click

from fleetctl import completion
from fleetctl.chat.answer import Options, ask, closing
from fleetctl.cli import CliSession, json_option, note, pass_session
from fleetctl.exits import Exit
from fleetctl.text_files import composed, decoded, read_schema, with_images
from fleetd import limits

# After so many seconds without input from a pipe, chat says what it is waiting for.
_STDIN_PATIENCE_S = 2.0


@click.command("chat")
@click.argument("prompt", nargs=-1)
@click.option(
    "-m",
    "--model",
    default="",
    metavar="NAME",
    help="One of `fleetctl models`, if not the default.",
    shell_complete=completion.models,
)
@click.option("-s", "--system", default="", metavar="TEXT", help="The system message.")
@click.option(
    "--temperature", type=click.FloatRange(0, 2), metavar="NUMBER", help="0 always takes the likeliest token."
)
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="SHARE",
    help="Choose among the likeliest tokens that have this share of the probability.",
)
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="N", help="The longest answer, in tokens.")
@click.option("--seed", type=int, metavar="N", help="The same seed gives the same answer.")
@click.option(
    "--stop", multiple=True, metavar="TEXT", help="End the answer before this text; may be repeated."
)
@click.option(
    "-i",
    "--image",
    "images",
    multiple=True,
    metavar="FILE",
    help="Show the model this image before the PROMPT; may be repeated.",
)
@click.option("--schema", metavar="FILE", help="The answer follows the JSON schema in FILE (- is stdin).")
@click.option("--local-only", is_flag=True, help="No other machine sees the prompt or helps with it.")
@click.option(
    "--smart-prefill", is_flag=True, help="A small model leaves out what does not matter of a long prompt."
)
@click.option(
    "--keep-ratio",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="SHARE",
    help="The same, and keep this share of the prompt's tokens.",
)
@click.option("--plain", is_flag=True, help="Show the answer as it was written, not its Markdown.")
@click.option("--no-stats", is_flag=True, help="Leave out the closing line with times and speeds.")
@json_option
@pass_session
def command(
    session: CliSession,
    prompt: tuple[str, ...],
    model: str,
    system: str,
    temperature: float | None,
    top_p: float | None,
    max_tokens: int | None,
    seed: int | None,
    stop: tuple[str, ...],
    images: tuple[str, ...],
    schema: str | None,
    local_only: bool,
    smart_prefill: bool,
    keep_ratio: float | None,
    plain: bool,
    no_stats: bool,
) -> int:
    """Ask the model, or talk with it when there is no PROMPT.

    Text on stdin follows the PROMPT: `cat report.md | fleetctl chat "summarise"`. Ctrl-C stops an answer.
    """
    smart = keep_ratio or (True if smart_prefill else None)
    if schema == "-" and not prompt:
        raise click.UsageError("With the schema on stdin the PROMPT has to be an argument.")
    form = None if schema is None else read_schema(schema)
    options = Options(model, temperature, top_p, max_tokens, seed, stop, local_only, smart, form)
    text = composed(" ".join(prompt), None if schema == "-" else piped_text())
    if text is None:
        if images:
            raise click.UsageError("--image needs a PROMPT: say what to do with it.")
        if session.json:
            raise click.UsageError("--json needs a PROMPT, as an argument or on stdin.")
        if not sys.stdin.isatty():
            raise click.UsageError("There is no prompt: give one as an argument or on stdin.")
        from fleetctl.chat.repl import converse

        return converse(session.client(), options, system, stats=not no_stats, plain=plain)
    if not text.strip():
        raise click.UsageError("The prompt is empty.")
    messages: list[dict[str, Any]] = [{"role": "user", "content": with_images(text, images)}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    answer = ask(session.client(), options, messages, quiet=session.json, plain=plain)
    if session.json and not answer.stopped:
        session.emit(answer.as_json(), "")
    if not no_stats and not session.json:
        closing(answer)
    return Exit.INTERRUPTED if answer.stopped else Exit.OK


def piped_text() -> str | None:
    """What stdin holds, if it is a pipe, a file or a socket; None for a terminal or /dev/null."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        return None
    descriptor = sys.stdin.fileno()
    if stat.S_ISCHR(os.fstat(descriptor).st_mode):
        return None
    if not select.select([descriptor], [], [], _STDIN_PATIENCE_S)[0]:
        note("waiting for the rest of the prompt on stdin (append `< /dev/null` if there is none)")
    return decoded(sys.stdin.buffer.read(limits.HTTP_BODY_BYTES + 1), "stdin")
