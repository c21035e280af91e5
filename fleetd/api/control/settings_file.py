"""The settings file of a daemon that runs: what it says by now, and a change of one key in it.

The daemon reads its settings at its start, so a change counts from the next one. What a person wrote into the
file, comments and order included, stays.
"""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec

from fleetd import config
from fleetd.config import Config
from fleetd.control.setting_view import SettingChange, SettingsView, SettingView
from fleetd.errors import ConfigError, InvalidValue
from fleetd.storage import durable


class SettingsFile:
    """The file of ``running``, the settings that the daemon has. Every method blocks."""

    def __init__(self, path: Path, running: Config) -> None:
        # A link to a file elsewhere stays one.
        self._path = path.resolve()
        self._running = running
        self._lock = threading.Lock()

    def view(self) -> SettingsView:
        """The settings that the daemon runs with, and those that it would have after a restart."""
        views, trouble = config.setting_views(self._running), ""
        try:
            after = self._parsed(config.read_text(self._path))
        except ConfigError as error:
            trouble = f"{error.message} {error.hint}".strip()
        else:
            views = [_with_next(view, after) for view in views]
        return SettingsView(views, str(self._path), trouble)

    def change(self, change: SettingChange) -> SettingsView:
        """Write one key, or take it out of the file.

        Raises:
            InvalidValue: the key may not be changed here, or the value cannot be used.
            ConfigError: the file has an error, or cannot be written; it is as it was.
            DiskFull: it is as it was.
        """
        if change.key not in config.EDITABLE:
            raise InvalidValue(
                f"{change.key[:100]!r} is not changed here.", hint=f"Change it in {self._path}.", param="key"
            )
        origin = self._running.origin(change.key)
        if change.key in config.overrides(self._running):
            raise InvalidValue(
                f"{change.key} is set by the {origin}, which wins over the file.",
                hint="Change it there.",
                param="key",
            )
        with self._lock:
            text = _edited(config.read_text(self._path), self._path, change)
            try:
                self._parsed(text)
            except ConfigError as error:
                if error.param != change.key:
                    raise  # the file had an error before
                wanted = config.KEYS[change.key]
                raise InvalidValue(
                    f"{change.key} cannot be {change.value!r}.",
                    hint=f"Type: {wanted.kind}. {wanted.why}",
                    param="value",
                ) from error
            durable.replace(self._path, text.encode())
        return self.view()

    def _parsed(self, text: str) -> Config:
        return config.of_text(text, self._path, config.overrides(self._running))


def _with_next(view: SettingView, after: Config) -> SettingView:
    value = after.value(view.key)
    return view if value == view.value else msgspec.structs.replace(view, next=value)


def _edited(text: str, path: Path, change: SettingChange) -> str:
    """The file's text with one key changed. Raises ConfigError if it is not valid TOML."""
    # Imported late: few daemons ever change their file.
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    section, _, name = change.key.partition(".")
    try:
        document = tomlkit.parse(text)
        if change.value is None:
            if isinstance(body := document.get(section), dict):
                body.pop(name, None)
        else:
            if section not in document:
                document[section] = tomlkit.table()
            document[section][name] = change.value
        return tomlkit.dumps(document)
    except (TOMLKitError, TypeError) as error:
        raise ConfigError(
            f"The settings file {path} cannot be changed: {error}.", hint="Correct it by hand."
        ) from error
