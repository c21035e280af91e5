"""What one scorer found in one segment of a text, as it travels: plain bytes, little endian."""

from __future__ import annotations

import msgspec

from fleetd.text.bounded import Natural


class PackedScores(msgspec.Struct, frozen=True):
    """``scores.SegmentScores`` of N tokens, Q queries, H heads and the best K pairs of each token.

    ``starts``, ``ends``: i32 (N,); ``pairs``: u16 (N, K); ``logits``: f32 (N, K); ``log_sums``: f32 (H, Q).
    """

    queries: Natural
    heads: Natural
    starts: bytes
    ends: bytes
    pairs: bytes
    logits: bytes
    log_sums: bytes
