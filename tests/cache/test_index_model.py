"""The index against a slow model of it: a dictionary, and every rule in words of one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fleetd import limits
from fleetd.cache.index import FoundBlocks, Index, KeyReplaced, NewBlock, NoRoom

QUOTA, MOST_BLOCKS, MOST_BEGINNINGS = 60, 6, 5
EVERY = [f"{stem}{depth}" for stem in "ab" for depth in range(5)]
NAMES = st.sampled_from(EVERY)
# Whether what is done is done under the key that holds now.
RIGHT = st.sampled_from([True] * 7 + [False])
SELDOM = st.sampled_from([False] * 5 + [True])
LINKS = st.sampled_from(["p", "q", "r", "s", "t", "u", "v"])
SIZES = st.sampled_from([1, 5, 10, 12, 30])
WORTH = st.sampled_from([0.0, 1.0, 2.0, 8.0])


class _HeldBlock:
    def __init__(self, depth: int, nbytes: int, priority: float, begun_s: float) -> None:
        self.depth, self.nbytes, self.priority, self.begun_s = depth, nbytes, priority, begun_s
        self.ready = False


class IndexBesideADictionary(RuleBasedStateMachine):
    @initialize()
    def open(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(limits, "CHECKPOINTS_PER_PROMPT", 2)
        self.now_s = 1000.0
        self.index = Index(
            Path(":memory:"),
            QUOTA,
            most_blocks=MOST_BLOCKS,
            most_beginnings=MOST_BEGINNINGS,
            clock=lambda: self.now_s,
        )
        self.index.take_key("one")
        self.rows: dict[str, _HeldBlock] = {}
        self.links: dict[str, str] = {}
        self.key, self.aged = "one", 0.0
        self.deleted: list[str] = []

    def teardown(self) -> None:
        if hasattr(self, "index"):
            self.index.close()
            self.patch.undo()

    # ---- what the model says -----------------------------------------------------------------------------

    def _key(self, right: bool) -> str:
        return self.key if right else {"one": "two", "two": "one"}[self.key]

    def _ready(self, name: str) -> bool:
        return name in self.rows and self.rows[name].ready

    def _given_up(self, name: str) -> bool:
        """True for a block that was being written for so long that no process writes it any more."""
        row = self.rows[name]
        return not row.ready and row.begun_s < self.now_s - limits.CACHE_WRITING_S

    def _victims(
        self, nbytes: int, more: int, besides: list[str], quota: int = QUOTA, anew: str = ""
    ) -> list[str] | None:
        """What must go for so much more: what no process writes any more, then the least worth. ``anew``: a
        block that is written anew, which goes first if it is there."""
        left = dict(self.rows)
        replaced = [anew] if left.pop(anew, None) is not None else []
        late = [name for name in sorted(left) if self._given_up(name)]
        late.sort(key=lambda name: left[name].begun_s)
        by_worth = sorted(
            (name for name in left if left[name].ready),
            key=lambda name: (left[name].priority, -left[name].depth, name),
        )
        gone: list[str] = []
        for name in [*late, *by_worth, None]:
            held = sum(row.nbytes for row in left.values())
            if held + nbytes <= quota and len(left) + more <= MOST_BLOCKS:
                return [*replaced, *gone]
            if name is not None and name not in besides:
                gone.append(name)
                del left[name]
        return None

    def _evict(self, gone: list[str]) -> None:
        for name in gone:
            row = self.rows.pop(name)
            self.aged = max(self.aged, row.priority if row.ready else 0.0)

    # ---- what is done to both ----------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1.0, limits.CACHE_WRITING_S]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(name=NAMES, nbytes=SIZES, worth=WORTH, right=RIGHT, prompt=st.lists(NAMES, max_size=3))
    def reserve(self, name: str, nbytes: int, worth: float, right: bool, prompt: list[str]) -> None:
        key, priority = self._key(right), self.aged + worth
        block = NewBlock(name, "tiny", int(name[1]), nbytes, priority)
        deleted: list[str] = []
        if not right:
            with pytest.raises(KeyReplaced):
                self.index.reserve(key, block, prompt, deleted.append)
        elif name in self.rows and not self._given_up(name):
            assert not self.index.reserve(key, block, prompt, deleted.append)
        elif (gone := self._victims(nbytes, 1, prompt, anew=name)) is None:
            with pytest.raises(NoRoom):
                self.index.reserve(key, block, prompt, deleted.append)
        else:
            assert self.index.reserve(key, block, prompt, deleted.append)
            assert sorted(deleted) == sorted(gone)
            self._evict(gone)
            self.rows[name] = _HeldBlock(int(name[1]), nbytes, priority, self.now_s)
            return
        assert deleted == []

    @rule(name=NAMES, right=RIGHT)
    def written(self, name: str, right: bool) -> None:
        known = name in self.rows and right
        assert self.index.written(self._key(right), name) is known
        if known:
            self.rows[name].ready = True

    @rule(stem=st.sampled_from("ab"), depth=st.integers(1, 5), nbytes=SIZES, worth=WORTH)
    def keep_a_prompt(self, stem: str, depth: int, nbytes: int, worth: float) -> None:
        """As a prompt is kept that has been computed: priced, and each block that is lacking written."""
        prompt = [f"{stem}{number}" for number in range(depth)]
        self.price(prompt, worth)
        for name in prompt:
            self.reserve(name, nbytes, worth, True, prompt)
            self.written(name, True)

    @rule(name=NAMES)
    def forget(self, name: str) -> None:
        self.index.forget(name)
        self.rows.pop(name, None)

    @rule(names=st.lists(NAMES, max_size=4), worth=WORTH)
    def price(self, names: list[str], worth: float) -> None:
        assert self.index.price(names, worth) == self.aged + worth
        for name in set(names) & set(self.rows):
            self.rows[name].priority = max(self.rows[name].priority, self.aged + worth)

    @rule(other=SELDOM)
    def take_key(self, other: bool) -> None:
        key = self._key(right=not other)
        self.index.take_key(key)
        if other:
            self.rows, self.links, self.key = {}, {}, key

    @rule(now=SELDOM)
    def forget_unready(self, now: bool) -> None:
        if not now:
            return
        assert sorted(self.index.forget_unready()) == sorted(n for n, r in self.rows.items() if not r.ready)
        self.rows = {name: row for name, row in self.rows.items() if row.ready}

    @rule(quota=st.sampled_from([0, 20, 40, QUOTA]))
    def smaller_for_a_while(self, quota: int) -> None:
        self.index.quota_bytes, deleted = quota, list[str]()
        gone = self._victims(0, 0, [], quota)
        if gone is None:
            with pytest.raises(NoRoom):
                self.index.evict_to_quota(deleted.append)
        else:
            self.index.evict_to_quota(deleted.append)
            assert sorted(deleted) == sorted(gone)
            self._evict(gone)
        self.index.quota_bytes = QUOTA

    @rule(pairs=st.lists(st.tuples(LINKS, NAMES), max_size=4, unique_by=lambda pair: pair[0]), right=RIGHT)
    def begin_with(self, pairs: list[tuple[str, str]], right: bool) -> None:
        if not right:
            with pytest.raises(KeyReplaced):
                self.index.begin_with(self._key(right), pairs)
            return
        self.index.begin_with(self.key, pairs)
        for link, block in pairs:
            self.links.pop(link, None)
            self.links[link] = block
        while len(self.links) > MOST_BEGINNINGS:
            del self.links[next(iter(self.links))]

    # ---- what both are asked -----------------------------------------------------------------------------

    @rule(
        names=st.lists(NAMES, max_size=5, unique=True) | st.sampled_from([EVERY[:5], EVERY[5:]]), right=RIGHT
    )
    def find(self, names: list[str], right: bool) -> None:
        key, blocks = self._key(right), 0
        while blocks < len(names) and self._ready(names[blocks]):
            blocks += 1
        if blocks and not right:
            with pytest.raises(KeyReplaced):
                self.index.find(key, names)
            return
        nbytes = sum(self.rows[name].nbytes for name in names[:blocks])
        assert self.index.find(key, names) == FoundBlocks(blocks, nbytes, 0.0)

    @rule(
        names=st.sampled_from([[], EVERY[:5], EVERY[5:], EVERY[:2]]),
        states=st.permutations(EVERY).map(lambda some: some[:5]),
    )
    def find_states(self, names: list[str], states: list[str]) -> None:
        reach = 0
        while reach < len(names) and self._ready(names[reach]):
            reach += 1
        states = states[: len(names)] if names else states
        ends = [
            (number, self.rows[states[number - 1]].nbytes)
            for number in range(1, (reach if names else len(states)) + 1)
            if self._ready(states[number - 1])
        ][-limits.CHECKPOINTS_PER_PROMPT :]
        blocks = ends[-1][0] if ends else 0
        nbytes = sum(self.rows[name].nbytes for name in names[:blocks])
        expected = FoundBlocks(blocks, nbytes, 0.0, tuple(ends)) if ends else FoundBlocks(0, 0, 0.0)
        assert self.index.find(self.key, names, states) == expected

    @rule(links=st.lists(LINKS, max_size=7, unique=True), right=RIGHT)
    def longest(self, links: list[str], right: bool) -> None:
        key = self._key(right)
        ends = {n: self.links[link] for n, link in enumerate(links, start=1) if self._there(link)}
        if ends and not right:
            with pytest.raises(KeyReplaced):
                self.index.longest(key, links)
            return
        found = self.index.longest(key, links)
        assert found.links == max(ends, default=0)
        if not ends:
            return
        # One block of each depth, as a text has; those between are taken to be like the ones that are known.
        assert set(found.files) <= set(ends.values())
        depths = [self.rows[name].depth for name in found.files]
        assert sorted(depths) == sorted({self.rows[name].depth for name in ends.values()})
        known = [self.rows[name].nbytes for name in found.files]
        assert found.nbytes == sum(known) * (max(depths) + 1) // len(known)

    def _there(self, link: str) -> bool:
        return link in self.links and self._ready(self.links[link])

    @invariant()
    def the_same_is_there(self) -> None:
        if not hasattr(self, "index"):
            return
        assert self.index.names() == {name: row.nbytes for name, row in self.rows.items()}
        assert self.index.nbytes == sum(row.nbytes for row in self.rows.values()) <= QUOTA
        assert len(self.rows) <= MOST_BLOCKS
        assert self.index.key_id == self.key
        self.index.validate()
        ask = self.index._db.execute
        rows = ask("SELECT name, priority, ready FROM blocks").fetchall()
        assert sorted(rows) == sorted((name, row.priority, row.ready) for name, row in self.rows.items())
        links = ask("SELECT link, block FROM beginnings ORDER BY rowid").fetchall()
        assert links == list(self.links.items())


TestIndexBesideADictionary = IndexBesideADictionary.TestCase
TestIndexBesideADictionary.settings = settings(examples(60), stateful_step_count=30)
