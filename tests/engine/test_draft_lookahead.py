"""What a drafter drafts next, and what it keeps when the text goes on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetd.engine.speculation.lookahead import Guess, Lookahead

END = 0


def sure(token: int) -> Guess:
    return Guess(token, token + 100, 0.9, 0.01)


def torn(token: int) -> Guess:
    return Guess(token, token + 100, 0.5, 0.4)


def run(look: Lookahead, guesses: dict[tuple[int, ...], Guess]) -> list[list[int]]:
    """Every path that is wanted, in its order; what is not in ``guesses`` follows surely."""
    wanted = []
    while (path := look.next()) is not None:
        wanted.append(path)
        look.guessed(guesses.get(tuple(path), sure(len(path) + 1)))
    return wanted


def test_first_the_way_then_the_likeliest_mistake() -> None:
    look = Lookahead(ahead=4, detours=1, detour_tokens=2)
    wanted = run(look, {(1, 2): torn(3)})
    assert wanted == [[], [1], [1, 2], [1, 2, 3], [1, 2, 103], [1, 2, 103, 4]]
    assert look.main_path == [1, 2, 3, 4]


def test_a_mistake_that_is_reached_rarely_comes_later() -> None:
    look = Lookahead(ahead=3, detours=2, detour_tokens=1)
    wanted = run(look, {(): torn(1), (1,): torn(2)})
    assert wanted[3:] == [[101], [1, 102]]


def test_what_was_foreseen_is_kept() -> None:
    look = Lookahead(ahead=4, detours=1, detour_tokens=2)
    run(look, {(1, 2): torn(3)})
    assert look.committed([1, 2]) == 2
    assert look.main_path == [3, 4]
    assert look.next() == [3, 4]  # the main_path goes on; the detour is drafted already
    assert look.detour_guesses[0][0].first == 4


def test_a_detour_that_came_true_is_the_way() -> None:
    look = Lookahead(ahead=4, detours=1, detour_tokens=2)
    run(look, {(1, 2): torn(3)})
    assert look.committed([1, 2, 103]) == 2
    assert look.main_path == [4, 5]
    assert look.detour_guesses == {}


@pytest.mark.parametrize("tokens", [[9], [1, 9], [1, 2, 3, 4, 5], [1, 2, 103, 9], [1, 2, 103, 4, 5, 6]])
def test_what_nobody_foresaw_is_forgotten(tokens: list[int]) -> None:
    look = Lookahead(ahead=4, detours=1, detour_tokens=2)
    run(look, {(1, 2): torn(3)})
    look.committed(tokens)
    assert (look.main_path, look.detour_guesses, look.next()) == ([], {}, [])


def test_nothing_comes_after_the_end() -> None:
    look = Lookahead(frozenset({END}), ahead=4, detours=2, detour_tokens=2)
    wanted = run(look, {(1,): Guess(END, 102, 0.5, 0.4), (1, 102): sure(END)})
    assert wanted == [[], [1], [1, 102], [101], [101, 2]]


@given(
    st.lists(
        st.tuples(st.sampled_from(["draft", "right", "second", "other"]), st.integers(1, 6)), max_size=30
    )
)
def test_a_path_always_goes_on_from_the_text(steps: list[tuple[str, int]]) -> None:
    """Whatever happens: what is wanted and kept agrees with a model that depends on all of the text."""

    def model(text: tuple[int, ...]) -> Guess:
        first = hash(text) % 50
        return Guess(first, first + 50, 0.6, 0.3)

    text: tuple[int, ...] = (5,)
    look = Lookahead(ahead=5, detours=2, detour_tokens=3)
    for what, count in steps:
        if what == "draft":
            for _ in range(count):
                if (path := look.next()) is None:
                    break
                grown = look.guessed(model((*text, *path)))
                assert grown[:-1] == path
        else:
            new: list[int] = []
            for i in range(count):
                guess = model((*text, *new))
                missed = {"second": guess.second, "other": 200}.get(what) if i == count - 1 else None
                new.append(guess.first if missed is None else missed)
            look.committed(new)
            text = (*text, *new)
        main_path = look.main_path
        assert main_path == [model((*text, *main_path[:i])).first for i in range(len(main_path))]
        for place, after in look.detour_guesses.items():
            path = [*main_path[:place], look.guesses[place].second]
            for guess in after:
                assert guess == model((*text, *path))
                path.append(guess.first)
