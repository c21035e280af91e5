"""A ring seen from the machine that answers: what the loss of a rank comes to."""

from __future__ import annotations

from typing import Any

import pytest

from fleetd.errors import FleetError, GroupLost, ModelUnsupported, OutOfMemory, PeerLost
from fleetd.requests.ranks.client import FleetRanks, RankMachine

pytestmark = pytest.mark.one_loop


class EndedStream:
    """A rank's stream, at its end."""

    def __init__(self, error: FleetError) -> None:
        self._error = error

    async def receive(self) -> bytes | None:
        raise self._error

    def cancel(self) -> None:
        pass


@pytest.mark.parametrize(
    "error",
    [OutOfMemory("No memory is left."), ModelUnsupported("It has no part of it."), PeerLost("It is gone.")],
)
async def test_a_rank_that_is_lost_later_is_a_loss_of_the_group_whatever_it_ended_with(
    error: FleetError,
) -> None:
    """A rank without memory may be heard of before its broken ring: the request goes another way all the
    same."""
    partners: Any = None
    ranks = FleetRanks(partners, "tiny", "digest", [RankMachine("node", "kitchen")], 2, 64)
    stream: Any = EndedStream(error)
    ranks._ranks[0].stream = stream
    try:
        with pytest.raises(GroupLost, match=f"kitchen: {error.message}"):
            await ranks.watch()
    finally:
        ranks.close()
