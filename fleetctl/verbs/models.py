"""`fleetctl models`: list, search, pull, add, verify, load, unload, pin and remove models."""

from __future__ import annotations

import os
import sys
from typing import Any, get_args
from urllib.parse import quote

import click

from fleetctl import completion
from fleetctl.cli import CliSession, json_option, note, pass_session
from fleetctl.connection.client import Client
from fleetctl.connection.replies import read
from fleetctl.exits import ClientError, ConnectionBroken, Exit
from fleetctl.placement import named_machines
from fleetctl.render.columns import terminal_width
from fleetctl.render.models_table import fit_words, found_page, models_page, recommended_line
from fleetctl.render.progress_line import Progress, of_members
from fleetctl.render.text import listed, one_line, size
from fleetd import limits
from fleetd.control.model_change import ModelProgress, Split
from fleetd.control.model_listing import FoundModel, FoundModels, ModelListing, ModelVerdict, OfferedModel
from fleetd.errors import FleetError

_all_option = click.option("--all", "everything", is_flag=True, help="Also models that do not fit here.")
_on_option = click.option(
    "--on",
    default="",
    metavar="MACHINE",
    shell_complete=completion.machines,
    help="A paired machine, by its name or id, instead of this one.",
)


@click.group("models", invoke_without_command=True)
@_all_option
@_on_option
@json_option
@click.pass_context
def command(context: click.Context, everything: bool, on: str) -> None:
    """List, search, pull, add, load or remove models."""
    if context.invoked_subcommand is None:
        context.invoke(list_models, everything=everything, on=on)
    elif on:
        raise click.UsageError("Say --on behind the verb: fleetctl models load NAME --on MACHINE.")


def _client(session: CliSession, on: str) -> Client:
    """The client. Raises ClientError for a daemon that would do here what another machine is to do."""
    client = session.client()
    if on and "manage" not in client.get("/fleet/v1/peers"):
        raise ClientError(
            "The daemon is older than this fleetctl, and manages only its own models.",
            hint="Restart it: `fleetctl service install` (or stop and start `fleetd run`).",
        )
    return client


def _there(on: str, name: str = "") -> str:
    """A model, and the machine that has it, for people."""
    return one_line(" on ".join(filter(None, (name, on))))


@command.command("list")
@_all_option
@_on_option
@json_option
@pass_session
def list_models(session: CliSession, everything: bool, on: str) -> None:
    """List models here and those that fit (default).

    Recommended ones have a star. What fits is decided by what models may take of this machine's memory, and
    not by what is free at the moment.
    """
    models = _listing(_client(session, on), on)
    width = terminal_width()
    session.emit(models, lambda: models_page(read(models, ModelListing), width, everything=everything, on=on))


def _listing(client: Client, on: str) -> Any:
    """The models of a machine, as it judges what fits there."""
    path = f"/fleet/v1/models?on={quote(on)}" if on else "/fleet/v1/models"
    return client.call("GET", path, timeout_s=limits.CLIENT_CALL_S)


@command.command("search")
@click.argument("words", nargs=-1, required=True)
@_on_option
@json_option
@pass_session
def search(session: CliSession, words: tuple[str, ...], on: str) -> None:
    """Search the Hugging Face hub for models.

    It lists those that can be loaded, and first those that fit here. The daemon asks the hub, and only now.
    """
    found = _search(_client(session, on), " ".join(words), on)
    session.emit(found, lambda: found_page(read(found, FoundModels), terminal_width(), on=on))


def _search(client: Client, words: str, on: str) -> Any:
    path = f"/fleet/v1/models/search?words={quote(words)}{f'&on={quote(on)}' if on else ''}"
    return client.call("GET", path, timeout_s=limits.HUB_SEARCH_S + limits.CLIENT_CALL_S)


@command.command("pull", short_help="Download a model by name or hub id")
@click.argument("name", required=False, default="", shell_complete=completion.models)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--with-drafter", is_flag=True, help="Also the small model that can draft for it.")
@_on_option
@json_option
@pass_session
def pull(session: CliSession, name: str, yes: bool, with_drafter: bool, on: str) -> int:
    """Download a model: a catalog name or a hub id such as mlx-community/Qwen3-0.6B-4bit.

    Without a name it is the one that is recommended here. It asks before it downloads what cannot be loaded
    on the machine that is to have it. Ctrl-C stops it; pulling again continues where it stopped. A drafter is
    used once `speculation.draft_model` names it.
    """
    client = _client(session, on)
    if name.startswith(("/", "~")):
        return _bring(session, "pull", _body(name, on), name, on)
    models = read(_listing(client, on), ModelListing)
    drafter = _drafter(models, name) if with_drafter and name else ""
    asks = not (yes or session.json) and sys.stdin.isatty()
    if name:
        _warn(name, _needs(client, models, name, on), models, yes=yes, asks=asks, on=on)
    else:
        name = _recommended(models, yes=yes, asks=asks, on=on)
        drafter = _drafter(models, name) if with_drafter else ""
    if drafter and (ended := _bring(session, "pull", _body(drafter, on), drafter, on)) != Exit.OK:
        return ended
    return _bring(session, "pull", _body(name, on), name, on)


def _drafter(models: ModelListing, name: str) -> str:
    """The model of the catalog that can draft for another. Raises ClientError if none is known."""
    entry = _offered(models, name)
    if entry is None or not entry.draft:
        raise ClientError(
            f"The catalog names no model that drafts for {one_line(name)}.",
            hint="Pull it without --with-drafter: its own text is drafted from all the same.",
        )
    return entry.draft


def _offered(models: ModelListing, name: str) -> OfferedModel | None:
    """The entry of the catalog with this name, id or other name."""
    return next(
        (
            entry
            for entry in models.catalog
            if name.lower() in {each.lower() for each in (entry.name, entry.hub_id or "", *entry.aliases)}
        ),
        None,
    )


def _recommended(models: ModelListing, *, yes: bool, asks: bool, on: str) -> str:
    """The model to pull if none is named. Raises ClientError if there is none or it is not wanted."""
    line = recommended_line(models, on)
    missing = [entry for entry in models.catalog if entry.recommended and not entry.installed]
    if not line:
        machine = one_line(on) if on else "this machine"
        raise ClientError(
            f"No model of the catalog fits {machine}.", hint="`fleetctl models --all` shows what they need."
        )
    if not missing:
        raise ClientError(f"{line} They are there already.", hint="`fleetctl models` lists others.")
    best = missing[0]
    if not yes and not asks:
        raise click.UsageError(
            f"{line} Name one: fleetctl models pull {best.name} (--yes alone downloads this one)."
        )
    note(f"{line} {best.name}: {best.note}.")
    if not yes and not click.confirm(
        f"Download {_there(on, best.name)}, {size(best.download_bytes)}?", err=True
    ):
        raise ClientError("Nothing was downloaded.")
    return best.name


def _needs(client: Client, models: ModelListing, name: str, on: str) -> OfferedModel | FoundModel | None:
    """What is known of a model that is not there: by the catalog, or for a hub id by the hub."""
    if (entry := _offered(models, name)) is not None:
        return None if entry.installed else entry
    if "/" not in name or any(model.name == name for model in models.installed):
        return None
    try:
        with Progress() as progress:
            progress.update(f"asking the hub how large {name} is")
            found = read(_search(client, name, on), FoundModels)
    except FleetError:
        return None  # the download says what is wrong
    return next((model for model in found.models if model.hub_id.lower() == name.lower()), None)


def _warn(
    name: str,
    model: OfferedModel | FoundModel | None,
    models: ModelListing,
    *,
    yes: bool,
    asks: bool,
    on: str,
) -> None:
    """Ask before a download of what cannot be loaded there. Raises ClientError if it is not wanted."""
    where = f"on {one_line(on)}" if on else "here"
    if model is None or model.fit.where == "here":
        return
    if model.fit.where == "freed":
        note(f"{name} loads {where} once {size(model.fit.short_bytes)} more of memory are free.")
        return
    need, most = size(model.memory_bytes), size(models.memory.largest_bytes)
    elsewhere = f" It {fit_words(model)}." if model.fit.machines else ""
    text = f"{name} will not load {where}: it needs {need}, and models may take {most}.{elsewhere}"
    if yes:
        note(text)
    elif not asks:
        raise click.UsageError(f"{text} Say --yes to download it all the same.")
    else:
        note(text)
        if not click.confirm(f"Download {size(model.download_bytes)} all the same?", err=True):
            raise ClientError(f"{name} was not downloaded.")


@command.command("add", short_help="Make a folder or GGUF file here a model")
@click.argument("path")
@click.option(
    "--name",
    default="",
    metavar="NAME",
    help="What to call it; by default what the folder or file is called.",
)
@json_option
@pass_session
def add(session: CliSession, path: str, name: str) -> int:
    """Make a folder or a GGUF file on this machine a model like any other.

    PATH may also be the name of a file that `fleetctl models` has found in LM Studio's folders or Ollama's
    store. A folder is used where it lies; a GGUF file is imported, which copies it.
    """
    there = os.path.expanduser(path)
    ref = os.path.abspath(there) if os.path.exists(there) else path
    return _bring(session, "add", {"path": ref, "name": name}, name or path)


def _bring(session: CliSession, verb: str, body: dict[str, Any], name: str, on: str = "") -> int:
    try:
        with Progress() as progress:
            finished = _follow(session, verb, body, progress)
    except KeyboardInterrupt:
        note("stopped; the same command continues the download")
        return Exit.INTERRUPTED
    session.emit(finished, lambda: _ready(one_line(str(finished.get("name", name))), on))
    return Exit.OK


def _ready(name: str, on: str = "") -> str:
    if name.startswith("/"):
        # A folder outside the models folder is used where it lies, and no listing shows it.
        return (
            f"The folder holds a model, and its path is its name: fleetctl chat -m {name}\n"
            f"To see it in lists and on other machines, give it a name: fleetctl models add {name}"
        )
    return f"{_there(on, name)} is ready to use."


def _follow(
    session: CliSession, verb: str, body: dict[str, Any], progress: Progress, doing: str = ""
) -> dict[str, Any]:
    """The last event. ``doing`` begins each line of progress."""
    with session.client().stream(f"/fleet/v1/models/{verb}", body) as stream:
        for report in stream.reports():
            if report.get("done") is True:
                return report
            what = " ".join(str(report[key]) for key in ("stage", "file") if report.get(key))
            text = ": ".join(filter(None, (doing, what)))
            step = read(report, ModelProgress)
            detail = of_members(step.members or [])
            progress.update(text, step.done_bytes, step.total_bytes, unit="bytes", detail=detail)
    raise ConnectionBroken(
        "The daemon ended it before it was complete.",
        hint="The same command goes on or begins again.",
    )


@command.command("verify")
@click.argument("name", shell_complete=completion.models)
@json_option
@pass_session
def verify(session: CliSession, name: str) -> None:
    """Check every file of a model and print its digest."""
    with Progress() as progress:
        progress.update(f"verifying {name}")
        body = {"model": name}
        found = session.client().post("/fleet/v1/models/verify", body, timeout_s=limits.CLIENT_LONG_CALL_S)
    session.emit(found, lambda: f"{name} is intact: {one_line(read(found, ModelVerdict).digest)}")


@command.command("load")
@click.argument("name", shell_complete=completion.models)
@click.option(
    "--on",
    default="",
    metavar="MACHINE[,…]",
    shell_complete=completion.machines,
    help="A paired machine instead of this one; several, this one first, hold it together.",
)
@click.option(
    "--split",
    type=click.Choice(get_args(Split)),
    help="Several machines hold some layers each, or a part of every layer each; not given: what is faster.",
)
@json_option
@pass_session
def load(session: CliSession, name: str, on: str, split: Split | None) -> None:
    """Load a model now instead of with its first request.

    With --on this,studio both machines hold a part, also of a model that would fit on one. It stays loaded so
    until it is unloaded here. With --split tensors all machines compute each layer at the same time, which is
    faster over links with little delay and gives other roundings than one machine does; with --split layers
    they compute one after the other. Without it the planner takes what is faster, and says why: with --on,
    `fleetctl plan -m NAME` shows both.
    """
    if "," in on:
        _load_together(session, name, named_machines(on), split)
        return
    if split == "tensors":
        raise click.UsageError("Name the machines that divide the layers: --on this,studio --split tensors")
    done = _load(session, "load", name, on)
    session.emit(done, f"{_there(on, name)} is loaded.")


@command.command("unload")
@click.argument("name", shell_complete=completion.models)
@_on_option
@json_option
@pass_session
def unload(session: CliSession, name: str, on: str) -> None:
    """End a model's engine and free its memory; its files stay."""
    done = _post(session, "unload", name, on)
    session.emit(done, f"{_there(on, name)} is not loaded any more.")


@command.command("pin")
@click.argument("name", shell_complete=completion.models)
@_on_option
@json_option
@pass_session
def pin(session: CliSession, name: str, on: str) -> None:
    """Load a model and keep it loaded, also after a restart."""
    done = _load(session, "pin", name, on)
    ends = one_line(f"fleetctl models unpin {name}{f' --on {on}' if on else ''}")
    session.emit(done, f"{_there(on, name)} stays loaded. `{ends}` ends that.")


@command.command("unpin")
@click.argument("name", shell_complete=completion.models)
@_on_option
@json_option
@pass_session
def unpin(session: CliSession, name: str, on: str) -> None:
    """Let a model be unloaded as any other."""
    done = _post(session, "unpin", name, on)
    session.emit(
        done, f"{_there(on, name)} is not pinned any more. It is unloaded once it has been idle for long."
    )


@command.command("remove")
@click.argument("name", shell_complete=completion.models)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@_on_option
@json_option
@pass_session
def remove(session: CliSession, name: str, yes: bool, on: str) -> int:
    """Delete a model's files; of a folder that was added, only its name."""
    if not yes:
        files = f"{name}'s files{f' on {on}' if on else ''}"
        if session.json or not sys.stdin.isatty():
            raise click.UsageError(f"This deletes {files}; say --yes where no person can be asked.")
        if not click.confirm(f"Delete {files} (if it is an added folder, only its name)?", err=True):
            raise ClientError(f"{_there(on, name)} is kept.")
    done = _post(session, "remove", name, on)
    session.emit(done, f"{_there(on, name)} is removed.")
    return Exit.OK


def _load(session: CliSession, verb: str, name: str, on: str) -> Any:
    """Load a model, with progress."""
    doing = f"loading {_there(on, name)}"
    # An older daemon is found out before it is asked.
    _client(session, on)
    with Progress() as progress:
        progress.update(doing)
        _follow(session, verb, {**_body(name, on), "stream": True}, progress, doing)
    return {"ok": True}


def _load_together(session: CliSession, name: str, machines: list[str], split: Split | None) -> None:
    """Load a model over several machines, this one first."""
    with Progress() as progress:
        doing = f"loading {name}"
        progress.update(doing)
        body: dict[str, Any] = {"model": name, "placement": machines, "stream": True}
        if split is not None:
            body["split"] = split
        done = _follow(session, "load", body, progress, doing)
    why = f" {done['why']}" if done.get("why") else ""
    told: dict[str, Any] = {"ok": True}
    told |= {key: done[key] for key in ("split", "why") if key in done}
    names = ["this machine" if machine == "this" else machine for machine in machines]
    session.emit(told, one_line(f"{name} is loaded on {listed(names)}.{why}"))


def _post(session: CliSession, verb: str, name: str, on: str) -> Any:
    """Do what has no progress."""
    client = _client(session, on)
    return client.post(f"/fleet/v1/models/{verb}", _body(name, on), timeout_s=limits.DRAIN_S)


def _body(name: str, on: str) -> dict[str, Any]:
    return {"model": name, "on": on} if on else {"model": name}
