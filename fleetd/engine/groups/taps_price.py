"""What it takes to have hidden states of layers on other machines, for a drafter that reads several layers.

They travel with every pass from which drafts may be made: k layers of a token are k times what goes from one
machine to the next anyway. What that takes is measured and not computed: the link, its delay and what else
it carries show in nothing but time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

import mlx.core as mx
import msgspec
from mlx_lm.models.cache import make_prompt_cache

from fleetd import limits
from fleetd.engine.groups.group_model import GroupModel
from fleetd.engine.speculation.controller import NO_DRAFT, Controller
from fleetd.engine.speculation.drafts_price import DraftPrice
from fleetd.engine.speculation.exactness_probe import ExactnessVerdict
from fleetd.engine.speculation.hidden_source import HiddenSource
from fleetd.engine.speculation.pass_costs import Costs

# Passes that are timed, with and without in turns. The quickest of each counts.
_TIMES = 6
# Tokens of such a pass: the width of a usual block.
_TOKENS = limits.SPEC_WIDTH // 2


class TapsPrice(msgspec.Struct, frozen=True):
    """``far``: layers whose states travel. ``nbytes``: of a token's. ``seconds``: that they make a pass
    longer, which takes ``pass_s`` without them."""

    far: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    pass_s: float = 0.0

    @classmethod
    def measured(
        cls, model: GroupModel, layers: Collection[int], clock: Callable[[], float] = time.perf_counter
    ) -> TapsPrice:
        """What a drafter of ``layers`` would make passes of ``model`` take; nothing if none has to travel.

        Raises MemberLost.
        """
        if not (far := model.far(layers)):
            return cls()
        cache, tokens = make_prompt_cache(model), mx.array([[1] * _TOKENS])
        plain, tapped = [], []
        for _ in range(_TIMES):
            begun = clock()
            mx.eval(model(tokens, cache=cache))
            between = clock()
            with model.noting(layers):
                mx.eval(model(tokens, cache=cache))
            plain.append(between - begun)
            tapped.append(clock() - between)
        pass_s = min(plain)
        nbytes = len(far) * model.width * model.dtype.size
        return cls(len(far), nbytes, max(0.0, min(tapped) - pass_s), pass_s)

    def worth(self, verdict: ExactnessVerdict, source: HiddenSource | None) -> bool:
        """True if the controller would ask ``source`` in an answer that begins, at the acceptance that it
        assumes of a source that it does not know."""
        if not self.far or source is None or 1 not in verdict.seconds:
            return True
        price = DraftPrice(source.price.once_s + self.seconds, source.price.token_s)
        costs = Costs(verdict.seconds)
        most = min(verdict.width, limits.SPEC_WIDTH) - 1
        return Controller(costs, most).wanted(source.name, price, NO_DRAFT, most) > 0

    @property
    def text(self) -> str:
        """Why it is not worth it."""
        return (
            f"hidden states of {self.far} layers on other machines, {self.nbytes:,} bytes a token, take "
            f"{1000 * self.seconds:.1f} ms of a pass of {1000 * self.pass_s:.1f} ms: drafts would not pay"
        )
