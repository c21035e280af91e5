"""``--on A,B``: the machines that are to hold a model together."""

from __future__ import annotations

import click


def named_machines(text: str) -> list[str]:
    """Their names, in this order. Raises UsageError if there is only one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if len(names) < 2:
        raise click.UsageError("Name the machines with commas between them, this one first: --on this,studio")
    return names
