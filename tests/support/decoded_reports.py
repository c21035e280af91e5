"""What a worker reports, as the daemon gets it."""

from __future__ import annotations

from fleetd.engine.protocol import Report, encode, reports


class DecodedReports(list[Report]):
    """Each report is encoded, and decoded as the daemon decodes it. One that it cannot decode raises: it
    would cost the request, or the worker."""

    def __init__(self) -> None:
        super().__init__()
        self._decoder = reports()

    def take(self, report: Report) -> None:
        self.extend(self._decoder.feed(encode(report)))
