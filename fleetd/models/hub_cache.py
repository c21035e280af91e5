"""The Hugging Face cache, read only: the models that lie complete in it.

``models--ORG--NAME/refs/main`` names a commit; ``snapshots/COMMIT/`` holds links into ``blobs/``, each
named by its content's hash. A download in progress shows as links that are not there yet.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from fleetd import limits
from fleetd.errors import ModelCorrupt, ModelRefused
from fleetd.models.drafter_kinds import drafter_kind
from fleetd.models.json_files import read_json
from fleetd.models.opening import read_regular
from fleetd.models.weights import missing_weights, weight_files

# Most bytes of a file that names a commit; a commit has 40.
_REF_BYTES = 256
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def location(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder in which huggingface_hub keeps its cache on this machine."""
    for key in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if found := environment.get(key):
            return Path(found).expanduser()
    if found := environment.get("HF_HOME"):
        return Path(found).expanduser() / "hub"
    base = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "huggingface" / "hub"


def snapshot(cache: Path, hub_id: str, revision: str | None = None) -> Path | None:
    """A complete snapshot of a model, or None: that of ``revision``, else of ``main``, else the newest."""
    root = cache / f"models--{hub_id.replace('/', '--')}"
    if revision is not None:
        wanted = root / "snapshots" / revision
        if is_complete(wanted):
            return wanted
    try:
        main = read_regular(root / "refs" / "main", _REF_BYTES).decode("ascii", "replace").strip()
    except OSError:
        main = ""
    # The file's content becomes part of a path: only a plain name may.
    if main.isalnum() and is_complete(root / "snapshots" / main):
        return root / "snapshots" / main
    try:
        others = sorted((root / "snapshots").iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        return None
    return next((other for other in others if is_complete(other)), None)


def is_complete(folder: Path) -> bool:
    """True if the config, a tokenizer and all files of weights are there. A drafter for hidden states needs
    no tokenizer."""
    try:
        if not any((folder / name).is_file() for name in _TOKENIZERS):
            config = read_json(folder / "config.json", limits.MODEL_CONFIG_BYTES)
            if drafter_kind(config) is None:
                return False
        elif not (folder / "config.json").is_file():
            return False
        return not missing_weights(folder) and all(file.is_file() for file in weight_files(folder))
    except (ModelCorrupt, ModelRefused):
        return False


def models(cache: Path) -> Iterator[tuple[str, Path]]:
    """All complete models: hub id and snapshot of each."""
    try:
        roots = sorted(cache.glob("models--*"))
    except OSError:
        return
    for root in roots:
        hub_id = root.name.removeprefix("models--").replace("--", "/", 1)
        if (found := snapshot(cache, hub_id)) is not None:
            yield hub_id, found


def is_snapshot(folder: Path) -> bool:
    """True if a folder is a snapshot inside such a cache: its links may point to the blobs beside it."""
    return folder.parent.name == "snapshots" and (folder.parent.parent / "blobs").is_dir()
