"""The model to start an agent with, if the one that was chosen cannot. Pure."""

from __future__ import annotations

from fleetctl.render.text import one_line, size
from fleetd.control.model_listing import ModelListing


def ranked(models: ModelListing, context_tokens: int) -> list[str]:
    """The models that load on this machine and have enough context, best first: recommended ones for coding,
    then those that are installed, then the largest for coding and for chat. A name may come twice."""
    fitting = [
        entry
        for entry in models.catalog
        if "chat" in entry.roles and entry.fit.loads_here and entry.context_tokens >= context_tokens
    ]
    here = [
        model.name
        for model in models.installed
        if model.tools and model.context_tokens >= context_tokens and "chat" in model.roles
    ]
    return [
        *(entry.name for entry in fitting if "coding" in entry.recommended),
        *here,
        *(entry.name for entry in fitting if "coding" in entry.roles),
        *(entry.name for entry in fitting if "chat" in entry.roles),
    ]


def how_to_start(models: ModelListing, agent: str, context_tokens: int) -> str:
    """The line to type, as a sentence: the best model for the agent that fits now, and how to get and use it.

    A better one that fits once memory is freed is named behind it.
    """
    names = ranked(models, context_tokens)
    if not names:
        return "No model of the catalog fits this machine and has so long a context."
    short = {entry.name: entry.fit.short_bytes for entry in models.catalog}
    best = names[0]
    name = next((each for each in names if not short.get(each)), best)
    freed = f"once {size(short[best])} more of memory are free" if short.get(best) else ""
    start = f"fleetctl launch -m {one_line(name)} {agent}"
    better = f" {one_line(best)} is recommended, {freed}." if best != name else ""
    installed = {entry.name for entry in models.catalog if entry.installed}
    if name in installed | {model.name for model in models.installed}:
        return f"{one_line(name)} can: `{start}`.{better}"
    here = f"fits here {freed}" if freed and name == best else "fits here"
    pull = f"fleetctl models pull {one_line(name)}"
    return f"{one_line(name)} can, and {here}: `{pull}`, then `{start}`.{better}"
