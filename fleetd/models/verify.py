"""All checks of a model folder before MLX may touch it.

Other people made the files. They must be data: a folder that carries code, names code to be run, or holds a
format that can carry code is refused (ModelRefused). A folder that is damaged, inconsistent or impossible is
corrupt (ModelCorrupt). Both errors name the file and what to do.
"""

from __future__ import annotations

import hashlib
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fleetd import limits
from fleetd.errors import ModelCorrupt, ModelRefused
from fleetd.models import hub_cache, manifest
from fleetd.models.drafter_kinds import drafter_kind
from fleetd.models.folder import read_config
from fleetd.models.json_files import PULL_AGAIN, read_json
from fleetd.models.opening import open_regular
from fleetd.models.safetensors_header import read_header
from fleetd.models.weights import HEAD_NAME, missing_weights, weight_files

Progress = Callable[[int, int], None]

#: What a model was trained with, which nothing reads.
_DATA = frozenset({"data_config.json"})
_CODE = frozenset({".py", ".pyc", ".pyd", ".so", ".dylib", ".dll", ".sh"})
_PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".npz", ".npy", ".joblib"})
#: Settings that make a loader import code by name.
_CODE_KEYS = frozenset({"auto_map", "model_file", "custom_pipelines"})
#: mlx-lm imports ``mlx_lm.models.<model_type>``.
_MODEL_TYPE = re.compile(r"[A-Za-z0-9_-]{1,64}")
# Keys of numbers that say how many parts a model is built of; families have different words for them.
_COUNTED = re.compile(
    r"layers?$|^n_layer|blocks?$|experts?$|depth$|heads?$|stages?$|groups?$|num_inputs$", re.IGNORECASE
)
_MOST_COUNTED = 1 << 16
_BITS = range(1, 33)
# The largest number of a config: products of such numbers must stay within 64 bits.
_MOST = 1 << 53
# Most characters of a value in a message.
_SHOWN_CHARS = 80
_TAKE_SAFE = "Use a safetensors copy of the model: fleetctl models pull mlx-community/NAME."


def verify(
    path: Path,
    *,
    full: bool = False,
    record: Path | None = None,
    progress: Progress = lambda done, total: None,
) -> None:
    """Check a model folder.

    Args:
        full: hash each file again, even if its size and stat signature are those of its record.
        record: the file with the recorded hashes of a hub-cache model (``manifest.load``), if there is one.
        progress: called with the bytes that are hashed and that are to be hashed.

    Raises:
        ModelRefused: the folder carries or names code.
        ModelCorrupt: the folder is damaged; the message names the file.
    """
    try:
        _check_entries(path)
        check_configs(path)
        _check_weights(path)
        _check_content(path, full=full, record=record, progress=progress)
    except OSError as error:
        raise ModelCorrupt(
            f"{error.filename or path} cannot be read: {error.strerror}.", hint=PULL_AGAIN
        ) from None


# ---- What lies in the folder -----------------------------------------------------------------------------


def _check_entries(path: Path) -> None:
    if not path.is_dir():
        raise ModelCorrupt(f"{path} is not a folder.", hint=PULL_AGAIN)
    allowed = homes(path)
    pending, count = [path], 0
    while pending:
        for entry in sorted(pending.pop().iterdir()):
            count += 1
            if count > limits.MODEL_FILES:
                raise ModelRefused(f"{path} holds over {limits.MODEL_FILES} files.", hint=_TAKE_SAFE)
            if _check_entry(entry, allowed):
                pending.append(entry)


def homes(path: Path) -> list[Path]:
    """The folders in which a model's files may lie: its own, and the blobs of the cache around it."""
    found = [path.resolve()]
    if hub_cache.is_snapshot(path):
        found.append((path.parent.parent / "blobs").resolve())
    return found


def _check_entry(entry: Path, allowed: list[Path]) -> bool:
    """Check one entry. Returns True for a folder, whose entries are to be checked too."""
    suffix = entry.suffix.lower()
    if suffix in _CODE:
        raise ModelRefused(f"{entry} is code; model folders may hold data only.", hint=_TAKE_SAFE)
    if suffix in _PICKLES:
        raise ModelRefused(f"{entry} is of a format that can carry code.", hint=_TAKE_SAFE)
    if entry.is_symlink():
        try:
            target = entry.resolve(strict=True)
        except (OSError, RuntimeError):
            raise ModelCorrupt(f"{entry} is a link to nothing.", hint=PULL_AGAIN) from None
        if not any(target.is_relative_to(root) for root in allowed):
            raise ModelRefused(
                f"{entry} is a link to {target}, outside the model's folder.",
                hint="Copy the file into the folder, or name the folder it lies in.",
            )
        if target.is_dir():
            raise ModelRefused(f"{entry} is a link to a folder.", hint="Name that folder instead.")
    mode = entry.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ModelRefused(f"{entry} is neither a file nor a folder.", hint=_TAKE_SAFE)
    return stat.S_ISDIR(mode)


# ---- Configuration ---------------------------------------------------------------------------------------


def check_configs(path: Path) -> None:
    """Check only the small files, for a download that has not brought the weights yet."""
    config = read_config(path)
    for file in sorted(path.iterdir()):
        # Some file systems take all spellings of a name for one.
        name = file.name.lower()
        if name in _DATA:
            continue
        if name.endswith("config.json"):
            content = read_json(file, limits.MODEL_JSON_BYTES)
            if drafter_kind(config) is not None:
                # Publishers name their own code there. The module that runs is the engine's.
                content.pop("auto_map", None)
            _refuse_code_keys(file, content)
        elif name == "tokenizer.json":
            read_json(file, limits.MODEL_JSON_BYTES)
        elif name.endswith(".jinja") and file.stat().st_size > limits.MODEL_CONFIG_BYTES:
            raise ModelCorrupt(f"{file} is over {limits.MODEL_CONFIG_BYTES} bytes.", hint=PULL_AGAIN)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not _MODEL_TYPE.fullmatch(model_type):
        raise ModelCorrupt(f"{path / 'config.json'} names no model_type.", hint=PULL_AGAIN)
    _check_counts(path / "config.json", config)


def _check_counts(file: Path, config: dict[str, Any]) -> None:
    """Check the numbers that decide how large a model becomes: counts of parts, and bits of weights."""
    pending: list[tuple[str, Any]] = [("", config)]
    while pending:
        key, value = pending.pop()
        if isinstance(value, dict):
            pending += value.items()
        elif isinstance(value, list):
            pending += [(key, item) for item in value]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            most = (limits.LAYERS if "layer" in key else _MOST_COUNTED) if _COUNTED.search(key) else _MOST
            if value > most and (most < _MOST or isinstance(value, int)):
                shown = repr(value)[:_SHOWN_CHARS]
                raise ModelCorrupt(f"{file}: {key} is {shown}, more than any model has.", hint=PULL_AGAIN)
            if key == "bits" and value not in _BITS:
                raise ModelCorrupt(f"{file}: weights of {value} bits do not exist.", hint=PULL_AGAIN)


def _refuse_code_keys(file: Path, value: Any) -> None:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            if named := sorted(_CODE_KEYS & item.keys()):
                raise ModelRefused(
                    f"{file} asks for code to be run ({named[0]}).",
                    hint="fleetd runs no code from model folders. " + _TAKE_SAFE,
                )
            if item.get("trust_remote_code"):
                raise ModelRefused(
                    f"{file} asks for code to be trusted (trust_remote_code).", hint=_TAKE_SAFE
                )
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)


# ---- Weights ---------------------------------------------------------------------------------------------


def _check_weights(path: Path) -> None:
    if lacking := missing_weights(path):
        raise ModelCorrupt(f"{path / lacking}, a part of the weights, is missing.", hint=PULL_AGAIN)
    files = weight_files(path)
    owner: dict[str, str] = {}
    for file in sorted(path.iterdir()):
        if file.suffix.lower() != ".safetensors":
            continue
        tensors = read_header(file)
        if file not in files:
            continue  # no weights of the model, but checked: another program may open it
        for name in tensors:
            if name in owner:
                raise ModelCorrupt(
                    f"{name!r} is in {owner[name]} and in {file.name}.",
                    hint="If these are two sets of weights, keep one of them in the folder.",
                )
            owner[name] = file.name


# ---- Content ---------------------------------------------------------------------------------------------


def _check_content(path: Path, *, full: bool, record: Path | None, progress: Progress) -> None:
    own = path / manifest.FILE_NAME
    known = manifest.load(own)
    cached = hub_cache.is_snapshot(path)
    if known is None and cached and record is not None:
        try:
            known = manifest.load(record)
        except ModelCorrupt:
            known = None  # the record is only a cache, and is written again
    if known is not None:
        _check_hashes(path, known, full=full, progress=progress)
        if own.exists():
            _refuse_strangers(path, known)
    if full and cached:
        _check_blob_names(path, progress)


def _check_hashes(path: Path, known: manifest.Manifest, *, full: bool, progress: Progress) -> None:
    total = sum(record.size_bytes for record in known.files.values())
    again: list[tuple[Path, manifest.FileRecord]] = []
    for name, record in known.files.items():
        file = path / name
        if not manifest.is_part(name) or "/" in name:
            raise ModelCorrupt(f"The manifest of {path} lists {name!r}.", hint=PULL_AGAIN)
        try:
            now = file.stat()
        except OSError:
            raise ModelCorrupt(f"{file} is missing.", hint=PULL_AGAIN) from None
        if now.st_size != record.size_bytes:
            raise ModelCorrupt(
                f"{file} has {now.st_size} bytes and had {record.size_bytes} when it was installed.",
                hint=PULL_AGAIN,
            )
        if full or total <= limits.MODEL_REHASH_BYTES or not record.matches(now):
            again.append((file, record))
    to_hash, done = sum(record.size_bytes for _, record in again), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(done, to_hash)

    for file, record in again:
        if manifest.hash_file(file, advance) != record.blake3:
            raise ModelCorrupt(
                f"{file} has changed since it was installed (its checksum differs).", hint=PULL_AGAIN
            )


def _refuse_strangers(path: Path, known: manifest.Manifest) -> None:
    for file in manifest.part_files(path):
        if file.name not in known.files and file.name != HEAD_NAME:
            raise ModelCorrupt(f"{file} was not there when the model was installed.", hint=PULL_AGAIN)


def _check_blob_names(path: Path, progress: Progress) -> None:
    """Check blobs of the hub cache against their names: 64 hex digits are a SHA-256, 40 are git's hash."""
    blobs = (path.parent.parent / "blobs").resolve()
    found = [(file, file.resolve()) for file in manifest.part_files(path)]
    linked = [(file, blob) for file, blob in found if blob.parent == blobs]
    total, done = sum(blob.stat().st_size for _, blob in linked), 0
    for file, blob in linked:
        if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", blob.name):
            continue
        if len(blob.name) == 64:
            hasher = hashlib.sha256()
        else:
            hasher = hashlib.sha1(b"blob %d\0" % blob.stat().st_size, usedforsecurity=False)
        with open_regular(blob) as stream:
            while piece := stream.read(4 * limits.MIB):
                hasher.update(piece)
                done += len(piece)
                progress(done, total)
        if hasher.hexdigest() != blob.name:
            raise ModelCorrupt(
                f"{file} is damaged: its content does not have the checksum it is named by.",
                hint=f"Delete {blob} and download the model again.",
            )
