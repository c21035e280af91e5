"""What DFlash2 and DSpark have more than DFlash (``block_drafter``): convolutions, and other choices."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from fleetd.engine.heads.block_config import BlockConfig


class Convolution(nn.Module):  # type: ignore[misc]
    """Two convolutions over the tokens before, by groups of channels; a token adds to their kernels."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        width, size, self.group = config.hidden_size, config.conv_kernel_size, config.conv_group_size
        self.base_kernel = mx.zeros((2, size, width))
        self.kernel_projection = nn.Linear(width, 2 * size * (width // self.group), bias=False)

    def kernels(self, hidden: mx.array) -> mx.array:
        """What each token of (1, T, D) adds to both kernels: (2, size, T, groups, 1)."""
        _, size, width = self.base_kernel.shape
        added: mx.array = self.kernel_projection(hidden).reshape(-1, 2, size, width // self.group, 1)
        return added.transpose(1, 2, 0, 3, 4)

    def __call__(self, hidden: mx.array, kernels: mx.array, which: int) -> mx.array:
        _, count, width = hidden.shape
        groups = hidden.reshape(count, width // self.group, self.group)
        total = mx.zeros_like(groups)
        for back in range(min(count, self.base_kernel.shape[1])):
            moved = mx.pad(groups[: count - back], [(back, 0), (0, 0), (0, 0)])
            base = self.base_kernel[which, back].reshape(1, -1, self.group).astype(hidden.dtype)
            total = total + (base + kernels[which, back]) * moved
        return total.reshape(hidden.shape)


class Selector(nn.Module):  # type: ignore[misc]
    """Chooses a path through each token's best candidates, by their logits and by what neighbours say."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        rank, self.most = config.selector_rank, config.selector_top_k
        self.predecessor_codebook = nn.Embedding(config.vocab_size, rank)
        self.successor_codebook = nn.Embedding(config.vocab_size, rank)
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)

    def __call__(self, hidden: mx.array, logits: mx.array, token: int) -> mx.array:
        """(1, T, D) and (1, T, V) to ids (T,)."""
        best = mx.argpartition(logits[0], -self.most, axis=-1)[:, -self.most :]
        scores = mx.take_along_axis(logits[0], best, axis=-1)
        wanted = self.hidden_projection(hidden)[0]
        before, path = mx.array(token), []
        for row in range(best.shape[0]):
            pairs = (self.predecessor_codebook(before) * wanted[row]) @ self.successor_codebook(best[row]).T
            before = best[row, mx.argmax(scores[row] + pairs)]
            path.append(before)
        return mx.stack(path)


class Markov(nn.Module):  # type: ignore[misc]
    """Adds to each token's logits what the token before it says, as a product of two thin tables."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.vocab_size, bias=False)

    def __call__(self, logits: mx.array, token: int) -> mx.array:
        """(1, T, V) to ids (T,)."""
        before, path = mx.array(token), []
        for row in range(logits.shape[1]):
            before = mx.argmax(logits[0, row] + self.markov_w2(self.markov_w1(before)))
            path.append(before)
        return mx.stack(path)
