"""Machines that failed, refused or were silent, left out for a while: longer each time. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fleetd import limits

Work = Literal["answer", "prefill", "score", "draft", "fetch"]
_FAILED_AT: dict[Work, str] = {
    "answer": "to answer a request",
    "prefill": "a shared prefill",
    "score": "to score a prompt",
    "draft": "to draft an answer",
    "fetch": "to send the keys and values of a prompt",
}

# The code of a machine that does not answer short questions in time.
_SILENT = "silent"


@dataclass(slots=True)
class _BackoffEntry:
    until_s: float
    # How long it is left out for what came last.
    wait_s: float
    code: str
    this_work_only: bool


def _longer(known: _BackoffEntry | None, least_s: float, most_s: float) -> float:
    """How long a machine is left out that has failed again."""
    return min(max(least_s, 2 * known.wait_s if known is not None else 0.0), most_s)


class PeerBackoff:
    """Machines that failed, left out for a while: twice as long after each further failure at the same work.

    A success at that work ends it. Keyed by node id and work; only members have entries, so their number is
    bounded by the roster's. ``now_s`` is monotonic seconds.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[str, Work], _BackoffEntry] = {}

    def failed(
        self, node_id: str, work: Work, code: str, now_s: float, *, this_work_only: bool = False
    ) -> None:
        known = self._entries.get((node_id, work))
        wait_s = _longer(known, limits.BACKOFF_S, limits.BACKOFF_MOST_S)
        self._entries[node_id, work] = _BackoffEntry(now_s + wait_s, wait_s, code, this_work_only)

    def refused(self, node_id: str, work: Work, code: str, now_s: float, most_s: float) -> None:
        """It says that it cannot. The first time it is asked again at once, and what comes of requests that
        it got before it was left out counts once."""
        known = self._entries.get((node_id, work))
        if known is not None and now_s < known.until_s:
            return
        wait_s = 0.0 if known is None else _longer(known, limits.BACKOFF_REFUSED_S, most_s)
        self._entries[node_id, work] = _BackoffEntry(now_s + wait_s, wait_s, code, this_work_only=True)

    def silent(self, node_id: str, work: Work, now_s: float) -> None:
        """It has not answered short questions in time; ``heard`` is enough to end that."""
        known = self._entries.get((node_id, work))
        if known is not None and now_s < known.until_s:
            return
        if known is not None and known.code != _SILENT:
            # Answering questions does not make up for a failure at the work itself.
            self.failed(node_id, work, known.code, now_s, this_work_only=True)
            return
        wait_s = _longer(known, limits.FETCH_SILENT_S, limits.BACKOFF_MOST_S)
        self._entries[node_id, work] = _BackoffEntry(now_s + wait_s, wait_s, _SILENT, this_work_only=True)

    def heard(self, node_id: str, work: Work) -> None:
        """It has answered a short question."""
        known = self._entries.get((node_id, work))
        if known is not None and known.code == _SILENT:
            del self._entries[node_id, work]

    def succeeded(self, node_id: str, work: Work) -> None:
        self._entries.pop((node_id, work), None)

    def reason(self, node_id: str, work: Work, now_s: float) -> str:
        """Why a machine is left out of this work now, as a sentence; "" if it is not."""
        for (node, failed_work), entry in self._entries.items():
            concerned = failed_work == work or not entry.this_work_only
            if node == node_id and concerned and now_s < entry.until_s:
                left_s = entry.until_s - now_s
                return (
                    f"It failed {_FAILED_AT[failed_work]} ({entry.code}) and is left out for {left_s:.0f} s."
                )
        return ""

    def code(self, node_id: str, work: Work, now_s: float) -> str:
        """The error code of the failure at this very work; "" if it does not leave the machine out now."""
        entry = self._entries.get((node_id, work))
        return entry.code if entry is not None and now_s < entry.until_s else ""
