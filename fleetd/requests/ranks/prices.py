"""Whether machines had better divide the layers of a model than deal them out: asked of the planner, by what
rings of these machines have measured or, before there was one, by their links."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fleetd.control.group_view import DividedView
from fleetd.engine.settings import Backend
from fleetd.errors import FleetError
from fleetd.models.folder import ModelFolder
from fleetd.models.model_sizes import ModelSizes
from fleetd.plan import rank_price
from fleetd.plan.costs import LinkSpeed
from fleetd.plan.group_cut import GroupCut
from fleetd.plan.rank_price import SUMS_PER_LAYER, RankPrice, SumTime
from fleetd.requests.members.members import Members
from fleetd.requests.ranks.fabrics import PREFERRED

_PRIORS: dict[Backend, float] = {"jaccl": rank_price.RDMA_S, "nccl": rank_price.NCCL_S}
_NAMES: dict[Backend, str] = {"jaccl": "what RDMA usually takes", "nccl": "what NCCL usually takes"}
# Of a hidden state that is summed on a GPU: half precision. On a CPU it is f32.
_HALF, _WHOLE = 2, 4


class MeasuredSums:
    """Seconds of one sum that groups of machines have measured since this daemon started."""

    def __init__(self) -> None:
        self._seconds: dict[frozenset[str], float] = {}

    def took(self, names: Sequence[str], seconds: float) -> None:
        """``names``: of the machines that form a ring with this one. Later figures take the place of earlier
        ones; 0 is none."""
        if seconds > 0:
            self._seconds[frozenset(names)] = seconds

    def of(self, names: Sequence[str]) -> float:
        """0 if they have formed no ring yet."""
        return self._seconds.get(frozenset(names), 0.0)


class RankPrices:
    """Args:
    fabrics: what this machine would offer to carry sums with on the link to another one, by its node id.
    check: raises FleetError if the machines of these names cannot divide a model.
    exact: answers have to have the bytes of one machine alone, by the settings.
    """

    def __init__(
        self,
        members: Members,
        sums: MeasuredSums,
        check: Callable[[ModelFolder, Sequence[str], ModelSizes], object],
        fabrics: Callable[[str], Sequence[str]] = lambda node_id: (),
        *,
        exact: bool = False,
    ) -> None:
        self._members, self._sums, self._check = members, sums, check
        self._fabrics, self._exact = fabrics, exact

    def __call__(
        self, folder: ModelFolder, found: GroupCut, layers_s: float, sizes: ModelSizes
    ) -> DividedView:
        """What it would be like if the machines of a cut divided every layer.

        Args:
            layers_s: seconds of one token of an answer if the layers are dealt out as in ``found``.
            sizes: of the model, with its layers.
        """
        names = [part.machine.name for part in found.parts[1:]]
        try:
            self._check(folder, names, sizes)
        except FleetError as error:
            return DividedView(why=f"It cannot be divided: {error.message}")
        layers = found.parts[-1].last
        one_sum = self._sum(found, folder, names)
        price = rank_price.divided(found, layers, one_sum)
        pays = rank_price.pays(price, layers_s)
        return DividedView(
            tok_s=1 / price.step_s,
            weights_s=price.weights_s,
            sums=SUMS_PER_LAYER * layers,
            sum_s=one_sum.seconds,
            measured=one_sum.measured,
            chosen=pays and not self._exact,
            why=_why(price, layers_s, SUMS_PER_LAYER * layers, one_sum, pays=pays, exact=self._exact),
        )

    def _sum(self, found: GroupCut, folder: ModelFolder, names: Sequence[str]) -> SumTime:
        if known := self._sums.of(names):
            return SumTime(known, measured=True)
        by_id = {member.node_id: member for member in self._members.others("prefill")}
        others = [by_id[part.machine.node_id] for part in found.parts[1:] if part.machine.node_id in by_id]
        if len(found.parts) == 2 and others:
            both = set(self._fabrics(others[0].node_id)) & set(others[0].card.collectives)
            if name := next((each for each in PREFERRED if each in both), None):
                return SumTime(_PRIORS[name], by=_NAMES[name])
        links: list[LinkSpeed] = [link for member in others if (link := member.link) is not None]
        here = self._members.here()
        own = here.model(folder.name)
        width = own.shape.hidden_bytes if own is not None else 0
        n_bytes = width or _HALF * int(folder.config.get("hidden_size") or 0)
        if here.card.machine.accelerator == "cpu":
            n_bytes = max(n_bytes, _WHOLE * int(folder.config.get("hidden_size") or 0))
        return SumTime(rank_price.ring_sum_s(len(found.parts), links, n_bytes))


def _why(price: RankPrice, layers_s: float, sums: int, one_sum: SumTime, *, pays: bool, exact: bool) -> str:
    source = "measured" if one_sum.measured else f"modelled from {one_sum.by}"
    priced = (
        f"With a part of every layer each, a token takes {_ms(price.weights_s)} in weights and "
        f"{_ms(price.sums_s)} in {sums} sums of {_ms(one_sum.seconds)} ({source}); with whole layers "
        f"{_ms(layers_s)}."
    )
    if pays and exact:
        return f"{priced} Layers are not divided, since fleet.exactness is exact."
    if pays:
        return f"{priced} Dividing every layer is faster, and rounds in another way than one machine does."
    return f"{priced} Whole layers are as fast or faster, and give the bytes of the whole model."


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
