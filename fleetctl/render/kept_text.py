"""Shows a text with kept parts plain and dropped parts dim and struck through. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

from fleetctl.render.text import count, duration, listed, one_line
from fleetd.control.compression_reply import Compression
from fleetd.text.terminal_text import printable


def pieces(text: str, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[bool, str]]:
    """Yield (kept, piece) for consecutive pieces that together are the text."""
    at = 0
    for start, end in spans:
        start, end = max(at, min(start, len(text))), min(end, len(text))
        if start > at:
            yield False, text[at:start]
        if end > start:
            yield True, text[start:end]
            at = end
        else:
            at = max(at, start)
    if at < len(text):
        yield False, text[at:]


def page(text: str, found: Compression) -> str:
    """The text for a terminal, without control characters; each line has its own style."""
    spans = found.kept[0].spans if found.kept else [(0, len(text))]
    return "".join(
        printable(piece) if kept else _struck(printable(piece)) for kept, piece in pieces(text, spans)
    )


def summary(found: Compression, *, asked: bool = True) -> str:
    """One line: how much is left, which model on which machines scored the text, and how long that took.

    ``asked``: a question came with the text.
    """
    usage = found.usage
    if found.declined:
        hint = "" if asked else " (--without-question chooses by the text alone)"
        why = f"{one_line(found.declined)}{hint}"
        return f"nothing was left out of {count(usage.original_tokens)} tokens: {why}"
    share = 100 * usage.compressed_tokens / max(1, usage.original_tokens)
    where = listed([one_line(node) for node in found.nodes if node != "this"])
    return (
        f"{count(usage.original_tokens)} tokens to {count(usage.compressed_tokens)} ({share:.0f} %) · "
        f"scored {'without a question ' if found.scored == 'without question' else ''}"
        f"by {one_line(found.model)}{f' on {where}' if where else ''} "
        f"in {duration(found.timings.score_ms / 1000)}"
    )


def _struck(text: str) -> str:
    """Struck through line by line: if a pager cuts a line, the style must not reach the next one."""
    return "\n".join(
        click.style(line, dim=True, strikethrough=True) if line.strip() else line for line in text.split("\n")
    )
