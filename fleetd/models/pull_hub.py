"""Fetch a model from the hub."""

from __future__ import annotations

from pathlib import Path

from fleetd.errors import DownloadFailed
from fleetd.models.progress import Report


def pull_hub(
    hub_id: str, revision: str | None, name: str, folder: str, models_dir: Path, report: Report
) -> Path:
    raise DownloadFailed(f"{hub_id} cannot be downloaded yet.", hint="Put its files into the models folder.")
