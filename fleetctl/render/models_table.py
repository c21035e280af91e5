"""Models for people: what is here, what there is room for, and what a search has found. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from fleetctl.render.columns import Column, drawn, fitted, shortened, total
from fleetctl.render.memory import memory_lines
from fleetctl.render.text import count, listed, one_line, size, wrapped
from fleetd.control.model_listing import (
    FoundModel,
    FoundModels,
    InstalledModel,
    ModelFit,
    ModelListing,
    OfferedModel,
)

_GROUPS = {
    "here": "FITS",
    "freed": "FITS WHEN MEMORY IS FREED",
    "elsewhere": "FITS ON OTHER MACHINES",
    "together": "FITS ON SEVERAL TOGETHER",
    "none": "TOO LARGE",
}
_HEADS = {"head": "own head", "sidecar": "head beside it"}
_WORDS = {"chat": "chat", "coding": "coding", "draft": "drafts"}
# A remark that is cut shorter than this tells nothing.
_REMARK_CHARS = 24


def models_page(models: ModelListing, width: int | None, *, everything: bool = False, on: str = "") -> str:
    """What a machine has, and the catalog's models: those that load there, or ``everything``.

    ``on``: what people call it; "" is this machine.
    """
    parts = [*_installed(models, width, on), *_in_part(models, width), *_of_others(models, width)]
    offered = [entry for entry in models.catalog if not entry.installed]
    hidden = 0
    for where, title in _GROUPS.items():
        group = [entry for entry in offered if entry.fit.where == where]
        if not everything:
            shown = [entry for entry in group if entry.fit.loads_here]
            hidden += len(group) - len(shown)
            group = shown
        if group:
            title = f"{title} {_place(on).upper()}" if where == "here" else title
            parts.append(_offered_table(title, group, width, on))
    parts.append("\n".join(wrapped(line, width) for line in _remarks(models, hidden, on)))
    return "\n\n".join(parts)


def _place(on: str) -> str:
    return f"on {one_line(on)}" if on else "here"


def recommended_line(models: ModelListing, on: str = "") -> str:
    """The models to take on a machine, in a sentence; "" if the machine is too small for any."""
    chosen = []
    for entry in models.catalog:
        if entry.recommended:
            first = fit_words(entry) if entry.fit.where == "freed" else ""
            what = f"{entry.name} for {listed([_WORDS[work] for work in entry.recommended])}"
            chosen.append(f"{what} ({first})" if first else what)
    return f"Recommended {_place(on)}: {', '.join(chosen)}." if chosen else ""


def fits(fit: ModelFit, on: str = "") -> str:
    """Where a model has room, in a table: "here", "studio", "here + kitchen", "no: 12.0 GB short".

    ``on``: the machine that judges, "" for this one.
    """
    here = one_line(on) or "here"
    names = [one_line(name) for name in fit.machines]
    match fit.where:
        case "freed":
            return f"{here}, {size(fit.short_bytes)} to free"
        case "elsewhere":
            return " or ".join(names)
        case "together":
            return " + ".join([here, *names])
        case "none":
            return f"no: {size(fit.short_bytes)} short"
        case _:
            return here


def fit_words(entry: OfferedModel | FoundModel) -> str:
    """Where a model has room, as a part of a sentence; "" if it does here and now."""
    fit = entry.fit
    if fit.where == "elsewhere":
        return f"fits on {one_line(listed(fit.machines))}"
    if fit.where == "together":
        return f"fits on this machine and {one_line(listed(fit.machines))} together"
    return {"freed": f"free {size(fit.short_bytes)} first", "none": f"{size(fit.short_bytes)} short"}.get(
        fit.where, ""
    )


def found_page(found: FoundModels, width: int | None, *, on: str = "") -> str:
    """The models of a search, for the machine ``on``."""
    others = f"{count(found.others)} more are of types or files that fleetd does not read."
    if not found.models:
        words = one_line(found.words)
        return f"The hub has nothing under {words!r} that fleetd can load." + (
            f" {others}" if found.others else ""
        )
    columns = [
        Column("MODEL", [one_line(model.hub_id) for model in found.models], 9),
        Column("DOWNLOAD", [_known(model.download_bytes) for model in found.models], 8, right=True),
        Column("MEMORY", [_known(model.memory_bytes) for model in found.models], 7, right=True),
        Column("FILES", [model.files for model in found.models], 5),
    ]
    parts = ["\n".join(_with_remarks(columns, found.models, _found_remark, width))]
    hint = f"Get one with `fleetctl models pull MODEL{_option(on)}`."
    parts.append(wrapped(f"{hint} {others}" if found.others else hint, width))
    return "\n\n".join(parts)


def _option(on: str) -> str:
    return f" --on {one_line(on)}" if on else ""


def _installed(models: ModelListing, width: int | None, on: str) -> Iterable[str]:
    if not models.installed:
        here = "No model is installed yet; the default one is fetched with the first request."
        yield wrapped(f"No model is {_place(on)} yet." if on else here, width)
        return
    shown = models.installed
    columns = [
        Column("INSTALLED", [model.name for model in shown], 9),
        Column("FOR", [_roles(model) for model in shown], 6),
        Column("WEIGHTS", [size(model.weights_bytes) for model in shown], 7, right=True),
        Column("FITS", [fits(model.fit, on) for model in shown], 8),
        Column("CONTEXT", [count(model.context_tokens) for model in shown], 8, right=True),
        Column("TOOLS", [model.tools or "-" for model in shown], 5),
        Column("THINKS", ["yes" if model.thinking else "-" for model in shown], 4),
        drafts := Column("DRAFTS", [_drafter(model) for model in shown], 3),
        Column("ARCHITECTURE", [model.architecture or "?" for model in shown], 2),
        Column("SOURCE", [model.source or "-" for model in shown], 1),
        Column("", [_state(model) for model in shown], 8),
    ]
    left = fitted(columns, width)
    yield "\n".join(drawn(left))
    if drafts not in left and (said := _drafting(shown)):
        yield wrapped(said, width)
    for model in shown:
        if model.ignored:
            unused = one_line(", ".join(model.ignored))
            text = f"{one_line(model.name)} answers without {unused}: fuse it first, with mlx_lm.fuse."
            yield wrapped(text, width)
        if model.drafter_off:
            why, name = one_line(model.drafter_off).removesuffix("."), one_line(model.name)
            which = one_line(model.drafter)
            head = (
                f"The head of {name} does not draft"
                if which in _HEADS
                else f"{which} does not draft for {name}"
            )
            yield wrapped(f"{head}: {why}.", width)
    if models.unlisted:
        yield f"Not listed: {len(models.unlisted)} more. `fleetctl doctor` says why."


def _in_part(models: ModelListing, width: int | None) -> Iterable[str]:
    if not models.in_part:
        return
    shown = models.in_part
    columns = [
        Column("IN PART", [one_line(part.name) for part in shown], 9),
        Column("LAYERS", [f"{part.layers} of {part.of_layers}" for part in shown], 8),
        Column("ON DISK", [f"{size(part.disk_bytes)} of {size(part.weights_bytes)}" for part in shown], 7),
        Column("ANSWERED BY", ["here, with others" if part.own else "another machine" for part in shown], 6),
        Column("FROM", ["hub" if part.from_hub else "that machine" for part in shown], 5),
        Column("", ["loaded" if part.loaded else "" for part in shown], 8),
    ]
    yield "\n".join(drawn(fitted(columns, width)))


def _of_others(models: ModelListing, width: int | None) -> Iterable[str]:
    if models.importable:
        columns = [
            Column("OF OTHER PROGRAMS", [one_line(file.name) for file in models.importable], 9),
            Column("SIZE", [size(file.size_bytes) for file in models.importable], 8, right=True),
            Column("PROGRAM", [file.program for file in models.importable], 7),
        ]
        yield "\n".join(drawn(fitted(columns, width)))
        text = "Import one with `fleetctl models add NAME`; the other program's file stays as it is."
        yield wrapped(text, width)


def _offered_table(title: str, group: Sequence[OfferedModel], width: int | None, on: str) -> str:
    columns = [
        Column(" ", ["*" if entry.recommended else " " for entry in group], 9),
        Column(title, [entry.name for entry in group], 9),
        Column("FOR", [_roles(entry) for entry in group], 8),
        Column("DOWNLOAD", [size(entry.download_bytes) for entry in group], 8, right=True),
        Column("MEMORY", [size(entry.memory_bytes) for entry in group], 8, right=True),
    ]
    if any(entry.fit.where != "here" for entry in group):
        columns.append(Column("FITS", [fits(entry.fit, on) for entry in group], 7))
    return "\n".join(_with_remarks(columns, group, _offered_remark, width))


def _with_remarks(
    columns: Sequence[Column],
    rows: Sequence[OfferedModel] | Sequence[FoundModel],
    remark: Callable[[OfferedModel | FoundModel], str],
    width: int | None,
) -> list[str]:
    """The table with a remark on each row, cut to what room is left; without them if there is too little."""
    columns = fitted(columns, width)
    left = None if width is None else width - total(columns) - 2
    remarks = [remark(row) for row in rows]
    if left is None or left >= _REMARK_CHARS:
        cut = remarks if left is None else [shortened(each, left) for each in remarks]
        columns = [*columns, Column("REMARK", cut, 1)]
    return drawn(columns)


def _offered_remark(entry: OfferedModel | FoundModel) -> str:
    return entry.note if isinstance(entry, OfferedModel) else ""


def _found_remark(entry: OfferedModel | FoundModel) -> str:
    gated = "accept its terms first" if isinstance(entry, FoundModel) and entry.gated else ""
    return "; ".join(filter(None, ("installed" if entry.installed else "", fit_words(entry), gated)))


def _remarks(models: ModelListing, hidden: int, on: str) -> Iterable[str]:
    """What is to be said below the tables."""
    if chosen := recommended_line(models, on):
        yield f"* {chosen}"
    yield from memory_lines(models.memory, models.evictable_bytes)
    if models.memory_reason:
        yield models.memory_reason.replace("this machine", one_line(on) or "this machine")
    if hidden:
        every = f"fleetctl models --all{_option(on)}"
        yield f"{hidden} more do not fit {_place(on)}: `{every}` shows them, and where they do."
    pull, search = f"fleetctl models pull NAME{_option(on)}", f"fleetctl models search WORDS{_option(on)}"
    yield f"Get one with `{pull}`; `{search}` finds others on the Hugging Face hub."


def _roles(model: InstalledModel | OfferedModel) -> str:
    roles = [role for role in model.roles if role in _WORDS] or model.roles
    seen = ["images"] if isinstance(model, InstalledModel) and model.images else []
    return ", ".join([*roles, *seen]) or "-"


def _drafter(model: InstalledModel) -> str:
    """What drafts for a model besides its own text."""
    said = _HEADS.get(model.drafter) or one_line(model.drafter) or "-"
    return f"{said}{', off' if model.drafter_off else ''}"


def _drafting(models: Sequence[InstalledModel]) -> str:
    """What drafts for which models, a sentence each; "" if nothing does."""
    drafted: dict[str, list[str]] = {}
    for model in models:
        if model.drafter and not model.drafter_off:
            drafted.setdefault(_drafter(model), []).append(one_line(model.name))
    return " ".join(f"Drafts for {listed(names)}: {drafter}." for drafter, names in drafted.items())


def _state(model: InstalledModel) -> str:
    return ", ".join(word for word, is_so in (("loaded", model.loaded), ("pinned", model.pinned)) if is_so)


def _known(n_bytes: int) -> str:
    return size(n_bytes) if n_bytes else "?"
