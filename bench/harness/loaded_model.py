"""A model in a bench's own process, loaded and measured as a worker does it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from fleetd.engine.cpu import products


def load_as_worker(path: Path) -> Any:
    """The model in a folder, as ``loading.Loaded``. Call it before anything imports mlx."""
    if not products.preload_blas() and sys.platform == "linux":
        raise SystemExit("no BLAS to preload: install mkl")
    # mlx binds to the BLAS that is loaded first, so it is imported only now.
    from fleetd.engine import worker
    from fleetd.engine.cpu import mlx_functions
    from fleetd.engine.load import loading, model_reading
    from fleetd.engine.settings import WorkerSettings

    worker.quiet_libraries()
    device = model_reading.pick_device("auto")
    if device == "cpu":
        mlx_functions.install()
    return loading.load(WorkerSettings("bench", str(path)), device, lambda report: None)
