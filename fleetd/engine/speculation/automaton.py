"""A suffix automaton over token ids that grows by a token at a time.

Every string that occurs in the text leads from the root to one state; a state stands for strings with the
same set of ends, and its link for the longest of their suffixes with more ends (Blumer et al., 1985).
Appending takes constant time on average; states are at most twice the tokens, transitions three times.

It also keeps for each state where its strings ended last, or at an earlier place where many states would have
to be updated: what followed there is the guess.
"""

from __future__ import annotations

# States whose newest end is updated for each token, longest strings first: a text of one token over and over
# has as many suffixes with ends of their own as it has tokens.
ENDS_UPDATED = 16
ROOT = 0


class Automaton:
    """``text`` is all that was appended.

    ``matched`` and ``matched_end``: the longest end of the text that was there before, in tokens, and the
    index after its last token then; 0 tokens where there is none.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self.matched = 0
        self.matched_end = 0
        self._next: list[dict[int, int]] = [{}]
        self._link: list[int] = [-1]
        self._length: list[int] = [0]
        self._end: list[int] = [0]
        self._last = ROOT

    def append(self, token: int) -> None:
        """Extend the text, and find the longest end of it that was there before."""
        following, link, length, end = self._next, self._link, self._length, self._end
        text = self.text
        text.append(token)
        new, state = len(following), self._last
        following.append({})
        length.append(length[state] + 1)
        link.append(ROOT)
        end.append(len(text))
        while state != -1 and token not in following[state]:
            following[state][token] = new
            state = link[state]
        if state != -1:
            there = following[state][token]
            if length[there] != length[state] + 1:
                there = self._split(state, token, there)
            link[new] = there
        self._last = new
        known = link[new]
        self.matched, self.matched_end = length[known], end[known]
        for _ in range(ENDS_UPDATED):
            if known <= ROOT:
                break
            end[known] = len(text)
            known = link[known]

    def _split(self, state: int, token: int, there: int) -> int:
        """A state of its own for the shorter strings of ``there``, which now end in more places."""
        following, link, length = self._next, self._link, self._length
        shorter = len(following)
        following.append(dict(following[there]))
        length.append(length[state] + 1)
        link.append(link[there])
        self._end.append(self._end[there])
        link[there] = shorter
        while state != -1 and following[state].get(token) == there:
            following[state][token] = shorter
            state = link[state]
        return shorter

    def __len__(self) -> int:
        return len(self.text)
