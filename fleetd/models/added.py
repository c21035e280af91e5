"""A name for a model that lies elsewhere on this machine: a link in the models folder. Nothing is copied.

MODELS/NAME -> /elsewhere/FOLDER

There is no record besides the link, so that a person can see, make and remove it by hand.
"""

from __future__ import annotations

import os
from pathlib import Path

from fleetd.errors import InvalidValue, ModelNotFound
from fleetd.models import catalog, names


def target(folder: Path) -> Path:
    """The folder that holds the files: the target of ``folder`` if it is a link, else ``folder`` itself."""
    return folder.parent / os.readlink(folder) if folder.is_symlink() else folder


def links(models_dir: Path) -> dict[str, Path]:
    """All added models: the name → the folder that the link names, which may be gone."""
    try:
        entries = sorted(models_dir.iterdir())
    except OSError:
        return {}
    return {
        entry.name: target(entry)
        for entry in entries
        if entry.is_symlink() and not entry.name.startswith(".")
    }


def check_name(name: str) -> str:
    """The name, if a model may be added by it. Raises InvalidValue if not."""
    names.check(name)
    if "/" in name or "--" in name:
        raise InvalidValue(
            f"{name!r} reads like the id of a model on the hub.",
            hint="Choose a name of letters, digits, dots and single dashes: --name NAME.",
            param="name",
        )
    if catalog.find(name) is not None:
        raise InvalidValue(
            f"{name!r} is a model of the catalog.",
            hint="Choose another name with --name: requests for the catalog's model must not get this one.",
            param="name",
        )
    return name


def usual_name(text: str, prefix: str = "") -> str:
    """A valid name made of the name that a file, a folder or another program gives a model.

    ``prefix`` is put before it if the catalog has a model of that name.
    """
    stem = text[: -len(".gguf")] if text.lower().endswith(".gguf") else text
    plain = "".join(char if char.isascii() and (char.isalnum() or char in "._") else "-" for char in stem)
    plain = "-".join(part for part in plain.split("-") if part).lstrip("._").replace("..", ".")
    if prefix and catalog.find(plain) is not None:
        plain = f"{prefix}-{plain}"
    return plain


def make_link(models_dir: Path, name: str, folder: Path) -> None:
    """Make the link. Raises InvalidValue if something of that name is there."""
    models_dir.mkdir(parents=True, exist_ok=True)
    try:
        (models_dir / name).symlink_to(folder, target_is_directory=True)
    except FileExistsError:
        raise taken(name) from None


def taken(name: str) -> InvalidValue:
    """The error for a name that another model has."""
    return InvalidValue(
        f"There is a model {name!r} already.",
        hint=f"Choose another name with --name, or remove that one: fleetctl models remove {name}",
        param="name",
    )


def check_there(link: Path) -> None:
    """Raises ModelNotFound for a link whose folder is gone."""
    if link.is_symlink() and not link.is_dir():
        raise ModelNotFound(
            f"{link.name} was added from {target(link)}, which is not there.",
            hint=f"Bring it back, or take the name away: fleetctl models remove {link.name}",
            param="model",
        )
