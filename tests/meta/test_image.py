"""The Dockerfile, read without Docker: what it copies is there, what it calls exists, and it is not root.

Nothing is built. `.ci/image` builds it, which continuous integration does.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))
INSTALL = (REPO / "docs" / "install.md").read_text(encoding="utf-8")
TARGETS = ("cpu", "cuda")


@dataclass(frozen=True)
class Stage:
    """One stage of the build: the stage or image that it begins from, and its instructions in order."""

    base: str
    lines: list[tuple[str, str]]

    def all(self, instruction: str) -> list[str]:
        return [rest for name, rest in self.lines if name == instruction]


def stages() -> dict[str, Stage]:
    text = (REPO / "Dockerfile").read_text(encoding="utf-8")
    plain = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, Stage] = {}
    for line in filter(None, map(str.strip, plain.splitlines())):
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            found[name] = Stage(base, [])
        elif found:
            list(found.values())[-1].lines.append((instruction, rest.strip()))
    return found


def chain(target: str) -> list[Stage]:
    """The stages that a target consists of, the first one first."""
    known = stages()
    stage = known[target]
    return [*(chain(stage.base) if stage.base in known else []), stage]


def copied() -> list[str]:
    return [source for line in stages()["wheel"].all("COPY") for source in shlex.split(line)[:-1]]


def test_every_path_that_is_copied_is_there_and_is_not_ignored() -> None:
    ignored = (REPO / ".dockerignore").read_text(encoding="utf-8").split("\n")
    assert copied()
    for source in copied():
        assert (REPO / source).exists(), source
        assert f"!{source}" in ignored, source


def test_all_that_the_wheel_is_built_from_is_copied() -> None:
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    project = PROJECT["project"]
    needed = {*wheel["packages"], *wheel["force-include"], *project["license-files"], project["readme"]}
    assert needed | {"pyproject.toml"} == set(copied())


def test_the_version_is_given_under_the_name_that_the_build_asks_for() -> None:
    (line,) = stages()["wheel"].all("ENV")
    assert line == "SETUPTOOLS_SCM_PRETEND_VERSION_FOR_FLEETD=${VERSION}"
    (version,) = stages()["wheel"].all("ARG")
    assert version == f"VERSION={PROJECT['tool']['hatch']['version']['fallback-version']}"


@pytest.mark.parametrize("target", TARGETS)
def test_it_runs_the_daemon_as_a_user_who_is_not_root(target: str) -> None:
    parts = chain(target)
    commands = [json.loads(line) for stage in parts for line in stage.all("CMD")]
    assert commands == [["fleetd", "run"]]
    assert "fleetd" in PROJECT["project"]["scripts"]
    # The last instruction, so that nothing after it is done as another user.
    assert parts[-1].lines[-1] == ("USER", "10001:10001")
    (home,) = [line for stage in parts for line in stage.all("VOLUME")]
    assert any(f"FLEETD_HOME={home} " in line for stage in parts for line in stage.all("ENV"))
    (made,) = [line for stage in parts for line in stage.all("RUN") if "useradd" in line]
    assert "--uid 10001" in made
    assert made.endswith(f"--owner fleetd --group fleetd --mode 0700 {home}")


@pytest.mark.parametrize("target", TARGETS)
def test_its_health_is_what_a_command_of_fleetctl_says(target: str) -> None:
    (check,) = [line for stage in chain(target) for line in stage.all("HEALTHCHECK")]
    program, verb = json.loads(check.partition(" CMD ")[2])
    assert program == "fleetctl"
    assert f"\n## fleetctl {verb}\n" in (REPO / "docs" / "fleetctl.md").read_text(encoding="utf-8")


def test_the_extra_of_the_cuda_image_exists() -> None:
    (installed,) = [line for line in stages()["cuda"].all("RUN") if "pip install" in line]
    extras = re.findall(r"fleetd\[(\w+)\]", installed)
    assert extras == ["cuda"]
    assert set(extras) <= set(PROJECT["project"]["optional-dependencies"])


def test_the_base_is_a_python_that_the_project_supports() -> None:
    text = (REPO / "Dockerfile").read_text(encoding="utf-8")
    found = re.search(r"^ARG PYTHON=python:(3\.\d+)-slim", text, re.MULTILINE)
    assert found
    assert f"Programming Language :: Python :: {found[1]}" in PROJECT["project"]["classifiers"]


def test_the_documented_commands_build_targets_that_exist() -> None:
    documented = re.findall(r"docker build --target (\w+)", INSTALL)
    assert set(documented) == set(TARGETS) <= set(stages())
    runs = re.findall(r"^docker run .*$", INSTALL, re.MULTILINE)
    assert len(runs) == len(TARGETS)
    for run in runs:
        # mDNS does not leave Docker's own network.
        assert "--network host" in run
        assert ":/home/fleetd/state " in run
