"""`fleetctl rerank`: shows which files or lines answer a question best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from fleetctl import completion
from fleetctl.cli import CliSession, json_option, pass_session
from fleetctl.exits import DaemonFailed
from fleetctl.render.progress_line import Progress
from fleetctl.render.text import one_line
from fleetctl.vectors.corpus import CorpusText, read_corpus
from fleetctl.vectors.vector_models import chosen_model
from fleetd import limits
from fleetd.text.terminal_text import json_text

_SHOWN_CHARS = 80


@click.command("rerank")
@click.argument("question")
@click.argument("files", nargs=-1)
@click.option(
    "-m",
    "--model",
    metavar="NAME",
    help="The model, if not the fleet's only one for reranking.",
    shell_complete=completion.models,
)
@click.option("--lines", is_flag=True, help="Each line is a document, instead of each file.")
@click.option("-n", "--top", type=click.IntRange(min=1), metavar="N", help="Show the N best.")
@click.option("--local-only", is_flag=True, help="No other machine sees the texts.")
@json_option
@pass_session
def command(
    session: CliSession,
    question: str,
    files: Sequence[str],
    model: str | None,
    lines: bool,
    top: int | None,
    local_only: bool,
) -> None:
    """Order the documents in FILES (- or none is stdin) by how well they answer QUESTION.

    The best come first, each with its score from 0 to 1. With --json each is a line of JSON.
    """
    documents = read_corpus(files or ["-"], lines=lines)
    if not documents:
        raise click.UsageError("The documents are empty.")
    client = session.client()
    body: dict[str, Any] = {
        "model": chosen_model(client, model, "rerank"),
        "query": question,
        "documents": [document.text for document in documents],
        "top_n": top,
        "local_only": local_only or None,
    }
    given = {name: value for name, value in body.items() if value is not None}
    with Progress() as progress:
        progress.update(f"scoring {len(documents)} documents")
        answer = client.post("/v1/rerank", given, timeout_s=limits.CLIENT_LONG_CALL_S)
    for document, score in _ranked(answer, documents):
        if session.json:
            click.echo(json_text({"id": document.id, "score": score, "text": document.text}))
        else:
            start = one_line(document.text.strip()[: 2 * _SHOWN_CHARS])[:_SHOWN_CHARS]
            click.echo(f"{score:.3f}  {one_line(document.id)}  {click.style(start, dim=True)}")


def _ranked(answer: Any, documents: Sequence[CorpusText]) -> list[tuple[CorpusText, float]]:
    """The documents of an answer. Raises DaemonFailed for one that cannot be read."""
    try:
        return [(documents[int(each["index"])], float(each["relevance_score"])) for each in answer["results"]]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DaemonFailed("The daemon's scores cannot be read.") from error
