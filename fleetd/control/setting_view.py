"""The body of GET /fleet/v1/settings: what `fleetd config show` prints, from the daemon that runs."""

from __future__ import annotations

from typing import Any

import msgspec


class SettingView(msgspec.Struct, frozen=True):
    """``origin``: where the value came from: "default", a file, a variable or a flag. ``why``: its use."""

    key: str = ""
    value: Any = None
    default: Any = None
    origin: str = ""
    type: str = ""
    env: str = ""
    why: str = ""


class SettingsView(msgspec.Struct, frozen=True):
    settings: list[SettingView] = []
