"""The lines that a download process writes while it runs."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from fleetd.text.bounded import Count


class PullProgress(msgspec.Struct, frozen=True):
    """How far a download is."""

    # The name of the file that is brought; "" if it is none in particular.
    file: str
    # Bytes of this stage that are done, and of the whole stage; 0 if that is not known.
    done_bytes: Count
    total_bytes: Count
    # A word for people: waiting, connecting, downloading, copying, unpacking, importing, verifying.
    stage: str


class PullDone(msgspec.Struct, frozen=True):
    """The last line of a download that succeeded."""

    # The model's name, as ``ModelStore.resolve`` takes it.
    name: str


class PullError(msgspec.Struct, frozen=True):
    """The last line of a download that failed; the fields are those of ``errors.FleetError``."""

    code: str
    message: str
    hint: str = ""


class PullLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the download process's output; exactly one of the three fields is set."""

    progress: PullProgress | None = None
    done: PullDone | None = None
    error: PullError | None = None


Report = Callable[[PullProgress], None]
