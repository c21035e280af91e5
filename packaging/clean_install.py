"""``python packaging/clean_install.py WHEEL [--by pip|uv|pipx]``: what a user of fleetd sees, timed.

Installs the wheel into a new folder with an empty home and no caches, asks `fleetd --version`, prints the
service's file, starts a daemon, fetches the default model, asks it a question, and then `fleetctl doctor`.
Nothing of the checkout takes part but the wheel; the environment keeps only what names the package index.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

MODEL, QUESTION, ANSWER = "smollm2-135m", "What is the capital of France?", "Paris"
LIMIT_S, READY_S = 900.0, 60.0
_KEPT = ("LANG", "LC_ALL", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")
_KEPT_PREFIXES = ("PIP_INDEX", "PIP_EXTRA_INDEX", "PIP_TRUSTED", "PIP_CERT", "UV_INDEX", "UV_DEFAULT_INDEX")
_KEPT_PREFIXES += ("HTTP_", "HTTPS_", "NO_PROXY")


class Machine:
    """A folder that stands for a machine on which nothing was installed yet."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "home"
        self.home.mkdir()
        self.bin = self.home / ".local" / "bin"
        kept = {k: v for k, v in os.environ.items() if k in _KEPT or k.upper().startswith(_KEPT_PREFIXES)}
        path = f"{self.bin}:/opt/homebrew/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        self.environ = {**kept, "PATH": path, "HOME": str(self.home), "TMPDIR": str(folder)}
        # No model of this machine's own is found instead of the one that is fetched.
        self.environ["FLEETD_MODELS_HUB_CACHE"] = str(folder / "no-hub")
        self.took_s: dict[str, float] = {}

    def run(self, step: str, *command: str | Path) -> str:
        """The command's stdout, timed as ``step``; ends the program if it fails."""
        begun = time.perf_counter()
        done = subprocess.run(
            command,
            env=self.environ,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=LIMIT_S,
            check=False,
        )
        self.took_s[step] = time.perf_counter() - begun
        if done.returncode:
            sys.exit(f"{step} failed ({done.returncode}):\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        print(f"{step:<22} {self.took_s[step]:8.2f} s", flush=True)
        return done.stdout

    def install(self, by: str, wheel: Path) -> None:
        if by == "pip":
            environment = self.home / "environment"
            self.run("python -m venv", sys.executable, "-m", "venv", environment)
            self.bin = environment / "bin"
            self.run("pip install", self.bin / "pip", "install", "--no-cache-dir", wheel)
            return
        tool = self._tool(by)
        if by == "uv":
            self.run("uv tool install", tool, "tool", "install", "--python", sys.executable, wheel)
        else:
            self.run("pipx install", tool, "install", "--python", sys.executable, wheel)

    def _tool(self, name: str) -> Path:
        """uv or pipx: the machine's own, or a new one beside what is timed."""
        if found := shutil.which(name):
            return Path(found)
        tools = self.folder / "tools"
        subprocess.run([sys.executable, "-m", "venv", tools], check=True)
        subprocess.run([tools / "bin" / "pip", "install", "--quiet", name], check=True, env=self.environ)
        return tools / "bin" / name


def check(machine: Machine, version: str) -> None:
    """Everything after the installation."""
    fleetd, fleetctl = machine.bin / "fleetd", machine.bin / "fleetctl"
    said = machine.run("fleetd --version", fleetd, "--version")
    if version not in said:
        sys.exit(f"the wheel is of version {version}, but fleetd says {said!r}")
    if sys.platform == "linux" or shutil.which("launchctl"):
        unit = machine.run("service install", fleetctl, "service", "install", "--user", "--print")
        if str(fleetd) not in unit and "fleetd" not in unit:
            sys.exit(f"the service file does not start fleetd:\n{unit}")
    home = machine.folder / "fleetd"
    at = ("--home", str(home))
    begun = time.perf_counter()
    listen = ("--http", "127.0.0.1:0", "--listen", "127.0.0.1:0", "--no-mdns")
    with (machine.folder / "daemon.log").open("wb") as log:
        daemon = subprocess.Popen([fleetd, "run", *at, *listen], env=machine.environ, stdout=log, stderr=log)
    try:
        while not (home / "fleetd.sock").exists():
            if daemon.poll() is not None or time.perf_counter() - begun > READY_S:
                sys.exit((machine.folder / "daemon.log").read_text(errors="replace")[-3000:])
            time.sleep(0.02)
        machine.took_s["daemon ready"] = time.perf_counter() - begun
        print(f"{'daemon ready':<22} {machine.took_s['daemon ready']:8.2f} s", flush=True)
        machine.run("models pull", fleetctl, *at, "models", "pull", MODEL)
        ask = ("chat", "--json", "--model", MODEL, "--temperature", "0", QUESTION)
        answer = json.loads(machine.run("first answer", fleetctl, *at, *ask))
        if ANSWER not in answer["content"]:
            sys.exit(f"{QUESTION} {answer['content']!r}")
        found = json.loads(machine.run("fleetctl doctor", fleetctl, *at, "doctor", "--json"))
        for finding in found["checks"]:
            if finding["level"] != "ok":
                print(f"  {finding['level']}: {finding['name']}: {finding['what']}")
    finally:
        daemon.terminate()
        daemon.wait(60)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--by", choices=("pip", "uv", "pipx"), default="pip")
    parser.add_argument("--json", type=Path, help="write the times into this file")
    args = parser.parse_args(arguments)
    wheel = args.wheel.resolve(strict=True)
    # Unix socket paths are limited to about 100 bytes, and a Mac's temporary folder is deep.
    with tempfile.TemporaryDirectory(prefix="fleetd-install-", dir="/tmp") as folder:
        machine = Machine(Path(folder))
        machine.install(args.by, wheel)
        check(machine, wheel.name.split("-")[1])
        # uv links files of its cache instead of copying them.
        stats = [file.lstat() for file in machine.home.rglob("*")]
        size = sum({stat.st_ino: stat.st_size for stat in stats}.values())
    print(f"{args.by}: {sum(machine.took_s.values()):.0f} s from nothing to an answer, {size / 1e6:.0f} MB")
    if args.json:
        args.json.write_text(json.dumps({"by": args.by, "bytes": size, "seconds": machine.took_s}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
