"""Settings changed while the daemon runs: what is written, what stays, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET

from fleetd import config
from fleetd.api.control.settings_file import SettingsFile
from fleetd.control.setting_view import SettingChange, SettingsView, SettingView
from fleetd.errors import ConfigError, InvalidValue

WRITTEN = """\
# my machine
[engine]
idle_unload_s = 600  # ten minutes
threads = 4

# the living room
[fleet]
name = "den"
"""


def settings_file(
    folder: Path, text: str | None = WRITTEN, env: dict[str, str] | None = None
) -> SettingsFile:
    path = folder / "fleetd.toml"
    if text is not None:
        path.write_text(text)
    return SettingsFile(path, config.load(path, environ=env or {}))


def of(view: SettingsView, key: str) -> SettingView:
    return next(one for one in view.settings if one.key == key)


def test_a_change_keeps_comments_order_and_all_other_keys(tmp_path: Path) -> None:
    view = settings_file(tmp_path).change(SettingChange("engine.idle_unload_s", 1200))
    assert (tmp_path / "fleetd.toml").read_text() == WRITTEN.replace("600", "1200")
    one = of(view, "engine.idle_unload_s")
    # The daemon runs with the old value until it is started again.
    assert (one.value, one.next) == (600, 1200)
    assert view.file == str(tmp_path / "fleetd.toml")


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("cache.quota_bytes", "8 GB", 8_000_000_000),
        ("fleet.local_only", True, True),
        ("engine.memory_fraction", 0.5, 0.5),
        ("speculation.mode", "off", "off"),
    ],
)
def test_a_daemon_that_starts_again_has_the_new_value(
    tmp_path: Path, key: str, value: Any, read: object
) -> None:
    found = settings_file(tmp_path, None)
    assert of(found.change(SettingChange(key, value)), key).next == read
    assert config.load(tmp_path / "fleetd.toml", environ={}).value(key) == read


def test_null_takes_a_key_out_and_the_default_counts_again(tmp_path: Path) -> None:
    view = settings_file(tmp_path).change(SettingChange("engine.idle_unload_s", None))
    assert of(view, "engine.idle_unload_s").next == 1800
    assert "idle_unload_s" not in (tmp_path / "fleetd.toml").read_text()
    assert "threads = 4" in (tmp_path / "fleetd.toml").read_text()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("engine.idle_unload_s", -1),
        ("engine.idle_unload_s", "soon"),
        ("engine.memory_fraction", 2.0),
        ("speculation.mode", "sometimes"),
        ("cache.quota_bytes", "much"),
        ("models.default", ""),
    ],
)
def test_a_value_that_the_file_could_not_hold_is_refused_and_nothing_is_written(
    tmp_path: Path, key: str, value: Any
) -> None:
    found = settings_file(tmp_path)
    with pytest.raises(InvalidValue, match=key):
        found.change(SettingChange(key, value))
    assert (tmp_path / "fleetd.toml").read_text() == WRITTEN


@pytest.mark.parametrize("key", ["http.allow_remote", "http.require_token", "engine.nonsense", "fleet"])
def test_what_opens_the_machine_is_not_changed_from_the_page(tmp_path: Path, key: str) -> None:
    with pytest.raises(InvalidValue):
        settings_file(tmp_path).change(SettingChange(key, True))
    assert (tmp_path / "fleetd.toml").read_text() == WRITTEN


def test_what_the_environment_sets_is_changed_there(tmp_path: Path) -> None:
    found = settings_file(tmp_path, env={"FLEETD_FLEET_NAME": "loft"})
    with pytest.raises(InvalidValue, match="FLEETD_FLEET_NAME"):
        found.change(SettingChange("fleet.name", "attic"))
    assert of(found.view(), "fleet.name").next is UNSET


def test_a_file_that_was_broken_meanwhile_says_so_and_is_not_touched(tmp_path: Path) -> None:
    found = settings_file(tmp_path)
    (tmp_path / "fleetd.toml").write_text("[engine]\nthread = 4\n")
    assert "engine.threads" in found.view().trouble
    with pytest.raises(ConfigError):
        found.change(SettingChange("fleet.name", "attic"))
    (tmp_path / "fleetd.toml").write_text("[engine\n")
    with pytest.raises(ConfigError):
        found.change(SettingChange("fleet.name", "attic"))
    assert (tmp_path / "fleetd.toml").read_text() == "[engine\n"


def test_a_file_elsewhere_that_is_linked_stays_linked(tmp_path: Path) -> None:
    (tmp_path / "dotfiles").write_text(WRITTEN)
    (tmp_path / "fleetd.toml").symlink_to(tmp_path / "dotfiles")
    settings_file(tmp_path, None).change(SettingChange("fleet.name", "attic"))
    assert (tmp_path / "fleetd.toml").is_symlink()
    assert '"attic"' in (tmp_path / "dotfiles").read_text()


def test_exactly_ten_settings_are_changed_from_the_page() -> None:
    assert len(config.EDITABLE) == 10
    assert set(config.EDITABLE) <= set(config.KEYS)
