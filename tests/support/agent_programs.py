"""The real coding agents, from npm: each in the version that docs/clients.md states."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

NPM = shutil.which("npm")
CLIENTS = Path(__file__).parents[2] / "docs" / "clients.md"


class AgentPackage(NamedTuple):
    """``client``: its name in the table of docs/clients.md."""

    client: str
    package: str


PACKAGES = {
    "claude": AgentPackage("Claude Code", "@anthropic-ai/claude-code"),
    "codex": AgentPackage("Codex", "@openai/codex"),
    "opencode": AgentPackage("opencode", "opencode-ai"),
}


def stated_version(client: str) -> str:
    found = re.search(rf"^\| {re.escape(client)} (\d+(?:\.\d+)+) \|", CLIENTS.read_text(), re.MULTILINE)
    assert found is not None, f"docs/clients.md states no version of {client}"
    return found[1]


def npm_install(folder: Path, package: str) -> None:
    """Install into ``folder``; skips the test where npm or its registry is missing."""
    if NPM is None:
        pytest.skip(f"npm is not installed: {package} was NOT tried")
    command = [NPM, "install", "--no-audit", "--no-fund", "--prefix", str(folder), package]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        pytest.skip(f"npm could not fetch {package}: it was NOT tried. {done.stderr[-300:]}")


def install(folder: Path, agent: str) -> Path:
    """Install into ``folder`` and return the folder of its programs; skips the test where npm or its registry
    is missing."""
    client, package = PACKAGES[agent]
    version = stated_version(client)
    npm_install(folder, f"{package}@{version}")
    if agent == "claude":
        # npm may leave a package's own installer to the user.
        installed = folder / "node_modules" / package
        subprocess.run(["node", "install.cjs"], cwd=installed, check=True, timeout=120)  # noqa: S607
    programs = folder / "node_modules" / ".bin"
    told = subprocess.run(
        [programs / agent, "--version"], capture_output=True, text=True, timeout=120, check=True
    )
    assert version in told.stdout.split(), f"{client} {version} says that it is {told.stdout}"
    return programs
