"""The module of a block drafter: it guesses several tokens in one pass, from a model's hidden states.

    hidden states of some layers of the model, side by side ── fc ─ hidden_norm ── keys, values of each layer
    newest token, mask, mask, … ── the model's embedding ── layers ─ norm ── the model's head ── guesses

Keys and values of the text are made of committed tokens only, each apart from all others: any of them may be
missing, and old ones can be left out. Those of the block are gone when it has been guessed.

Three kinds differ in what stands around that. **DFlash** is the picture: what is guessed at a mask stands
there. **DFlash2** has convolutions around attention and MLP, whose kernels depend on the token, and a
selector, which scores pairs of neighbours among each mask's best candidates. **DSpark** adds to the logits
what a table of pairs says of the token before (a Markov head); its first guess stands at the newest token.

References, read for names of tensors and for what goes where: z-lab's ``dflash/model_mlx.py`` (DFlash and
DFlash2; layers with a window are causal inside a block unless the config says otherwise), and mlx-vlm's
``speculative/drafters/dspark`` and ``qwen3_dflash``.

In shapes T is a number of tokens, D the width of a hidden state, V the vocabulary; the batch is 1.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.qwen3 import MLP
from mlx_lm.models.rope_utils import initialize_rope

from fleetd.engine.cpu.packed_layers import table_rows
from fleetd.engine.heads.block_config import BlockConfig
from fleetd.engine.heads.block_extras import Convolution, Markov, Selector
from fleetd.engine.layers.stage import Stage
from fleetd.errors import ModelUnsupported
from fleetd.models.heads import ROWS


class BlockRows:
    """A layer's keys and values of a text, (1, heads, rows, size) each: the newest, at most ``ROWS``."""

    def __init__(self) -> None:
        self._kept: tuple[mx.array, mx.array] | None = None

    @property
    def held(self) -> int:
        """Rows."""
        return 0 if self._kept is None else int(self._kept[0].shape[2])

    @property
    def arrays(self) -> list[mx.array]:
        return [] if self._kept is None else [*self._kept]

    def with_more(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The rows, and these behind them. Lazy."""
        if self._kept is None:
            return keys, values
        return mx.concatenate([self._kept[0], keys], axis=2), mx.concatenate([self._kept[1], values], axis=2)

    def add(self, keys: mx.array, values: mx.array) -> None:
        """Keep these, too. Lazy."""
        keys, values = self.with_more(keys, values)
        self._kept = keys[..., -ROWS:, :], values[..., -ROWS:, :]


class BlockDrafter(nn.Module):  # type: ignore[misc]
    """A drafter for ``model``, with random weights until they are loaded; those of the model are not its own.

    Raises ModelUnsupported if the model's embedding and head cannot be called apart.
    """

    def __init__(self, model: Any, config: BlockConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * width, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.layers = [_Layer(config, index) for index in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        if config.selector_rank:
            self.candidate_selector = Selector(config)
        if config.markov_rank:
            self.markov_head = Markov(config)
        self.config = config
        self.attach(Stage.of(model))

    def attach(self, ends: Stage) -> None:
        """Use the embedding and head of ``ends``, a stage of the model that has both of its ends: again after
        its modules were replaced, or when layers went to other machines."""
        if ends.architecture.between:
            raise ModelUnsupported("Its layers give more than one hidden state for each token.")
        self._target = _BlockTarget(ends)

    def make_cache(self) -> list[BlockRows]:
        """Rows for each layer, none yet."""
        return [BlockRows() for _ in self.layers]

    def read(self, states: mx.array, start: int, cache: list[BlockRows]) -> None:
        """Add the rows of committed tokens that follow each other, the first of them the text's ``start``.

        ``states``: (T, k·D), the outputs of the k layers that the config names, side by side. Lazy.
        """
        context = self.hidden_norm(self.fc(states[None]))
        for layer, kept in zip(self.layers, cache, strict=True):
            kept.add(*layer.self_attn.rows(context, start))

    def guesses(self, token: int, position: int, count: int, cache: list[BlockRows]) -> mx.array:
        """The ``count`` likeliest tokens after ``token``, the text's at ``position``: int32 (count,).

        Of earlier tokens ``cache`` has rows. Lazy.
        """
        stage, config = self._target.stage, self.config
        masks = count if not config.markov_rank else count - 1
        block = mx.array([[token] + [config.mask_token_id] * masks])
        hidden = stage.embed(block) * config.input_embedding_scale
        for layer, kept in zip(self.layers, cache, strict=True):
            hidden = layer(hidden, position, kept)
        hidden = self.norm(hidden[:, -count:])
        logits = self._logits(hidden)
        if config.selector_rank:
            chosen = self.candidate_selector(hidden, logits, token)
        elif config.markov_rank:
            chosen = self.markov_head(logits, token)
        else:
            chosen = mx.argmax(logits[0], axis=-1)
        # A head may have more rows than the table; to read behind that would end the process.
        return mx.minimum(chosen.astype(mx.int32), table_rows(stage.weights.embed_tokens) - 1)

    def _logits(self, hidden: mx.array) -> mx.array:
        weights, config = self._target.stage.weights, self.config
        head = weights.lm_head if "lm_head" in weights else weights.embed_tokens
        logits: mx.array = getattr(head, "as_linear", head)(hidden) * config.output_multiplier
        cap = config.final_logit_softcapping
        return mx.tanh(logits / cap) * cap if cap else logits


class _BlockTarget(msgspec.Struct, frozen=True):
    """The model. MLX takes no struct for a parameter."""

    stage: Stage


class _Attention(nn.Module):  # type: ignore[misc]
    def __init__(self, config: BlockConfig, index: int) -> None:
        super().__init__()
        width, size = config.hidden_size, config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.scale = size**-0.5
        sliding = bool(config.layer_types) and config.layer_types[index] == "sliding_attention"
        self.window = config.sliding_window if sliding else None
        self.causal = sliding if config.is_causal is None else config.is_causal
        self.q_proj = nn.Linear(width, self.heads * size, bias=False)
        self.k_proj = nn.Linear(width, self.kv_heads * size, bias=False)
        self.v_proj = nn.Linear(width, self.kv_heads * size, bias=False)
        self.o_proj = nn.Linear(self.heads * size, width, bias=False)
        self.q_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        scaling, most = config.rope_scaling, config.max_position_embeddings
        self._rope = initialize_rope(size, config.rope_theta, False, scaling, most)

    def rows(self, hidden: mx.array, start: int) -> tuple[mx.array, mx.array]:
        """Keys and values of tokens, (1, T, D), of which the first is the text's ``start``."""
        keys = self.k_norm(_by_head(self.k_proj(hidden), self.kv_heads))
        return self._rope(keys, offset=start), _by_head(self.v_proj(hidden), self.kv_heads)

    def __call__(self, hidden: mx.array, start: int, kept: BlockRows) -> mx.array:
        queries = self._rope(self.q_norm(_by_head(self.q_proj(hidden), self.heads)), offset=start)
        keys, values = self.rows(hidden, start)
        keys, values = kept.with_more(keys, values)
        mask = self._mask(kept.held, hidden.shape[1])
        given = scaled_dot_product_attention(queries, keys, values, cache=None, scale=self.scale, mask=mask)
        out: mx.array = self.o_proj(given.transpose(0, 2, 1, 3).reshape(1, hidden.shape[1], -1))
        return out

    def _mask(self, known: int, count: int) -> mx.array | None:
        """(count, known + count): what each token of a block sees of the text and of the block."""
        if not self.causal and self.window is None:
            return None
        query, key = known + mx.arange(count)[:, None], mx.arange(known + count)[None]
        seen = key <= query if self.causal else mx.ones((count, known + count), dtype=mx.bool_)
        return seen if self.window is None else seen & ((key >= known) | (query - key < self.window))


class _Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, config: BlockConfig, index: int) -> None:
        super().__init__()
        self.self_attn = _Attention(config, index)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.conv_kernel_size:
            self.attention_conv, self.mlp_conv = Convolution(config), Convolution(config)

    def __call__(self, hidden: mx.array, start: int, kept: BlockRows) -> mx.array:
        given, kernels = self._before("attention_conv", self.input_layernorm(hidden))
        hidden = hidden + self._after("attention_conv", self.self_attn(given, start, kept), kernels)
        given, kernels = self._before("mlp_conv", self.post_attention_layernorm(hidden))
        return hidden + self._after("mlp_conv", self.mlp(given), kernels)

    def _before(self, name: str, hidden: mx.array) -> tuple[mx.array, Any]:
        """What goes into attention or MLP, and the kernels for what comes out; None without convolutions."""
        if name not in self:
            return hidden, None
        kernels = self[name].kernels(hidden)
        return self[name](hidden, kernels, 0), kernels

    def _after(self, name: str, hidden: mx.array, kernels: Any) -> mx.array:
        return hidden if kernels is None else self[name](hidden, kernels, 1)


def _by_head(array: mx.array, heads: int) -> mx.array:
    """(1, T, heads·size) to (1, heads, T, size)."""
    return array.reshape(1, array.shape[1], heads, -1).transpose(0, 2, 1, 3)
