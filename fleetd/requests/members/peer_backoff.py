"""Machines that failed, refused or were silent, left out for a while: longer each time. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fleetd import limits

Work = Literal["answer", "prefill", "score", "draft", "fetch", "vectors"]
_FAILED_AT: dict[Work, str] = {
    "answer": "to answer a request",
    "prefill": "a shared prefill",
    "score": "to score a prompt",
    "draft": "to draft an answer",
    "fetch": "to send the keys and values of a prompt",
    "vectors": "to make vectors of texts",
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


# By work, and by the digest of the model whose work alone is concerned, "" for that with any model.
_PeerEntries = dict[tuple[Work, str], _BackoffEntry]


def _longer(known: _BackoffEntry | None, least_s: float, most_s: float) -> float:
    """How long a machine is left out that has failed again."""
    return min(max(least_s, 2 * known.wait_s if known is not None else 0.0), most_s)


class PeerBackoff:
    """Machines that failed, left out for a while: twice as long after each further failure at the same work.

    A success at that work ends it. ``model``: the digest of the only model that the failure concerns. Only
    members have entries, so their number is bounded by the roster's and by BACKOFF_MODELS. ``now_s`` is
    monotonic seconds.
    """

    def __init__(self) -> None:
        self._peers: dict[str, _PeerEntries] = {}

    def failed(
        self,
        node_id: str,
        work: Work,
        code: str,
        now_s: float,
        *,
        model: str = "",
        this_work_only: bool = False,
    ) -> None:
        known = self._known(node_id, work, model)
        if known is not None and now_s < known.until_s and not known.this_work_only:
            # A lesser failure in the meantime does not make up for one that concerns all work.
            this_work_only = False
        wait_s = _longer(known, limits.BACKOFF_S, limits.BACKOFF_MOST_S)
        self._leave_out(node_id, work, model, _BackoffEntry(now_s + wait_s, wait_s, code, this_work_only))

    def refused(
        self, node_id: str, work: Work, code: str, now_s: float, most_s: float, *, model: str = ""
    ) -> None:
        """It says that it cannot. The first time it is asked again at once, and what comes of requests that
        it got before it was left out counts once."""
        known = self._known(node_id, work, model)
        if known is not None and now_s < known.until_s:
            return
        wait_s = 0.0 if known is None else _longer(known, limits.BACKOFF_REFUSED_S, most_s)
        entry = _BackoffEntry(now_s + wait_s, wait_s, code, this_work_only=True)
        self._leave_out(node_id, work, model, entry)

    def silent(self, node_id: str, work: Work, now_s: float) -> None:
        """It has not answered short questions in time; ``heard`` is enough to end that."""
        known = self._known(node_id, work)
        if known is not None and now_s < known.until_s:
            return
        if known is not None and known.code != _SILENT:
            # Answering questions does not make up for a failure at the work itself.
            self.failed(node_id, work, known.code, now_s, this_work_only=True)
            return
        wait_s = _longer(known, limits.FETCH_SILENT_S, limits.BACKOFF_MOST_S)
        entry = _BackoffEntry(now_s + wait_s, wait_s, _SILENT, this_work_only=True)
        self._leave_out(node_id, work, "", entry)

    def heard(self, node_id: str, work: Work) -> None:
        """It has answered a short question."""
        known = self._known(node_id, work)
        if known is not None and known.code == _SILENT:
            self.succeeded(node_id, work)

    def succeeded(self, node_id: str, work: Work, model: str = "") -> None:
        """Ends what concerns this work with the model, and what concerns it with any."""
        entries = self._peers.get(node_id, {})
        entries.pop((work, ""), None)
        entries.pop((work, model), None)

    def reasons(self, node_id: str, work: Work, now_s: float) -> dict[str, str]:
        """Why a machine is left out of this work now, as sentences by model; under "" with all models."""
        found: dict[str, str] = {}
        for (failed_work, model), entry in self._peers.get(node_id, {}).items():
            if (failed_work == work or not entry.this_work_only) and now_s < entry.until_s:
                failed_at = _FAILED_AT[failed_work] + (" with this model" if model else "")
                left_s = entry.until_s - now_s
                sentence = f"It failed {failed_at} ({entry.code}) and is left out for {left_s:.0f} s."
                found.setdefault(model, sentence)
        return found

    def code(self, node_id: str, work: Work, now_s: float) -> str:
        """The error code of the failure at this very work with any model; "" if it does not leave the machine
        out now."""
        entry = self._known(node_id, work)
        return entry.code if entry is not None and now_s < entry.until_s else ""

    def _known(self, node_id: str, work: Work, model: str = "") -> _BackoffEntry | None:
        return self._peers.get(node_id, {}).get((work, model))

    def _leave_out(self, node_id: str, work: Work, model: str, entry: _BackoffEntry) -> None:
        entries = self._peers.setdefault(node_id, {})
        entries.pop((work, model), None)
        entries[work, model] = entry
        of_models = [key for key in entries if key[1]]
        if len(of_models) > limits.BACKOFF_MODELS:
            del entries[of_models[0]]
