"""A runner with its parts, for tests of requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from fleetd.models.model_names import ModelNames
from fleetd.plan.model_speeds import ModelSpeeds
from fleetd.requests.accounts import Accounts
from fleetd.requests.ledger import Ledger
from fleetd.requests.members.members import Members
from fleetd.requests.metrics import Metrics
from fleetd.requests.model_locator import ModelLocator
from fleetd.requests.pipeline import PipelineStep
from fleetd.requests.runner import RequestRunner


def not_embedded(ref: str) -> str | None:
    """No model travels with the daemon."""
    return None


def runner_over(
    pool: Any,
    models: Any,
    ledger: Ledger,
    metrics: Metrics,
    *,
    names: ModelNames | None = None,
    embedded: Callable[[str], str | None] = not_embedded,
    speeds: ModelSpeeds | None = None,
    members: Members | None = None,
    features: Sequence[PipelineStep] = (),
    monotonic: Callable[[], float] = time.monotonic,
    **more: Any,
) -> RequestRunner:
    """A runner of these models, "m" the one that is meant by no name. ``more``: as RequestRunner's own."""
    return RequestRunner(
        pool,
        ModelLocator(models, names or ModelNames("m"), embedded),
        Accounts(ledger, metrics, speeds, monotonic=monotonic),
        members or Members(),
        features,
        monotonic=monotonic,
        **more,
    )
