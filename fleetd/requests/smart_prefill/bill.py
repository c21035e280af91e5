"""What scoring one prompt costs in the ledger: a row per machine, paid only if the scores were of use."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fleetd.engine.protocol import Timings, Usage
from fleetd.plan.scoring import Scorer
from fleetd.requests.job import THIS_NAME
from fleetd.requests.ledger import SCORE_ROUTE, Ledger, Reservation
from fleetd.requests.smart_prefill.segment_scoring import ScorerRun


class ScoringBill:
    """The rows of one request."""

    def __init__(self, ledger: Ledger, request_id: str, now: Callable[[], float]) -> None:
        self._ledger = ledger
        self._id = request_id
        self._now = now
        self._rows: dict[str, Reservation] = {}
        self._ran: list[ScorerRun] = []

    async def reserve(self, model: str, scorers: Iterable[Scorer]) -> None:
        """Write the rows of these scorers, before they begin."""
        for scorer in {scorer.node_id: scorer for scorer in scorers}.values():
            await self._ledger.reserve(self._row(model, scorer))

    def ran(self, model: str, ran: Iterable[ScorerRun]) -> None:
        """Note what the scorers did; one may have stepped in for another."""
        self._ran = list(ran)
        for each in self._ran:
            self._row(model, each.scorer)

    def close(self, refunded: str = "") -> None:
        """Settle or refund every row, once. ``refunded``: why all of them are refunded."""
        done = {each.scorer.node_id: each for each in self._ran}
        for node_id, row in self._rows.items():
            each = done.get(node_id)
            if refunded or each is None or each.error is not None or not each.tokens:
                error = each.error if each is not None else None
                self._ledger.refund(row, error.code if error is not None else refunded or "unused")
            else:
                usage = Usage(prompt_tokens=each.tokens)
                self._ledger.settle(row, usage, Timings(prefill_s=each.seconds), "stop")
        self._rows = {}

    def _row(self, model: str, scorer: Scorer) -> Reservation:
        if (row := self._rows.get(scorer.node_id)) is None:
            node = THIS_NAME if scorer.here else scorer.name
            # An id may be as long as a client's own; the ledger tells rows apart by it.
            row = Reservation(f"{self._id}.score{len(self._rows)}", model, node, SCORE_ROUTE, self._now())
            self._rows[scorer.node_id] = row
        return row
