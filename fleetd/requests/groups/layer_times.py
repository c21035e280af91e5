"""What a layer of a model took on machines of earlier groups. It is forgotten after a day: a machine that was
slow then may be what the model needs now, and nobody measures it if it is never asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fleetd import limits


class LayerTimes:
    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        # By digest of a model, then by node id: seconds of a plain step in one layer, and when that was.
        self._took: dict[str, dict[str, tuple[float, float]]] = {}

    def took(self, digest: str, layer_s: Mapping[str, float]) -> None:
        """``layer_s``: measured just now, by node id."""
        now_s = self._monotonic()
        known = self._took.setdefault(digest, {})
        known.update((node_id, (seconds, now_s)) for node_id, seconds in layer_s.items())

    def known(self, digest: str) -> Mapping[str, float]:
        """Seconds of a layer by node id; empty if nothing was measured."""
        since_s = self._monotonic() - limits.GROUP_RECUT_MOST_S
        took = self._took.get(digest, {})
        return {node_id: seconds for node_id, (seconds, at_s) in took.items() if at_s > since_s}

    def forget(self, digest: str) -> None:
        """Forget what all machines took."""
        self._took.pop(digest, None)
