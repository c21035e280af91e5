"""What a download says about itself while it runs."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from fleetd.text.bounded import Count


class PullProgress(msgspec.Struct, frozen=True):
    """``stage`` is a word for people: waiting, connecting, downloading, copying, importing, verifying."""

    file: str
    done_bytes: Count
    total_bytes: Count
    stage: str


class PullDone(msgspec.Struct, frozen=True):
    """The last line of a download that went well; ``name`` is what ``ModelStore.resolve`` takes."""

    name: str


class PullError(msgspec.Struct, frozen=True):
    """The last line of one that did not; fields as in ``errors.FleetError``."""

    code: str
    message: str
    hint: str = ""


class PullLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the download process's output: exactly one of the three is there."""

    progress: PullProgress | None = None
    done: PullDone | None = None
    error: PullError | None = None


Report = Callable[[PullProgress], None]
