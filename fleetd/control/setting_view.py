"""The bodies of /fleet/v1/settings: the settings of the daemon that runs, and a change of one."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType


class SettingView(msgspec.Struct, frozen=True):
    """One setting."""

    key: str = ""
    # What the daemon runs with.
    value: Any = None
    default: Any = None
    # Where the value came from: "default", a file, a variable or a flag.
    origin: str = ""
    # The type in a word or two: "true or false", "bytes".
    type: str = ""
    # The variable that sets it.
    env: str = ""
    # What it is for.
    why: str = ""
    # Whether PATCH changes it.
    editable: bool = False
    # What it will be after a restart, if the file says something else by now.
    next: Any | UnsetType = UNSET


class SettingsView(msgspec.Struct, frozen=True):
    """All settings."""

    settings: list[SettingView] = []
    # The full path of the settings file, which need not exist.
    file: str = ""
    # Why the daemon would not start with the file as it is now; "" if it would.
    trouble: str = ""


class SettingChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of PATCH /fleet/v1/settings: null takes the key out of the file."""

    key: Annotated[str, Meta(min_length=1, max_length=100)]
    value: Annotated[str, Meta(max_length=1000)] | bool | int | float | None
