"""What keeps a service from its files: folders that macOS guards, and versions that Homebrew deletes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fleetctl.connection.home import model_folders
from fleetctl.doctor import checks_machine
from fleetctl.exits import ClientError
from fleetctl.service import installation
from fleetctl.service.installation import interpreter, stable, started_by, troubles, withheld
from fleetctl.service.units import AGENT_PLIST, USER_UNIT, Values, render
from fleetctl.verbs import service as service_module


@pytest.fixture
def brewed(short_dir: Path) -> Path:
    """A venv that pipx made of Homebrew's Python: the link is that of pypa/pipx#633."""
    python = short_dir / "brew/Cellar/python@3.12/3.12.1_4/bin/python3.12"
    program = short_dir / "venv/bin/fleetd"
    for path in (python, program):
        path.parent.mkdir(parents=True)
    python.touch(0o755)
    (short_dir / "brew/opt").mkdir()
    (short_dir / "brew/opt/python@3.12").symlink_to("../Cellar/python@3.12/3.12.1_4")
    (program.parent / "python").symlink_to("python3.12")
    (program.parent / "python3.12").symlink_to(python)
    program.write_text(f"#!{program.parent}/python\nimport fleetd\n")
    program.chmod(0o755)
    return program


def test_an_environment_of_one_version_of_homebrews_python(brewed: Path, short_dir: Path) -> None:
    (found,) = troubles(brewed, {}, "darwin", short_dir / "somebody")
    assert not found.stops
    assert "3.12.1_4/bin/python3.12, which Homebrew deletes" in found.what
    assert f"{short_dir}/brew/opt/python@3.12/bin/python3.12" in found.fix
    (brewed.parent / "python3.12").unlink()
    (brewed.parent / "python3.12").symlink_to(short_dir / "brew/opt/python@3.12/bin/python3.12")
    assert troubles(brewed, {}, "darwin", short_dir / "somebody") == []


def test_a_python_that_an_update_has_moved(brewed: Path, short_dir: Path) -> None:
    """As in pypa/pipx#633 and #886: the environment is there, and its interpreter is not."""
    (short_dir / "brew/Cellar/python@3.12/3.12.1_4").rename(short_dir / "brew/Cellar/python@3.12/3.12.1_8")
    (found,) = troubles(brewed, {}, "linux", short_dir)
    assert found.stops
    assert "3.12.1_4/bin/python3.12, which is gone" in found.what
    plist = short_dir / "fleetd.agent.plist"
    plist.write_text(render(AGENT_PLIST, Values(brewed, short_dir / "home")))
    program = started_by(plist)
    assert program == brewed
    (told,) = checks_machine.installation(program, short_dir / "home")
    assert (told.level, "fleetctl service install" in told.fix) == ("fail", True)
    (told,) = checks_machine.installation(program, short_dir, installed=False)
    assert told.level == "warn"


def test_the_service_names_homebrews_lasting_path(brewed: Path, short_dir: Path) -> None:
    cellar = short_dir / "brew/Cellar/python@3.12/3.12.1_4/bin"
    kept = short_dir / "brew/opt/python@3.12/bin/python3.12"
    assert stable(cellar / "python3.12") == kept
    assert service_module.find_fleetd(cellar / "python3.12") == kept
    assert stable(cellar / "not-there") == cellar / "not-there"
    assert stable(brewed) == brewed


@pytest.mark.parametrize("folder", ["Documents", "Desktop", "Downloads", "Library/Mobile Documents"])
def test_a_persons_own_folders_are_withheld(short_dir: Path, folder: str) -> None:
    """Of saxenauts/syke#11 and tomcounsell/ai#2327, where a background service could not read such files."""
    place = short_dir / folder / "fleet/.venv/bin/fleetd"
    assert withheld(place, short_dir) == f"in {short_dir}/{folder}"
    assert withheld(short_dir / "fleet" / folder, short_dir) == ""
    place.parent.mkdir(parents=True)
    (short_dir / "link").symlink_to(short_dir / folder / "fleet")
    assert withheld(short_dir / "link/.venv", short_dir) != ""


def test_a_removable_disk_is_withheld(short_dir: Path) -> None:
    assert withheld(Path("/Volumes/Extreme SSD/models"), short_dir) == "on the disk /Volumes/Extreme SSD"
    assert withheld(Path("/Volumes"), short_dir) == ""
    assert withheld(Path("/opt/fleetd/bin/fleetd"), short_dir) == ""


def test_install_says_so_before(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv("HOME", str(short_dir))
    monkeypatch.setenv("FLEETD_MODELS_DIR", "/Volumes/Extreme SSD/models")
    program = short_dir / "Documents/fleetd"
    program.parent.mkdir()
    program.touch()
    values = Values(program, short_dir / "home")
    with pytest.raises(ClientError, match="keeps from programs in the background") as refused:
        service_module.check_lasting(values, anyway=False)
    assert "Full Disk Access" in refused.value.hint
    assert "--anyway" in refused.value.hint
    service_module.check_lasting(values, anyway=True)
    assert "The folder of models is on the disk /Volumes/Extreme SSD" in capsys.readouterr().err
    monkeypatch.setattr(sys, "platform", "linux")
    service_module.check_lasting(values, anyway=False)


def test_the_folders_that_a_daemon_reads(short_dir: Path) -> None:
    (short_dir / "fleetd.toml").write_text('[models]\ndir = "/Volumes/A"\nhub_cache = "/Volumes/B"\n')
    assert model_folders(short_dir, {"FLEETD_MODELS_HUB_CACHE": "/c"}) == {
        "the home": short_dir,
        "the folder of models": Path("/Volumes/A"),
        "the Hugging Face cache": Path("/c"),
    }
    (short_dir / "fleetd.toml").write_text("models = 3")
    assert list(model_folders(short_dir, {})) == ["the home"]


@pytest.mark.parametrize(
    ("text", "python"),
    [
        ("#!/opt/v/bin/python3 -I\n", "/opt/v/bin/python3"),
        ("#!/bin/sh\n'''exec' \"/a b/bin/python\" \"$0\" \"$@\"\n' '''\n", "/a b/bin/python"),
        ("\x7fELF", None),
        ("", None),
        ("#!\n", None),
    ],
)
def test_the_python_of_a_script(short_dir: Path, text: str, python: str | None) -> None:
    (short_dir / "fleetd").write_text(text)
    assert interpreter(short_dir / "fleetd") == (Path(python) if python is not None else None)
    assert interpreter(short_dir / "nothing") is None


def test_the_program_of_a_service_file(short_dir: Path) -> None:
    unit = short_dir / "fleetd.service"
    unit.write_text(render(USER_UNIT, Values(Path("/a b/100%/fleetd"), Path("/h"))))
    assert started_by(unit) == Path("/a b/100%/fleetd")
    for text in ("", "[Service]\n"):
        unit.write_text(text)
        assert started_by(unit) is None
    assert started_by(short_dir / "none.plist") is None
    (short_dir / "bad.plist").write_text("<plist")
    assert started_by(short_dir / "bad.plist") is None


def test_links_that_go_in_a_circle_end(short_dir: Path) -> None:
    (short_dir / "a").symlink_to("b")
    (short_dir / "b").symlink_to("a")
    assert len(list(installation.links(short_dir / "a"))) < 100
