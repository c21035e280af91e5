"""The model to start an agent with, if the one that was chosen cannot. Pure."""

from __future__ import annotations

from fleetctl.render.text import one_line, size
from fleetd.control.model_listing import ModelListing


def best(models: ModelListing, context_tokens: int) -> str:
    """The best model that loads on this machine and has enough context: a recommended one for coding, or else
    one that is installed, or else the largest for coding and then for chat; "" if there is none."""
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
    ranked = [
        *(entry.name for entry in fitting if "coding" in entry.recommended),
        *here,
        *(entry.name for entry in fitting if "coding" in entry.roles),
        *(entry.name for entry in fitting if "chat" in entry.roles),
    ]
    return ranked[0] if ranked else ""


def how_to_start(models: ModelListing, agent: str, context_tokens: int) -> str:
    """The line to type, as a sentence: the best model for the agent, and how to get and use it."""
    name = best(models, context_tokens)
    if not name:
        return "No model of the catalog fits this machine and has so long a context."
    start = f"fleetctl launch -m {one_line(name)} {agent}"
    installed = {entry.name for entry in models.catalog if entry.installed}
    if name in installed | {model.name for model in models.installed}:
        return f"{name} can: `{start}`."
    freed = next((entry.fit.short_bytes for entry in models.catalog if entry.name == name), 0)
    here = f"fits here once {size(freed)} more of memory are free" if freed else "fits here"
    return f"{name} can, and {here}: `fleetctl models pull {one_line(name)}`, then `{start}`."
