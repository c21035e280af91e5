"""Which heads of a model find what is asked for, and how many layers it takes to ask them.

    needles ─► every head's attention ─► rank of the needle ─► the best heads below each layer ─► exit

A few heads do most of a model's attention up, and good ones often lie in its first half: what comes after the
last of them need not be computed. They are found with short made-up texts, by how high the sentence that
answers ranks among all tokens. The same model gives the same profile, whatever it is to be used for. What
changes what is found here raises ``known_profiles.ALGORITHM``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from fleetd import limits
from fleetd.compression.token_scores import F32, POOL, log_sum_exp, pooled
from fleetd.engine.protocol import Profile, Score
from fleetd.engine.scoring.attention_pass import AttentionPass, AttentionTap, logits_of
from fleetd.engine.scoring.needles import Needle, needles
from fleetd.engine.scoring.scoring_layout import lay_out

NEEDLES, SENTENCES = 12, 36
# Layers that are tried: what is found in the last third would save little, and costs most to try.
TRIED = 2 / 3
# An answer is found if the middle one of its tokens is among this share of all tokens.
FOUND = 0.1
# A model whose best heads find fewer answers than this cannot score; chance finds FOUND of them.
LEAST_FOUND = 0.5
# What leaving earlier is worth: of the share that is found, and of the mean logarithm of ranks. On
# SmolLM2 the first half of the layers keeps within it (`python -m bench smart-score`).
_FEWER, _WORSE = 0.05, 0.25
# Heads that are that much worse than the best one, by the same measure, add more noise than they find.
_MUCH_WORSE = 0.7


class HeadChoice(msgspec.Struct, frozen=True):
    """``heads`` that lie below layer ``exit_layer``, the share of needles that they find together and the
    mean natural logarithm of the needles' ranks, as shares of all tokens."""

    heads: list[tuple[int, int]]
    exit_layer: int
    found: float
    log_rank: float


class NeedleResult(msgspec.Struct, frozen=True):
    """One needle: every head's attention (heads, N), and which of the tokens (N,) are the answer's."""

    attention: F32
    answer: Any

    def rank(self, heads: Sequence[int]) -> float:
        """The rank of the middle one of the answer's tokens by these heads, as a share of all tokens."""
        values = pooled(self.attention[list(heads)].max(axis=0), POOL)
        order = np.argsort(-values, kind="stable")
        ranks = np.empty(len(values))
        ranks[order] = np.arange(1, len(values) + 1)
        return float(np.median(ranks[self.answer]) / len(values))


def choose(layers: Sequence[int], tried: Sequence[NeedleResult]) -> list[HeadChoice]:
    """The curve: the best heads below every layer in which there are any, first layers first.

    ``layers`` says of each of the heads in ``tried`` in which layer it lies, ascending.
    """
    alone = np.array([_log_rank(tried, [head])[0] for head in range(len(layers))])
    best = np.argsort(alone, kind="stable")
    counts: dict[int, int] = {}
    numbers = []
    for layer in layers:
        numbers.append(counts.get(layer, 0))
        counts[layer] = numbers[-1] + 1
    curve = []
    for exit_layer in sorted({layer + 1 for layer in layers}):
        below = [int(head) for head in best if layers[head] < exit_layer]
        heads = [head for head in below if alone[head] <= alone[below[0]] + _MUCH_WORSE]
        heads = heads[: limits.SCORE_HEADS]
        log_rank, found = _log_rank(tried, heads)
        named = sorted((layers[head], numbers[head]) for head in heads)
        curve.append(HeadChoice(named, named[-1][0] + 1, found, log_rank))
    return curve


def _log_rank(tried: Sequence[NeedleResult], heads: Sequence[int]) -> tuple[float, float]:
    ranks = np.array([each.rank(heads) for each in tried])
    return float(np.log(ranks).mean()), float((ranks <= FOUND).mean())


def settled(curve: Sequence[HeadChoice]) -> HeadChoice:
    """The earliest exit that is about as good as the best one."""
    found = max(choice.found for choice in curve)
    able = [choice for choice in curve if choice.found >= found - _FEWER]
    best = min(choice.log_rank for choice in able)
    return next(choice for choice in able if choice.log_rank <= best + _WORSE)


@dataclass(slots=True)
class Profiling:
    """Finding a model's profile, a chunk of a made-up text at a time."""

    tap: AttentionTap
    tokenizer: Any
    context_tokens: int
    tried: list[NeedleResult] = field(default_factory=list)
    _left: list[Needle] = field(default_factory=lambda: needles(NEEDLES, SENTENCES))
    _now: tuple[Any, AttentionPass] | None = None

    @property
    def layers(self) -> list[int]:
        """Those that are tried."""
        most = max(min(self.tap.scales) + 1, round(self.tap.stage.total * TRIED))
        return [layer for layer in self.tap.scales if layer < most]

    @property
    def finished(self) -> bool:
        return self._now is None and not self._left

    def step(self, chunk_tokens: int) -> int:
        if self._now is None:
            needle = self._left.pop(0)
            text = f"{needle.text}\n{needle.question}"
            request = Score("profile", text, [(len(needle.text) + 1, len(text))])
            laid = lay_out(request, self.tokenizer, self.context_tokens)
            answer = (laid.starts < needle.end) & (laid.ends > needle.start)
            # A context that is shorter than the text takes it in pieces: the one that matters is asked.
            work = next(each for each in laid.passes if answer[each.first :][: each.count].any())
            every = {layer: self.tap.key_heads(layer) for layer in self.layers}
            attention = AttentionPass(self.tap, work, every)
            self._now = answer[work.first :][: work.count], attention
        answer, attention = self._now
        done = attention.step(chunk_tokens)
        if attention.finished:
            self._now = None
            self.tried.append(NeedleResult(self._attention(attention), answer))
        return done

    def _attention(self, attention: AttentionPass) -> F32:
        """(heads, N): of each head the mean of its two best queries' attention to each token."""
        found = []
        for layer in self.layers:
            queries, keys = self.tap.placed(layer, attention.queries[layer], attention.keys[layer])
            group = len(queries) // len(keys)
            for head, query in enumerate(queries):
                logits = logits_of(query, keys[head // group], self.tap.scales[layer])
                p = np.sort(np.exp(logits - log_sum_exp(logits)[:, None]), axis=0)
                found.append(p[-2:].mean(axis=0))
        return np.stack(found)

    def curve(self) -> list[HeadChoice]:
        """The curve from the needles so far."""
        heads = {layer: self.tap.query_heads(layer) for layer in self.layers}
        return choose([layer for layer in self.layers for _ in range(heads[layer])], self.tried)

    def profile(self) -> Profile:
        """The profile, once it is ``finished``. It has no heads if they find too little for scoring."""
        found = settled(self.curve())
        heads = found.heads if found.found >= LEAST_FOUND else []
        recall = round(found.found, 3)
        return Profile(heads, found.exit_layer, self.tap.stage.total, recall)
