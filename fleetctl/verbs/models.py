"""`fleetctl models`: list, pull, add, verify, load, unload, pin and remove models."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from fleetctl.cli import CliSession, json_option, note, pass_session
from fleetctl.exits import ClientError, ConnectionBroken, Exit
from fleetctl.render.memory import memory_lines
from fleetctl.render.progress_line import Progress
from fleetctl.render.text import count, one_line, size, table
from fleetctl.replies import read
from fleetd import limits
from fleetd.control.model_listing import InstalledModel, ModelListing, ModelVerdict, OfferedModel


@click.group("models", invoke_without_command=True)
@json_option
@click.pass_context
def command(context: click.Context) -> None:
    """List models; pull, add, verify, load, unload, pin or remove one."""
    if context.invoked_subcommand is None:
        context.invoke(list_models)


@command.command("list")
@json_option
@pass_session
def list_models(session: CliSession) -> None:
    """List installed models and the catalog (the default)."""
    models = session.client().get("/fleet/v1/models")
    session.emit(models, lambda: render(read(models, ModelListing)))


@command.command("pull")
@click.argument("name")
@json_option
@pass_session
def pull(session: CliSession, name: str) -> int:
    """Download a model: a catalog name or a hub id such as mlx-community/Qwen3-0.6B-4bit.

    Ctrl-C stops it; pulling again continues where it stopped.
    """
    return _bring(session, "/fleet/v1/models/pull", {"model": name}, name)


@command.command("add")
@click.argument("path")
@click.option("--name", default="", help="What to call it; by default what the folder or file is called.")
@json_option
@pass_session
def add(session: CliSession, path: str, name: str) -> int:
    """Make a folder or a GGUF file on this machine a model like any other.

    PATH may also be the name of a file that `fleetctl models` has found in LM Studio's folders or Ollama's
    store. A folder is used where it lies; a GGUF file is imported, which copies it.
    """
    there = os.path.expanduser(path)
    ref = os.path.abspath(there) if os.path.exists(there) else path
    return _bring(session, "/fleet/v1/models/add", {"path": ref, "name": name}, name or path)


def _bring(session: CliSession, route: str, body: dict[str, str], name: str) -> int:
    try:
        with Progress() as progress:
            finished = _follow(session, route, body, progress)
    except KeyboardInterrupt:
        note("stopped; the same command continues the download")
        return Exit.INTERRUPTED
    session.emit(finished, lambda: _ready(one_line(str(finished.get("name", name)))))
    return Exit.OK


def _ready(name: str) -> str:
    if name.startswith("/"):
        # A folder outside the models folder is used where it lies, and no listing shows it.
        return (
            f"The folder holds a model, and its path is its name: fleetctl chat -m {name}\n"
            f"To see it in lists and on other machines, give it a name: fleetctl models add {name}"
        )
    return f"{name} is ready to use."


def _follow(session: CliSession, route: str, body: dict[str, str], progress: Progress) -> dict[str, Any]:
    with session.client().stream(route, body) as stream:
        for report in stream.reports():
            if report.get("done") is True:
                return report
            what = " ".join(str(report[key]) for key in ("stage", "file") if report.get(key))
            progress.update(what, report.get("done_bytes") or 0, report.get("total_bytes") or 0, unit="bytes")
    raise ConnectionBroken(
        "The daemon ended the download before it was complete.",
        hint="The same command continues it.",
    )


@command.command("verify")
@click.argument("name")
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
@click.argument("name")
@json_option
@pass_session
def load(session: CliSession, name: str) -> None:
    """Load a model now instead of with its first request."""
    with Progress() as progress:
        progress.update(f"loading {name}")
        done = session.client().post(
            "/fleet/v1/models/load", {"model": name}, timeout_s=limits.CLIENT_LONG_CALL_S
        )
    session.emit(done, f"{name} is loaded.")


@command.command("unload")
@click.argument("name")
@json_option
@pass_session
def unload(session: CliSession, name: str) -> None:
    """End a model's engine and free its memory; its files stay."""
    done = session.client().post("/fleet/v1/models/unload", {"model": name}, timeout_s=limits.DRAIN_S)
    session.emit(done, f"{name} is not loaded any more.")


@command.command("pin")
@click.argument("name")
@json_option
@pass_session
def pin(session: CliSession, name: str) -> None:
    """Load a model and keep it loaded, also after a restart."""
    with Progress() as progress:
        progress.update(f"loading {name}")
        body = {"model": name}
        done = session.client().post("/fleet/v1/models/pin", body, timeout_s=limits.CLIENT_LONG_CALL_S)
    session.emit(done, f"{name} stays loaded. `fleetctl models unpin {name}` ends that.")


@command.command("unpin")
@click.argument("name")
@json_option
@pass_session
def unpin(session: CliSession, name: str) -> None:
    """Let a model be unloaded as any other."""
    done = session.client().post("/fleet/v1/models/unpin", {"model": name})
    session.emit(done, f"{name} is not pinned any more. It is unloaded once it was idle for long.")


@command.command("remove")
@click.argument("name")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_option
@pass_session
def remove(session: CliSession, name: str, yes: bool) -> int:
    """Delete a model's files; of a folder that was added, only its name."""
    if not yes:
        if session.json or not sys.stdin.isatty():
            raise click.UsageError(f"This deletes {name}'s files; say --yes where no person can be asked.")
        question = f"Delete {name}'s files (if it is an added folder, only its name)?"
        if not click.confirm(question, err=True):
            raise ClientError(f"{name} is kept.")
    done = session.client().post("/fleet/v1/models/remove", {"model": name}, timeout_s=limits.DRAIN_S)
    session.emit(done, f"{name} is removed.")
    return Exit.OK


def render(models: ModelListing) -> str:
    """Two tables: installed models, and what the catalog offers besides."""
    offered = [entry for entry in models.catalog if not entry.installed]
    parts = []
    if models.installed:
        header = ("INSTALLED", "ARCHITECTURE", "WEIGHTS", "CONTEXT", "TOOLS", "THINKS", "ROLES", "SOURCE", "")
        parts.append(table(header, [_installed(model) for model in models.installed], right=(2, 3)))
    else:
        parts.append("No model is installed yet; the default one is fetched with the first request.")
    for model in models.installed:
        if model.ignored:
            unused = one_line(", ".join(model.ignored))
            parts.append(f"{one_line(model.name)} answers without {unused}: fuse it first, with mlx_lm.fuse.")
    if models.unlisted:
        parts.append(f"Not listed: {len(models.unlisted)} more. `fleetctl doctor` says why.")
    if models.importable:
        found = [(one_line(file.name), size(file.size_bytes), file.program) for file in models.importable]
        parts.append(table(("OF OTHER PROGRAMS", "SIZE", "PROGRAM"), found, right=(1,)))
        parts.append("Import one with `fleetctl models add NAME`; the other program's file stays as it is.")
    if offered:
        columns = ("CATALOG", "MEMORY", "CONTEXT", "TOOLS", "THINKS", "ROLES", "TIER", "FITS HERE")
        parts.append(table(columns, [_offered(entry) for entry in offered], right=(1, 2)))
        parts.append("\n".join(memory_lines(models.memory, models.evictable_bytes)))
        parts.append("Get one with `fleetctl models pull NAME`; any MLX model of the hub works by its id.")
    return "\n\n".join(parts)


def _abilities(model: InstalledModel | OfferedModel) -> tuple[str, str]:
    return model.tools or "-", "yes" if model.thinking else "-"


def _installed(model: InstalledModel) -> tuple[str, ...]:
    return (
        model.name,
        model.architecture or "?",
        size(model.weights_bytes),
        count(model.context_tokens),
        *_abilities(model),
        ", ".join(model.roles) or "-",
        model.source or "-",
        ", ".join(word for word, is_so in (("loaded", model.loaded), ("pinned", model.pinned)) if is_so),
    )


def _offered(entry: OfferedModel) -> tuple[str, ...]:
    return (
        entry.name,
        size(entry.memory_bytes),
        count(entry.context_tokens),
        *_abilities(entry),
        ", ".join(entry.roles) or "-",
        entry.tier or "-",
        _fits(entry),
    )


def _fits(entry: OfferedModel) -> str:
    if not entry.served:
        return "not served yet"
    return "yes" if entry.fits else "if memory is freed" if entry.fits_if_freed else "no"
