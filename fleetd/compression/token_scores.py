"""How much the question attends to each token of a text, from segments that were scored apart.

    scorer 1   head | segment 1            | question ──► SegmentScores ─┐
    scorer 2   head | ········ | segment 2 | question ──► SegmentScores ─┴─► merge ──► TokenScores

A *logit* is a query's scaled dot product with a token's key, in one attention head; a *pair* is one head and
one query. Softmax over the whole text needs the sum of all tokens' exponentials. Each segment brings the
logarithm of its own sum per pair, these add up, and every token then has its probability among all tokens of
the text: Σ exp of the parts is the sum of the whole, so the softmax is exact whatever the cuts.

What is not exact. A segment's tokens, and the question behind it, have not seen the other segments: their
keys and queries are those of a shorter text, except in the first layer, where a token's are its own. And of
each token only its ``PAIRS`` best pairs by its own segment's softmax are kept; ``merge`` is exact as long as
the pairs that decide after merging are among them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from fleetd.compression.packed import PackedScores

I32 = npt.NDArray[np.int32]
U16 = npt.NDArray[np.uint16]
F32 = npt.NDArray[np.float32]

# Pairs that are kept of each token. Two decide; the others are for a merge that weighs the pairs anew.
PAIRS = 16
# A token's part of ``SegmentScores``.
TOKEN_BYTES = 2 * 4 + PAIRS * (2 + 4)
# Tokens that a score is averaged over: a name is several tokens, and what it is about stands beside it.
POOL = 13
# A text's first tokens that count for nothing: attention that finds nothing goes to them, whatever they say
# (attention sinks: Xiao et al., arXiv 2309.17453). If no token of the model opens every text, they are the
# text's own. Averaged with what stands beside them, that made a table's header, and with it all of its rows,
# matter more than any answer further down. What a text begins with is kept in any case.
SINK_TOKENS = 4
# Tokens whose pairs are sorted at a time.
_BLOCK = 1024
# What rounding may put a logit above the logarithm of a sum that it is part of.
_ROUNDING = 1e-3


class SegmentScores(msgspec.Struct, frozen=True):
    """Logits of N tokens of a text by H heads and Q queries; tokens in the order of the text, question
    left out.

    starts, ends: (N,) character ranges in the text; several segments' tokens are disjoint.
    pairs: (N, K) which pair, head · Q + query; logits: (N, K) of these, the likeliest first.
    log_sums: (H, Q) log Σ exp(logit) over the N tokens, for every pair.
    """

    starts: I32
    ends: I32
    pairs: U16
    logits: F32
    log_sums: F32

    @classmethod
    def of_logits(cls, starts: I32, ends: I32, logits: F32) -> SegmentScores:
        """The scores that logits (H, Q, N) give. Equal ones are kept in the order of the pairs."""
        heads, queries, n = logits.shape
        # A head at a time, and a block of tokens: all at once would be as much memory again, several times.
        log_sums = np.stack([log_sum_exp(each) for each in logits])
        flat = logits.reshape(heads * queries, n)
        keep = min(PAIRS, heads * queries)
        pairs = np.empty((n, keep), np.uint16)
        kept = np.empty((n, keep), np.float32)
        for at in range(0, n, _BLOCK):
            block = np.ascontiguousarray((flat[:, at : at + _BLOCK] - log_sums.reshape(-1, 1)).T)
            best = np.sort(np.argpartition(-block, keep - 1, axis=1)[:, :keep], axis=1)
            order = np.argsort(-np.take_along_axis(block, best, axis=1), axis=1, kind="stable")
            best = np.take_along_axis(best, order, axis=1)
            pairs[at : at + _BLOCK] = best
            kept[at : at + _BLOCK] = np.take_along_axis(flat[:, at : at + _BLOCK].T, best, axis=1)
        return cls(starts, ends, pairs, kept, log_sums)

    @property
    def queries(self) -> int:
        return int(self.log_sums.shape[1])

    def within(self, start: int, end: int) -> bool:
        """True if all tokens start in characters [start, end)."""
        return bool(((start <= self.starts) & (self.starts < end)).all())

    def packed(self) -> PackedScores:
        heads, queries = self.log_sums.shape
        return PackedScores(
            queries,
            heads,
            self.starts.astype("<i4").tobytes(),
            self.ends.astype("<i4").tobytes(),
            self.pairs.astype("<u2").tobytes(),
            self.logits.astype("<f4").tobytes(),
            self.log_sums.astype("<f4").tobytes(),
        )

    @classmethod
    def unpack(cls, packed: PackedScores) -> SegmentScores:
        """Raises ValueError where the parts do not fit together: they may come from another machine."""
        starts, ends = np.frombuffer(packed.starts, "<i4"), np.frombuffer(packed.ends, "<i4")
        pairs, logits = np.frombuffer(packed.pairs, "<u2"), np.frombuffer(packed.logits, "<f4")
        log_sums = np.frombuffer(packed.log_sums, "<f4")
        n, of_all = len(starts), packed.heads * packed.queries
        if packed.heads < 1 or packed.queries < 1 or len(log_sums) != of_all or len(ends) != n:
            raise ValueError("scores whose parts have different lengths")
        if n == 0 or not n <= len(pairs) == len(logits) <= n * of_all or len(pairs) % n:
            raise ValueError("scores without tokens, or with pairs that are not a row per token")
        if not (np.isfinite(logits).all() and np.isfinite(log_sums).all()):
            raise ValueError("scores that are no numbers")
        if (
            (pairs >= of_all).any()
            or (starts < 0).any()
            or (ends < starts).any()
            or _falls(starts)
            or _falls(ends)
        ):
            raise ValueError("scores of tokens or pairs that cannot be")
        # A probability above 1 cannot be, and a huge one would overflow what it is added to.
        if (logits > log_sums[pairs] + _ROUNDING).any():
            raise ValueError("scores of which one is more than the sum of all")
        return cls(
            starts.astype(np.int32),
            ends.astype(np.int32),
            pairs.reshape(n, -1).astype(np.uint16),
            logits.reshape(n, -1).astype(np.float32),
            log_sums.reshape(packed.heads, packed.queries).astype(np.float32),
        )


class TokenScores(msgspec.Struct, frozen=True):
    """Tokens of a text in order, without the question's: character ranges (N,), and how much each matters.

    ``values`` (N,) are averages of probabilities: not negative, at most 1, comparable within one text only.
    """

    starts: I32
    ends: I32
    values: F32


def join(segments: Sequence[SegmentScores]) -> SegmentScores:
    """Several segments as one, without loss. Raises ValueError as ``merge``."""
    if not segments:
        raise ValueError("no segments to merge")
    shapes = {(*s.log_sums.shape, s.pairs.shape[1]) for s in segments}
    if len(shapes) > 1:
        raise ValueError("segments that were scored by different heads or queries")
    parts = sorted(segments, key=lambda s: int(s.starts[0]))
    starts = np.concatenate([s.starts for s in parts])
    ends = np.concatenate([s.ends for s in parts])
    # Within a segment several tokens may begin at one character that takes all of them.
    if _falls(starts) or any(a.starts[-1] == b.starts[0] for a, b in itertools.pairwise(parts)):
        raise ValueError("segments that overlap")
    return SegmentScores(
        starts,
        ends,
        np.concatenate([s.pairs for s in parts]),
        np.concatenate([s.logits for s in parts]),
        log_sum_exp(np.stack([s.log_sums for s in parts], axis=-1)),
    )


def merge(segments: Sequence[SegmentScores], pool: int = POOL) -> TokenScores:
    """All tokens' probabilities among all tokens, reduced to one number each; see ``reduced`` and ``pooled``.
    The first ``SINK_TOKENS`` count for nothing.

    The order of ``segments`` does not matter. Raises ValueError where they cannot be parts of one text that
    was scored with one question by one model.
    """
    whole = join(segments)
    values = reduced(whole)
    values[:SINK_TOKENS] = 0
    return TokenScores(whole.starts, whole.ends, pooled(values, pool))


def reduced(scores: SegmentScores) -> F32:
    """(N,): of the kept pairs' probabilities the best head per query, then the mean of the two best queries.

    The mean over all queries would dilute what one of them alone asks for, and the best one alone is noisy.
    """
    every = scores.log_sums.reshape(-1)
    p = np.exp(scores.logits - every[scores.pairs])  # (N, K)
    query = scores.pairs % scores.queries
    first = p.argmax(axis=1)[:, None]
    same = query == np.take_along_axis(query, first, axis=1)
    best = np.take_along_axis(p, first, axis=1)[:, 0]
    if scores.queries == 1:
        alone: F32 = best.astype(np.float32)
        return alone
    second = np.where(same, 0.0, p).max(axis=1)
    mean: F32 = ((best + second) / 2).astype(np.float32)
    return mean


def pooled(values: F32, width: int) -> F32:
    """Means over ``width`` tokens (odd) around each; at the ends over those that are there."""
    if width <= 1 or not len(values):
        return values
    half = width // 2
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    low = np.maximum(np.arange(len(values)) - half, 0)
    high = np.minimum(np.arange(len(values)) + half + 1, len(values))
    # A difference of running sums can fall below zero by rounding.
    means = np.maximum(sums[high] - sums[low], 0.0) / (high - low)
    result: F32 = means.astype(np.float32)
    return result


def log_sum_exp(values: F32) -> F32:
    """Over the last axis, in f32: log Σ exp(values)."""
    most = values.max(axis=-1, keepdims=True)
    sums = np.exp(values - most).sum(axis=-1, dtype=np.float32)
    result: F32 = (np.log(sums) + most[..., 0]).astype(np.float32)
    return result


def _falls(starts: I32) -> bool:
    return bool((np.diff(starts) < 0).any())
