"""Names of blocks against a slow model: a dictionary from all that decides a block to its name."""

from __future__ import annotations

from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from fleetd import limits
from fleetd.cache import block_names

BLOCK = limits.CACHE_BLOCK_TOKENS
# Bases and namespaces that run into each other; a prompt's blocks, and a tail that fills none.
ORIGINS = st.tuples(
    st.sampled_from([b"", b"a", b"ab", b"\x01"]), st.sampled_from(["", "a", "b", "equivalent"])
)
LETTERS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0, 1, BLOCK - 1])), max_size=4)
TAILS = st.sampled_from([0, 1, BLOCK - 1])


def tokens_of(letters: list[tuple[int, int]], tail: int) -> list[int]:
    """Blocks of zeros, each with a token of another kind at some place, and a tail."""
    tokens: list[int] = []
    for letter, place in letters:
        block = [0] * BLOCK
        block[place] = letter
        tokens += block
    return tokens + [7] * tail


@examples(90)
@given(st.lists(st.tuples(ORIGINS, LETTERS, TAILS), min_size=2, max_size=6))
def test_two_blocks_have_one_name_if_and_only_if_all_that_decides_them_is_the_same(
    prompts: list[tuple[tuple[bytes, str], list[tuple[int, int]], int]],
) -> None:
    name_of: dict[tuple[bytes, str, tuple[int, ...]], bytes] = {}
    for (basis, namespace), letters, tail in prompts:
        tokens = tokens_of(letters, tail)
        found = block_names.names(basis, namespace, tokens)
        assert len(found) == block_names.whole_blocks(len(tokens)) == len(letters)
        for number, name in enumerate(found, start=1):
            whole = (basis, namespace, tuple(tokens[: number * BLOCK]))
            assert name_of.setdefault(whole, name) == name
    assert len(set(name_of.values())) == len(name_of)
    # A snapshot is no block, and what may not leave the machine has no name that others could ask for.
    others = [
        other
        for name in name_of.values()
        for other in (
            block_names.state_name(name),
            block_names.kept_as(name, local_only=True),
            block_names.kept_as(name, local_only=False),
            block_names.kept_as(block_names.state_name(name), local_only=True),
            block_names.kept_as(block_names.state_name(name), local_only=False),
        )
    ]
    every = [*name_of.values(), *others]
    assert len(set(every)) == len(every) == 6 * len(name_of)
    assert all(len(name) == 32 for name in every)


def test_a_basis_is_looked_for_until_it_is_known() -> None:
    answers = iter([OSError("not yet"), b"", b"digest", b"another"])

    def find() -> bytes:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    basis = block_names.LateBasis(find)
    seen = [basis.value]
    for _ in range(3):
        basis.look()
        seen.append(basis.value)
    assert seen == [b"", b"", b"digest", b"digest"]
