"""Download a model from the hub: only data files, all of one commit, each checked; resumed after a break.

If a repository has GGUF files and no safetensors, one of them is imported.

huggingface_hub supplies settings, tokens, retries and transfers. This module keeps the partial file, because
the library deletes its own when a download breaks off, and a shard of 5 GB should not start again for that.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import importlib
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fleetd import limits
from fleetd.errors import DownloadFailed, ModelCorrupt, ModelNotFound, ModelRefused, ModelUnsupported
from fleetd.models import hub_parts, install, manifest, names
from fleetd.models.drafter_kinds import drafter_kind
from fleetd.models.folder import read_config
from fleetd.models.hub_parts import RemoteFile
from fleetd.models.opening import open_regular
from fleetd.models.pull import hub_gguf, pulled_drafters
from fleetd.models.pull.pulled_drafters import PulledWeights
from fleetd.models.pull_lines import PullProgress, Report
from fleetd.models.vector_files import installed_name
from fleetd.models.verify import check_configs
from fleetd.models.weights import WEIGHTS_PATTERN

#: The files that a model consists of: no code, no pickles, of sub-folders only what makes vectors.
WANTED: Sequence[str] = ("*.json", WEIGHTS_PATTERN, "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja")
#: What a model was trained with.
NOT_WANTED = frozenset({"data_config.json"})
_GGUF = ".gguf"


class _OtherCommit(DownloadFailed):
    """The hub offers another version than it was asked for."""


def pull_hub(
    hub_id: str,
    revision: str | None,
    name: str,
    folder: str,
    models_dir: Path,
    report: Report,
    *,
    sha256: str = "",
) -> Path:
    """Install a model of the hub. The caller holds the lock.

    Args:
        revision: the commit to take; None means the one that ``main`` names at the first attempt.
        sha256: what the catalog says of its weights, in hex; "" if it says nothing.

    Raises:
        ModelNotFound, ModelUnsupported, DownloadFailed, DiskFull, ModelCorrupt, ModelRefused
    """
    staged = install.partial_folder(models_dir, folder)
    with install.clean_on_full_disk(models_dir, staged):
        with typed_failures(hub_id):
            commit, files = _listing(hub_id, revision, staged)
        _refuse_others(hub_id, files, sha256)
        listed = PulledWeights.listed(commit, files)
        pulled_drafters.refuse_changed(models_dir, folder, hub_id, listed)
        install.resume(staged, commit, [file.name for file in files])
        total = sum(file.size_bytes for file in files)
        is_gguf = files[0].name.lower().endswith(_GGUF)
        # For a moment the file and the imported model lie side by side.
        growth = limits.GGUF_GROWTH * total if is_gguf else 0
        install.require_space(models_dir, max(0, total - install.staged_bytes(staged)) + int(growth))
        _fetch_all(hub_id, commit, files, staged, report)
        if not is_gguf:
            with install.cleared_if_unsound(staged):
                placed = install.publish(
                    staged, models_dir, folder, name=name, source="hub", revision=commit, report=report
                )
            if drafter_kind(read_config(placed)) is not None:
                pulled_drafters.keep(models_dir, folder, listed)
            return placed
        first = staged / min(file.name for file in files)
        return _import(first, commit, name, folder, models_dir, report)


def _import(first: Path, commit: str, name: str, folder: str, models_dir: Path, report: Report) -> Path:
    """Import the GGUF file that has arrived, then delete it.

    The file stays only if the import failed for a reason that may pass, such as a full disk.
    """
    from fleetd.models.gguf.conversion import import_gguf

    made = install.beside(models_dir, folder, "imported")
    shutil.rmtree(made, ignore_errors=True)
    try:
        with install.clean_on_full_disk(models_dir, made):
            made.mkdir(parents=True)

            def advance(done: int, total: int) -> None:
                report(PullProgress(file=first.name, done_bytes=done, total_bytes=total, stage="importing"))

            import_gguf(first, made, progress=advance)
            target = install.publish(
                made, models_dir, folder, name=name, source="gguf", revision=commit, report=report
            )
    except (ModelCorrupt, ModelUnsupported):
        shutil.rmtree(first.parent, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    shutil.rmtree(first.parent, ignore_errors=True)
    return target


def _listing(hub_id: str, revision: str | None, staged: Path) -> tuple[str, list[RemoteFile]]:
    """The commit and its wanted files, small ones first: a bad config ends a pull before the weights come."""
    from huggingface_hub.errors import RevisionNotFoundError

    started = revision or install.staged_content(staged)
    try:
        return listing(hub_id, started)
    except (RevisionNotFoundError, _OtherCommit):
        if revision is not None or started is None:
            raise
        # The commit that an earlier attempt began with is gone; begin again.
        return listing(hub_id, None)


def listing(hub_id: str, revision: str | None) -> tuple[str, list[RemoteFile]]:
    """The commit that a revision names and its wanted files, small ones first. None: ``main``.

    Raises DownloadFailed, ModelUnsupported, and errors of the library (``typed_failures``).
    """
    from huggingface_hub import HfApi

    info: Any = HfApi().model_info(hub_id, revision=revision, files_metadata=True)
    commit = str(info.sha or "")
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise DownloadFailed(f"The hub names no commit for {hub_id}.", hint="Try again later.")
    if hub_parts.commit_of(revision) not in (None, commit):
        raise _OtherCommit(
            f"The hub was asked for {hub_id} as of {revision} and offers {commit}.",
            hint="A mirror that HF_ENDPOINT names may have one version of each model alone: unset it.",
        )
    siblings = info.siblings or []
    wanted = _remote_files(siblings, WANTED)
    if any(fnmatch.fnmatchcase(file.name, WEIGHTS_PATTERN) for file in wanted):
        return commit, wanted
    if any(str(sibling.rfilename).lower().endswith(_GGUF) for sibling in siblings):
        hub_gguf.refuse_architecture(hub_id, (getattr(info, "gguf", None) or {}).get("architecture"))
        top = [name for sibling in siblings if names.is_file_name(name := str(sibling.rfilename))]
        return commit, _remote_files(siblings, hub_gguf.choose(hub_id, top))
    raise ModelUnsupported(
        f"{hub_id} has no safetensors weights that fleetd reads ({WEIGHTS_PATTERN}), and no GGUF file.",
        hint="Look for a copy under mlx-community.",
    )


def _refuse_others(hub_id: str, files: Sequence[RemoteFile], sha256: str) -> None:
    """Raises ModelRefused if the weights are not those of ``sha256``, if it is not "". What arrives is held
    against what is listed."""
    for file in files:
        if sha256 and fnmatch.fnmatchcase(file.name, WEIGHTS_PATTERN) and file.sha256 != sha256:
            raise ModelRefused(
                f"{file.name} of {hub_id} has the SHA-256 {(file.sha256 or 'of no file')[:12]}…; the catalog "
                f"names {sha256[:12]}….",
                hint="The repository was changed since. Update fleetd, or take another drafter.",
            )


def _remote_files(siblings: list[Any], patterns: Sequence[str]) -> list[RemoteFile]:
    """The files whose names match a pattern, small ones first."""
    found = [file for sibling in siblings if (file := _remote_file(sibling, patterns)) is not None]
    return sorted(found, key=lambda file: (file.size_bytes, file.name))


def _remote_file(sibling: Any, patterns: Sequence[str]) -> RemoteFile | None:
    path = str(sibling.rfilename)
    name = installed_name(path)
    if name is None or name.lower() == manifest.FILE_NAME or not names.is_file_name(name):
        return None  # a publisher may not write a manifest of this machine
    if name in NOT_WANTED or not any(fnmatch.fnmatchcase(path.rpartition("/")[2], glob) for glob in patterns):
        return None
    if not isinstance(sibling.size, int) or sibling.size < 0:
        raise DownloadFailed(f"The hub does not say how large {name} is.", hint="Try again later.")
    large = sibling.lfs
    return RemoteFile(name, sibling.size, str(large.sha256) if large else None, sibling.blob_id, path)


def _fetch_all(hub_id: str, commit: str, files: list[RemoteFile], staged: Path, report: Report) -> None:
    total = sum(file.size_bytes for file in files)
    before = 0
    configs_checked = False
    for file in files:
        if fnmatch.fnmatchcase(file.name, WEIGHTS_PATTERN) and not configs_checked:
            configs_checked = True
            if (staged / "config.json").is_file():
                check_configs(staged)

        def advance(done: int, file: RemoteFile = file, before: int = before) -> None:
            report(
                PullProgress(file=file.name, done_bytes=before + done, total_bytes=total, stage="downloading")
            )

        # A file that is here may have come from a peer: the hub's hash decides.
        if not (staged / file.name).is_file() or not _has_its_hash(staged / file.name, file):
            fetch(hub_id, commit, file, staged, advance)
        before += file.size_bytes
        advance(file.size_bytes, before=before - file.size_bytes)


def fetch(hub_id: str, commit: str, file: RemoteFile, staged: Path, advance: Any) -> None:
    """Append the missing bytes to the partial file, check it, and give it its name. Raises DownloadFailed."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    partial = staged / f"{file.name}.part"
    have = partial.stat().st_size if partial.exists() else 0
    if have > file.size_bytes:
        partial.unlink()
        have = 0
    with partial.open("ab") as out:
        advance(have)
        bar = _Bar.reporting(advance, have)
        with typed_failures(hub_id):
            if have < file.size_bytes:
                http_get(
                    hf_hub_url(hub_id, file.path, revision=commit),
                    out,
                    resume_size=have,
                    headers=build_hf_headers(),
                    expected_size=file.size_bytes,
                    tqdm_class=bar,
                )
    if not _has_its_hash(partial, file):
        partial.unlink()
        raise DownloadFailed(
            f"{file.name} of {hub_id} arrived with another checksum than the hub lists, and was thrown away.",
            hint="Pull again; if it stays, something between here and the hub changes files.",
        )
    partial.rename(staged / file.name)


class _Bar:
    """A progress bar for huggingface_hub that reports to ``advance``."""

    def __init__(self, advance: Any, initial: int) -> None:
        self._advance = advance
        self.n = initial
        self.total: float | None = None

    @classmethod
    def reporting(cls, advance: Any, initial: int) -> Any:
        """A function in place of the bar's class: it takes the bar's settings and returns the bar."""
        return lambda *args, **settings: cls(advance, initial)

    def update(self, count: float | None = 1) -> None:
        self.n += int(count or 0)
        self._advance(self.n)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *failure: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **settings: None  # titles, colours, refreshes


def _has_its_hash(path: Path, file: RemoteFile) -> bool:
    if path.stat().st_size != file.size_bytes:
        return False
    if file.sha256 is not None:
        hasher, wanted = hashlib.sha256(), file.sha256
    elif file.git_sha1 is not None:
        hasher = hashlib.sha1(b"blob %d\0" % file.size_bytes, usedforsecurity=False)
        wanted = file.git_sha1
    else:
        return True  # the hub lists no hash; size and structure are still checked
    with open_regular(path) as stream:
        while piece := stream.read(4 * limits.MIB):
            hasher.update(piece)
    return hasher.hexdigest() == wanted


@contextlib.contextmanager
def typed_failures(hub_id: str, resumes: str = "Pull again; what has arrived is kept.") -> Iterator[None]:
    """Raises FleetError in place of the library's errors.

    Args:
        hub_id: the repository, or whatever else is asked for.
        resumes: how to go on after an error that may pass.
    """
    from huggingface_hub import errors

    # The library's own HTTP client: httpx, and httpx2 from its version 2 on.
    http = importlib.import_module(errors.HTTPError.__module__.partition(".")[0])
    try:
        yield
    except errors.GatedRepoError:
        raise DownloadFailed(
            f"{hub_id} is given only to people who accepted its terms.",
            hint="Accept them on the model's page, then run `hf auth login` or set HF_TOKEN, and pull again.",
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelNotFound(
            f"The hub has no model {hub_id}, or does not show it to you.",
            hint="Check the spelling; for a private model run `hf auth login` or set HF_TOKEN.",
            param="model",
        ) from None
    except errors.RevisionNotFoundError:
        raise DownloadFailed(
            f"The hub no longer has the pinned version of {hub_id}.", hint="Report this."
        ) from None
    except errors.HFValidationError:
        raise ModelNotFound(f"{hub_id!r} is not a hub id.", hint="A hub id is ORGANISATION/NAME.") from None
    except errors.OfflineModeIsEnabled:
        raise DownloadFailed(
            f"{hub_id} is not on this machine, and HF_HUB_OFFLINE forbids fetching it.",
            hint="Unset it and pull again.",
        ) from None
    except (http.TransportError, ConnectionError, TimeoutError) as error:
        raise DownloadFailed(
            f"The hub could not be reached, or stopped answering ({type(error).__name__}).",
            hint=f"Check the network. {resumes}",
        ) from None
    except http.HTTPError as error:
        raise DownloadFailed(f"The hub answered with an error: {error}.", hint=resumes) from None
    except OSError as error:
        if error.errno is not None:
            raise  # an error of the disk, not of the network
        raise DownloadFailed(f"The download of {hub_id} stopped: {error}.", hint=resumes) from None
