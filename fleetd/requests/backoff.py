"""Helpers that failed a shared prefill, left out for a while: longer each time, forgiven by one success.

Pure; ``now_s`` is monotonic seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleetd import limits


@dataclass(slots=True)
class _BackoffEntry:
    until_s: float
    failures: int
    code: str


class PeerBackoff:
    """By node id. Members only, so their number is bounded by the roster's."""

    def __init__(self) -> None:
        self._entries: dict[str, _BackoffEntry] = {}

    def failed(self, node_id: str, code: str, now_s: float) -> None:
        known = self._entries.get(node_id)
        failures = known.failures + 1 if known is not None else 1
        wait_s = min(limits.SHARE_PENALTY_S * 2.0 ** min(failures - 1, 32), limits.SHARE_PENALTY_MOST_S)
        self._entries[node_id] = _BackoffEntry(now_s + wait_s, failures, code)

    def succeeded(self, node_id: str) -> None:
        self._entries.pop(node_id, None)

    def reason(self, node_id: str, now_s: float) -> str:
        """Why it is left out now, as a sentence; "" for one that is not."""
        entry = self._entries.get(node_id)
        if entry is None or now_s >= entry.until_s:
            return ""
        return f"It failed a shared prefill ({entry.code}) and is left out for {entry.until_s - now_s:.0f} s."
