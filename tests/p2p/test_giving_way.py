"""Which connection gives way to a new one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleetd.p2p.giving_way import gives_way

PER_ADDRESS, MOST = 3, 5
ADDRESSES = st.sampled_from("abcdef")


def held(addresses: str) -> dict[int, str]:
    """Numbered from the oldest on."""
    return dict(enumerate(addresses))


def test_the_oldest_of_an_address_with_many_goes_first() -> None:
    assert gives_way(held("ab"), "b", per_address=PER_ADDRESS, most=MOST) is None
    assert gives_way(held("abbb"), "b", per_address=PER_ADDRESS, most=MOST) == 1
    assert gives_way(held("abbb"), "a", per_address=PER_ADDRESS, most=MOST) is None
    assert gives_way(held("abbcd"), "e", per_address=PER_ADDRESS, most=MOST) == 1, "of the most frequent"
    assert gives_way(held("abcde"), "f", per_address=PER_ADDRESS, most=MOST) == 0


@given(st.lists(ADDRESSES, max_size=60))
def test_attack_no_order_of_arrivals_goes_over_a_bound(arrivals: list[str]) -> None:
    places: dict[int, str] = {}
    for number, address in enumerate(arrivals):
        oldest = gives_way(places, address, per_address=PER_ADDRESS, most=MOST)
        if oldest is not None:
            del places[oldest]
        places[number] = address
        assert len(places) <= MOST
        assert list(places.values()).count(address) <= PER_ADDRESS
