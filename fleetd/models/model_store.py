"""The models on this machine: find, list, add and remove them, and start downloads in a child process.

A name is looked up in this order: the catalog, the models folder, the Hugging Face cache, LM Studio's
folders. An absolute path is taken as it is. Only ``digest``, ``file_records`` and ``verify`` hash files;
nothing here downloads or imports a heavy library in the daemon's process.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec

from fleetd.errors import InvalidValue, ModelCorrupt, ModelError, ModelNotFound
from fleetd.models import (
    added,
    catalog,
    hub_cache,
    hub_parts,
    install,
    manifest,
    model_names,
    names,
    other_stores,
    parts,
    pull_client,
)
from fleetd.models import digest as digests
from fleetd.models.digest import ModelDigest
from fleetd.models.folder import ModelFolder, Source, is_gguf, read_folder
from fleetd.models.hub_parts import HubCommit, HubPartOrder
from fleetd.models.other_stores import FoundFile
from fleetd.models.pull_lines import PullProgress
from fleetd.models.verify import Progress, verify

__all__ = ["ModelStore", "PullProgress"]

_RECORDS = ".records"
# What to do about a path at which no model is.
_MODEL_FOLDER = "Give a folder that holds config.json and *.safetensors."


class UnlistedFolder(msgspec.Struct, frozen=True):
    """A folder that looks like a model and is not listed."""

    path: Path
    # Why it is not listed, as a sentence.
    reason: str


class ModelStore:
    """The store. All methods but ``pull`` block; those that hash files block for longer than a moment.

    Args:
        models_dir: the folder that fleetd owns; it need not exist yet.
        hub_cache: the Hugging Face cache; None means the place that its own settings name.
    """

    def __init__(self, models_dir: Path, *, hub_cache: Path | None = None) -> None:
        self.models_dir = models_dir.expanduser().absolute()
        self._hub_cache = hub_cache

    @property
    def hub_cache(self) -> Path:
        """The folder of the Hugging Face cache."""
        return self._hub_cache if self._hub_cache is not None else hub_cache.location()

    # ---- Finding -----------------------------------------------------------------------------------------

    def resolve(self, ref: str) -> ModelFolder:
        """The folder that ``ref`` means.

        Raises:
            ModelNotFound: it is not on this machine; the hint says how to get it, or what it may have meant.
            InvalidValue: ``ref`` is neither a name nor an absolute path.
            ModelCorrupt: it is on this machine, and its config or weights cannot be read.
        """
        if names.is_path(ref):
            return self._at_path(ref)
        entry = catalog.find(ref)
        name = entry.name if entry is not None else names.check(ref)
        hub_id = _hub_id(name)
        for folder in self._candidates(name, hub_id):
            added.check_there(folder)
            if (folder / "config.json").is_file():
                return self._owned(folder, name)
        if hub_id is not None:
            wanted = entry.revision if entry is not None else None
            if (found := hub_cache.snapshot(self.hub_cache, hub_id, wanted)) is not None:
                return read_folder(found, name=name, source="hub", revision=found.name)
            for other, folder in other_stores.lm_studio_models():
                if other == hub_id:
                    return read_folder(folder, name=name, source="lm-studio", revision=None)
        raise self._not_found(ref, entry, hub_id)

    def _candidates(self, name: str, hub_id: str | None) -> Iterator[Path]:
        yield self.models_dir / names.folder_name(name)
        if "/" in name:
            yield self.models_dir / name
        if hub_id is not None and hub_id != name:
            yield self.models_dir / names.folder_name(hub_id)
            yield self.models_dir / hub_id

    def _owned(self, folder: Path, name: str) -> ModelFolder:
        """The model in a folder of the models folder. A folder without a manifest was put there by the user,
        or is a link that was added.
        """
        try:
            known = manifest.load(folder / manifest.FILE_NAME)
        except ModelCorrupt:
            known = None  # verify reports it; finding and removing must still work
        source: Source = known.source if known else "added" if folder.is_symlink() else "folder"
        revision = known.revision if known else None
        return read_folder(added.target(folder), name=name, source=source, revision=revision)

    def _at_path(self, ref: str) -> ModelFolder:
        path = Path(ref).expanduser()
        if is_gguf(path):
            folder = self.models_dir / gguf_folder_name(path)
            known = manifest.load(folder / manifest.FILE_NAME)
            if known is None and not path.is_file():
                raise ModelNotFound(f"There is no file {path}.", hint="Give a GGUF file.", param="model")
            if known is None or known.origin is None or not _same_file(path, known.origin):
                raise ModelNotFound(
                    f"{path} is not imported yet.",
                    hint=f"Import it: fleetctl models add {path}",
                    param="model",
                )
            return self._owned(folder, self._added_name(folder) or folder.name)
        if not path.is_absolute() or not path.is_dir():
            raise ModelNotFound(f"There is no folder {path}.", hint=_MODEL_FOLDER, param="model")
        path = path.resolve() if not hub_cache.is_snapshot(path) else path
        if (name := self._added_name(path)) is not None:
            return self._owned(self.models_dir / name, name)
        if path.parent == self.models_dir.resolve():
            return self.resolve(self._name_of(path))
        if not (path / "config.json").exists():
            raise ModelNotFound(f"There is no model in {path}.", hint=_MODEL_FOLDER, param="model")
        return read_folder(path, name=str(path), source="folder", revision=None)

    def _added_name(self, folder: Path) -> str | None:
        """The name by which a folder was added; None if it was not."""
        named = added.links(self.models_dir).items()
        return next((name for name, target in named if target == folder), None)

    def _not_found(self, ref: str, entry: catalog.CatalogEntry | None, hub_id: str | None) -> ModelNotFound:
        if entry is not None or hub_id is not None:
            return ModelNotFound(
                f"The model {ref!r} is not on this machine.",
                hint=f"Get it with: fleetctl models pull {ref}",
                param="model",
            )
        near = catalog.nearest(ref, (folder.name for folder in self.installed()))
        return ModelNotFound(
            f"There is no model {ref!r}.",
            hint=f"Did you mean {' or '.join(near)}?" if near else "`fleetctl models` lists what there is.",
            param="model",
        )

    def in_part(self, ref: str) -> ModelFolder:
        """The part of a model with which this machine answers together with others, if the whole is not here.

        Raises ModelNotFound, InvalidValue, ModelCorrupt.
        """
        try:
            return self.resolve(ref)
        except ModelNotFound:
            entry = None if names.is_path(ref) else catalog.find(ref)
            hub_id = _hub_id(entry.name if entry is not None else ref)
            commit = entry.revision if entry is not None else None
            found = hub_parts.own(self.models_dir, hub_id, commit) if hub_id is not None else None
            if found is None:
                raise
            return found

    def outline_order(self, ref: str) -> HubPartOrder | None:
        """The order for ``pull_part`` after which ``in_part`` finds a model; None if it is not of the hub, or
        here as a whole."""
        if names.is_path(ref) or not self.needs_pull(ref):
            return None
        entry = catalog.find(ref)
        if entry is not None and entry.name in catalog.wheels():
            return None
        name = entry.name if entry is not None else ref
        commit = hub_parts.commit_of(entry.revision) if entry is not None else None
        return HubPartOrder(hub_id, commit, own=True) if (hub_id := _hub_id(name)) is not None else None

    def at_commit(self, at: HubCommit) -> ModelFolder | None:
        """The whole model of this state of a repository, if it is here."""
        return next(
            (
                folder
                for folder in self.installed()
                if folder.source == "hub"
                and folder.revision == at.commit
                and _hub_id(folder.name) == at.hub_id
            ),
            None,
        )

    def answerable(self) -> list[ModelFolder]:
        """All models that this machine can answer with: those that are ``installed``, and own parts."""
        whole = self.installed()
        names_here = {folder.name for folder in whole}
        found = (
            hub_parts.own(self.models_dir, part.listing.at.hub_id)
            for path, part in hub_parts.all_of(self.models_dir)
            if parts.is_own(path) and part.listing.at.name not in names_here
        )
        own = {folder.name: folder for folder in found if folder is not None}
        return [*whole, *own.values()]

    def parts_here(self) -> list[parts.HeldPart]:
        """What there is of models whose layers are here in part."""
        found = (parts.held(path) for path in parts.all_of(self.models_dir))
        return [each for each in found if each is not None]

    def needs_pull(self, ref: str) -> bool:
        """True if ``pull`` could bring a model that is not on this machine, by name, hub id or GGUF file."""
        try:
            self.resolve(ref)
        except ModelNotFound:
            if names.is_path(ref):
                path = Path(ref).expanduser()
                return is_gguf(path) and path.is_file()
            return catalog.find(ref) is not None or names.is_hub_id(ref)
        except (InvalidValue, ModelError):
            return False
        return False

    def installed(self) -> list[ModelFolder]:
        """All models that could be loaded, sorted by name. ``resolve`` gives each folder for its name."""
        return self._survey()[0]

    def unlisted(self) -> list[UnlistedFolder]:
        """The folders that look like models and are not among those of ``installed``, and why."""
        return self._survey()[1]

    def _survey(self) -> tuple[list[ModelFolder], list[UnlistedFolder]]:
        found: dict[str, ModelFolder] = {}
        unlisted: list[UnlistedFolder] = []
        for name, folder, read in self._places():
            own = folder.is_relative_to(self.models_dir)
            if name in found and not own:
                continue  # a copy in another place; ``resolve`` takes the earlier one
            try:
                self._check_leads(name, folder, own=own)
                found[name] = read()
            except (InvalidValue, ModelError) as error:
                if own or isinstance(error, InvalidValue):  # other programs keep other models too
                    unlisted.append(UnlistedFolder(folder, error.message))
        return sorted(found.values(), key=lambda model: model.name.lower()), unlisted

    def _places(self) -> Iterator[tuple[str, Path, Callable[[], ModelFolder]]]:
        """All places of models, in the order of ``resolve``: name, folder, and a function that reads it."""
        for folder in self._folders():
            name = self._name_of(folder)
            yield name, folder, partial(self._owned, folder, name)
        for hub_id, folder in hub_cache.models(self.hub_cache):
            entry = catalog.find(hub_id)
            name = entry.name if entry is not None else hub_id
            yield name, folder, partial(_of_hub, folder, name)
        for hub_id, folder in other_stores.lm_studio_models():
            yield (
                hub_id,
                folder,
                partial(read_folder, folder, name=hub_id, source="lm-studio", revision=None),
            )

    def _check_leads(self, name: str, folder: Path, *, own: bool) -> None:
        """Raises InvalidValue if a request for ``name`` would not get this folder."""
        names.check(name)
        if model_names.stands_for_others(name):
            raise InvalidValue(f"{name!r} means something else in requests.")
        hub_id = _hub_id(name)
        if hub_id is None and not own:
            raise InvalidValue(f"{name!r} is no ORGANISATION/NAME, by which such folders are found.")
        places = (place for place in self._candidates(name, hub_id) if (place / "config.json").is_file())
        first = next(places, None if own else folder)
        if first is None or not first.samefile(folder):
            raise InvalidValue(f"A request for {name!r} gets {first or 'nothing'}.")

    def importable(self) -> list[FoundFile]:
        """The GGUF files of other programs on this machine that are not imported yet."""
        return [file for file in other_stores.gguf_files() if self.needs_pull(str(file.path))]

    def _folders(self) -> Iterator[Path]:
        """The model folders in the models folder: at its top, or one level down as ORGANISATION/NAME.

        The folder of an imported file is left out if a name was given to it: its link is listed.
        """
        named = set(added.links(self.models_dir).values())
        for top in _visible(self.models_dir):
            if top in named:
                continue
            if (top / "config.json").is_file():
                yield top
            else:
                yield from (inner for inner in _visible(top) if (inner / "config.json").is_file())

    def _name_of(self, folder: Path) -> str:
        """The name by which ``resolve`` finds this folder."""
        relative = folder.relative_to(self.models_dir) if folder.is_relative_to(self.models_dir) else None
        name = "/".join(relative.parts) if relative is not None else folder.name
        entry = catalog.find(name) or catalog.find(name.replace("--", "/", 1))
        if entry is not None:
            return entry.name
        try:
            known = manifest.load(folder / manifest.FILE_NAME)
        except ModelCorrupt:
            known = None
        # The manifest may only say how the name of its own folder is to be read.
        if known is not None and names.folder_name(known.name) == folder.name:
            return known.name
        return name

    def part_bytes(self) -> int:
        """Bytes of the disk that parts of other machines' models may take."""
        return parts.free_bytes(self.models_dir)

    # ---- Changing ----------------------------------------------------------------------------------------

    def sweep(self) -> list[str]:
        """Put right what killed processes left. Returns the folders that were brought back."""
        back = install.sweep(self.models_dir)
        self.drop_parts()
        return back

    def drop_parts(self) -> None:
        """Delete the parts of models that are here as a whole."""
        if any(parts.all_of(self.models_dir)):
            folders = self.installed()
            parts.remove_whole(self.models_dir, frozenset(self.known_digest(each) for each in folders))
            for path, part in list(hub_parts.all_of(self.models_dir)):
                if self.at_commit(part.listing.at) is not None:
                    shutil.rmtree(path, ignore_errors=True)

    def pull(self, ref: str) -> AsyncGenerator[PullProgress, None]:
        """Bring a model to this machine, in a child process; ``aclose()`` ends it.

        Yields nothing if the model is on this machine. The next call resumes a cancelled hub download.

        Raises:
            ModelNotFound, DownloadFailed, DiskFull, ModelCorrupt, ModelRefused, ModelUnsupported
        """
        return pull_client.pull(ref, self.models_dir, self._hub_cache)

    def pull_part(self, order: HubPartOrder) -> AsyncGenerator[PullProgress, None]:
        """Bring layers of a model of the hub to this machine, in a child process; ``aclose()`` ends it, and
        the next call goes on with the layer that it was at. Raises as ``pull``."""
        return pull_client.pull_part(order, self.models_dir)

    def locate(self, ref: str) -> FoundFile | Path:
        """The place that ``ref`` names for ``add``: a path, or a file of another program by its name.

        Raises:
            InvalidValue: ``ref`` is neither.
        """
        if names.is_path(ref):
            return Path(ref).expanduser()
        for file in other_stores.gguf_files():
            if file.name == ref:
                return file
        raise InvalidValue(
            f"{ref[:80]!r} is neither an absolute path nor a file of LM Studio or Ollama.",
            hint="`fleetctl models` lists the files that were found.",
            param="path",
        )

    def name_for(self, place: FoundFile | Path, name: str) -> str:
        """The name for ``add`` to give: ``name``, or one made of the folder's or file's own if that is "".

        Raises:
            InvalidValue: the name may not be given, or another model has it.
        """
        if isinstance(place, FoundFile):
            chosen = name or added.usual_name(place.name, prefix=place.program.lower().replace(" ", "-"))
        else:
            chosen = name or added.usual_name(place.name)
        added.check_name(chosen)
        known = added.links(self.models_dir).get(chosen)
        if os.path.lexists(self.models_dir / chosen) and (known is None or known != self._behind(place)):
            raise added.taken(chosen)
        return chosen

    def _behind(self, place: FoundFile | Path) -> Path | None:
        """The folder that a link to ``place`` would name; None for a file that is not imported."""
        path = place.path if isinstance(place, FoundFile) else place
        if is_gguf(path):
            folder = self.models_dir / gguf_folder_name(path)
            return folder if folder.is_dir() else None
        return path if hub_cache.is_snapshot(path) else path.resolve()

    def add(self, place: FoundFile | Path, name: str) -> ModelFolder:
        """Give a folder or an imported file a name, by which it is a model like any other.

        Raises:
            InvalidValue: the name may not be given, or the model has another.
            ModelNotFound, ModelCorrupt, ModelRefused: the place holds no model, or one that may not be used.
        """
        path = place.path if isinstance(place, FoundFile) else place
        folder = self._at_path(str(path))
        if folder.name == name:
            return folder
        if names.is_path(folder.name) or folder.source == "gguf":
            verify(folder.path)
            added.make_link(self.models_dir, name, folder.path)
            return self.resolve(name)
        raise InvalidValue(
            f"{path} is the model {folder.name!r} already.",
            hint=f"Use it by that name: fleetctl chat -m {folder.name}",
            param="path",
        )

    def remove(self, ref: str) -> None:
        """Delete a model in the models folder, and parts of it. Of a folder that was added the name goes.

        Raises:
            ModelNotFound: it is not on this machine.
            InvalidValue: it lies elsewhere, where fleetd deletes nothing.
        """
        name = self._added_name(Path(ref)) if names.is_path(ref) else names.check(ref)
        if name is not None and (link := self.models_dir / names.folder_name(name)).is_symlink():
            self._remove_added(link)
            return
        in_parts = name is not None and parts.remove(self.models_dir, name)
        try:
            folder = self.resolve(ref)
        except ModelCorrupt:
            folder = self._damaged(ref)
        except ModelNotFound:
            if in_parts:
                return
            raise
        home = self.models_dir.resolve()
        if not folder.path.resolve().is_relative_to(home) or folder.path.is_symlink():
            how = (
                f"It belongs to the Hugging Face cache: hf cache rm model/{folder.name}"
                if folder.source == "hub"
                else f"Delete the folder {folder.path} yourself."
            )
            raise InvalidValue(f"{folder.name} is not in {self.models_dir}.", hint=how, param="model")
        self._delete(folder.path)

    def _remove_added(self, link: Path) -> None:
        """Remove an added name, and the folder behind it if fleetd made it by an import."""
        folder = added.target(link)
        link.unlink()
        if folder.parent == self.models_dir and folder.is_dir():
            self._delete(folder)
        self._record_path(folder).unlink(missing_ok=True)

    def _delete(self, folder: Path) -> None:
        """Move the folder away in one step, then delete it: a crash in between leaves no half model."""
        retired = install.beside(self.models_dir, folder.name, "removed")
        retired.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(retired, ignore_errors=True)
        folder.rename(retired)
        shutil.rmtree(retired)
        self._record_path(folder).unlink(missing_ok=True)

    def _damaged(self, ref: str) -> ModelFolder:
        """The folder of a model that can no longer be read, for removal. Raises ModelNotFound."""
        entry = catalog.find(ref)
        name = entry.name if entry is not None else names.check(ref)
        for folder in self._candidates(name, entry.hub_id if entry is not None else None):
            if (folder / "config.json").is_file():
                return ModelFolder(name, folder, "folder", None, {}, 0, 0.0)
        raise self._not_found(ref, entry, None)

    # ---- Content -----------------------------------------------------------------------------------------

    def record_path(self, folder: ModelFolder) -> Path:
        """The file that keeps the hashes of a folder's files if fleetd did not install the folder."""
        return self._record_path(folder.path)

    def _record_path(self, folder: Path) -> Path:
        key = hashlib.sha256(str(folder).encode()).hexdigest()[:32]
        return self.models_dir / _RECORDS / f"{key}.json"

    def digest(self, folder: ModelFolder) -> ModelDigest:
        """The digest of the model's content. Hashes only files that have changed since the last time.

        That of a part is of what the hub lists, which is in ``hex`` alone.
        """
        if folder.source == "part":
            return ModelDigest(hub_parts.read(folder.path).listing.digest, "", "", "")
        return digests.digest(folder, self.record_path(folder))

    def known_digest(self, folder: ModelFolder) -> str:
        """The digest, or "" if a file had to be hashed for it."""
        return digests.remembered(folder.path, self.record_path(folder))

    def file_records(self, folder: ModelFolder) -> dict[str, manifest.FileRecord]:
        """Records of the files that decide what the model computes, by name. Hashes as ``digest`` does."""
        return digests.records(folder, self.record_path(folder))

    def verify(
        self, folder: ModelFolder, *, full: bool = False, progress: Progress = lambda done, total: None
    ) -> None:
        """Check a folder by ``verify.verify``, with its record. Raises ModelCorrupt or ModelRefused."""
        verify(folder.path, full=full, record=self.record_path(folder), progress=progress)


def _hub_id(name: str) -> str | None:
    """The hub id of a model by its name here; None if it has none."""
    entry = catalog.find(name)
    return entry.hub_id if entry is not None else name if names.is_hub_id(name) else None


def _of_hub(folder: Path, name: str) -> ModelFolder:
    """The model in a snapshot of the hub's cache. Raises ModelCorrupt, also if it is no language model."""
    model = read_folder(folder, name=name, source="hub", revision=folder.name)
    if "model_type" not in model.config:
        raise ModelCorrupt(f"{folder / 'config.json'} names no model_type.")
    return model


def gguf_folder_name(path: Path) -> str:
    """The name of an imported file's folder: its own, and part of its path's hash to tell namesakes apart."""
    stem = "".join(
        char if char.isascii() and (char.isalnum() or char in "._-") else "-" for char in path.stem
    )
    stem = stem.lstrip("._-").replace("..", ".").replace("--", "-")[:120] or "gguf"
    return f"{stem}-{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:6]}"


def _same_file(path: Path, origin: manifest.Origin) -> bool:
    """True if the imported file is unchanged, or gone: its import is still good."""
    try:
        stat = path.stat()
    except OSError:
        return True
    return (stat.st_size, stat.st_mtime_ns) == (origin.size_bytes, origin.mtime_ns)


def _visible(folder: Path) -> list[Path]:
    try:
        return sorted(
            entry for entry in folder.iterdir() if not entry.name.startswith(".") and entry.is_dir()
        )
    except OSError:
        return []
