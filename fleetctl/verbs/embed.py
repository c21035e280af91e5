"""`fleetctl embed`: makes vectors of files or lines, with all machines that are idle."""

from __future__ import annotations

import base64
import binascii
import json
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from fleetctl import completion
from fleetctl.cli import CliSession, json_option, pass_session
from fleetctl.connection.client import Client, daemon_error
from fleetctl.connection.event_stream import Comment
from fleetctl.exits import ClientError, ConnectionBroken
from fleetctl.render.progress_line import Progress
from fleetctl.render.text import count
from fleetctl.vectors.corpus import CorpusText, read_corpus
from fleetctl.vectors.vector_files import VectorFile, open_vectors
from fleetctl.vectors.vector_models import chosen_model
from fleetd import limits
from fleetd.errors import ContextLengthExceeded

_FIRST_TEXTS = 64


@click.command("embed")
@click.argument("files", nargs=-1)
@click.option(
    "-m",
    "--model",
    metavar="NAME",
    help="The model, if not the fleet's only one for vectors.",
    shell_complete=completion.models,
)
@click.option("--lines", is_flag=True, help="Each line is a text, instead of each file.")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A .jsonl or .npy file; what it has already is not computed again. Without it, stdout.",
)
@click.option("--query", "kind", flag_value="query", help="The texts are questions.")
@click.option("--document", "kind", flag_value="document", help="The texts are what questions look for.")
@click.option("--dimensions", type=click.IntRange(min=1), metavar="N", help="Keep the first N numbers.")
@click.option("--truncate", is_flag=True, help="Leave out the end of a text that is too long.")
@click.option("--local-only", is_flag=True, help="No other machine sees the texts.")
@json_option
@pass_session
def command(
    session: CliSession,
    files: Sequence[str],
    model: str | None,
    lines: bool,
    output: Path | None,
    kind: str | None,
    dimensions: int | None,
    truncate: bool,
    local_only: bool,
) -> None:
    """Make vectors of the texts in FILES (- or none is stdin).

    Each vector is a line of JSON, or with -o FILE.npy a row of a matrix. The work is spread over the machines
    that have the model and are idle.
    """
    texts = read_corpus(files or ["-"], lines=lines)
    if not texts:
        raise click.UsageError("The texts are empty.")
    client, out = session.client(), open_vectors(output)
    try:
        left = [text for text in texts if not out.done or (text.id, text.sha256) not in out.done]
        asked: dict[str, Any] = {
            "model": chosen_model(client, model, "embedding") if left else "",
            "input_type": kind,
            "dimensions": dimensions,
            "truncate": truncate or None,
            "local_only": local_only or None,
        }
        asked = {name: value for name, value in asked.items() if value is not None}
        tokens = _embed(client, asked, left, out, begun=len(texts) - len(left))
    finally:
        out.close()
    _told(session, output, len(texts), len(left), tokens)


def _told(session: CliSession, output: Path | None, total: int, left: int, tokens: int) -> None:
    if output is None:
        return
    skipped = f", {count(total - left)} of them from before" if left < total else ""
    session.emit(
        {"texts": total, "computed": left, "tokens": tokens, "file": str(output)},
        f"{output}: {count(total)} vectors{skipped}",
    )


def _embed(
    client: Client, asked: dict[str, Any], texts: Sequence[CorpusText], out: VectorFile, *, begun: int
) -> int:
    """Write the vectors of all texts, request by request. Returns the tokens that were computed."""
    tokens, total, size, first = 0, begun + len(texts), _FIRST_TEXTS, 0
    asked = {**asked, "part_of": {"id": uuid.uuid4().hex, "total": len(texts)}}
    with Progress() as progress:
        while first < len(texts):
            some = _fitting(texts[first : first + size])
            began_s = time.monotonic()
            request = {**asked, "input": [text.text for text in some]}
            vectors: dict[int, bytes] = {}
            for report in _reports(client, request, some):
                if report.get("loading"):
                    progress.update(str(report["loading"]), report.get("done", 0), report.get("total", 0))
                    continue
                vectors |= _vectors(report)
                progress.update("embedding", begun + first + len(vectors), total, unit="texts")
                if "usage" in report:
                    _check_model(out, str(report.get("model", "")))
                    tokens += int(report["usage"]["total_tokens"])
            if sorted(vectors) != list(range(len(some))):
                raise ConnectionBroken("The daemon did not send a vector for each text.")
            out.add(some, [vectors[number] for number in range(len(some))], out.model)
            first += len(some)
            if time.monotonic() - began_s < limits.VECTOR_CLI_S:
                size = min(2 * size, limits.VECTOR_CLI_TEXTS)
    return tokens


def _fitting(texts: Sequence[CorpusText]) -> list[CorpusText]:
    """The first of them that one body holds, at least one."""
    room = limits.HTTP_BODY_BYTES // 8
    found: list[CorpusText] = []
    for text in texts:
        room -= len(text.text)
        if found and room < 0:
            break
        found.append(text)
    return found


def _check_model(out: VectorFile, model: str) -> None:
    """Raises ClientError if the file has vectors of another model."""
    if out.model not in ("", model):
        raise ClientError(
            f"The file has vectors of {out.model}, and these are of {model}.",
            hint=f"Name another file with -o, or the model: -m {out.model}.",
        )
    out.model = model


def _reports(
    client: Client, request: dict[str, Any], texts: Sequence[CorpusText]
) -> Iterator[dict[str, Any]]:
    """What the daemon says of the request for some texts. Raises FleetError."""
    body = {**request, "stream": True, "encoding_format": "base64"}
    try:
        yield from _events(client, body)
    except ContextLengthExceeded as error:
        longest = max(texts, key=lambda text: len(text.text))
        hint = f"The longest one is {longest.id}. Cut it into parts, or leave out its end with --truncate."
        raise ContextLengthExceeded(error.message, hint=hint) from error


def _events(client: Client, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with client.stream("/v1/embeddings", body) as reply:
        for event in reply:
            if isinstance(event, Comment):
                continue
            if event.text == "[DONE]":
                return
            try:
                report = json.loads(event.text)
            except ValueError as error:
                raise ConnectionBroken("The daemon sent an event that is not JSON.") from error
            if "error" in report:
                raise daemon_error(report, 500)
            yield report
    raise ConnectionBroken("The connection to the daemon broke before the vectors were complete.")


def _vectors(report: dict[str, Any]) -> dict[int, bytes]:
    """Vectors by the number of their text."""
    try:
        return {
            int(each["index"]): base64.b64decode(each["embedding"], validate=True)
            for each in report.get("data") or ()
        }
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise ConnectionBroken("The daemon sent a vector that cannot be read.") from error
