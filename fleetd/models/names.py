"""The names that a model may have, and the folder that a name means. Pure: nothing here looks at the disk.

A name becomes part of a path. So the only names are ``part`` and ``part/part`` of letters, digits, dot,
dash and underscore, starting with a letter or digit; ``..``, ``/etc`` and the like name no model.
"""

from __future__ import annotations

import re

from fleetd import limits
from fleetd.errors import InvalidValue

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_NAME = re.compile(rf"{_PART}(?:/{_PART})?")
_HUB_ID = re.compile(rf"{_PART}/{_PART}")
# Of what has some layers of a model only; no name has it.
_PART_MARK = "~"
_FILE = re.compile(rf"(?=.{{1,200}}\Z){_PART}")


def check(name: str) -> str:
    """The name, if a model may have it. Raises InvalidValue if not."""
    if not is_name(name):
        raise InvalidValue(
            f"{name[:80]!r} is not the name of a model.",
            hint="Give a name from `fleetctl models`, a hub id (ORGANISATION/NAME) or an absolute path.",
            param="model",
        )
    return name


def is_name(name: str) -> bool:
    """True if a model may have this name."""
    return bool(_NAME.fullmatch(name)) and not _ambiguous(name) and len(name) <= limits.MODEL_NAME_CHARS


def is_hub_id(name: str) -> bool:
    """True for ORGANISATION/NAME."""
    return bool(_HUB_ID.fullmatch(name)) and not _ambiguous(name) and len(name) <= limits.MODEL_NAME_CHARS


def _ambiguous(name: str) -> bool:
    """True for a name of two meanings: ``..`` climbs, and ``--`` stands for the slash in a folder's name."""
    return ".." in name or ("/" in name and "--" in name)


def part_name(name: str, digest: str) -> str:
    """What fetched layers of another machine's model go by, as another model may have its name here."""
    return f"{name}{_PART_MARK}{digest[:8]}"


def shown_name(name: str) -> str:
    """The model's own name, of one by ``part_name``; any other as it is."""
    return name.partition(_PART_MARK)[0]


def folder_name(name: str) -> str:
    """The folder inside the models folder that holds the model of this (checked) name."""
    return name.replace("/", "--")


def is_file_name(name: str) -> bool:
    """True if a peer may use this as a file name: plain, visible, in no sub-folder."""
    return bool(_FILE.fullmatch(name))


def is_path(ref: str) -> bool:
    """True for a place on the disk. Only programs of this machine's user may name one."""
    return ref.startswith(("/", "~"))
