"""The module of Gemma 4's assistants: small models that read the keys and values of the model they draft for.

    hidden state behind the model's last norm ─┐
    newest token ── the model's embedding ─────┴ pre_projection ─ layers ─ norm ┬─ head ── next token
                                                                    │           └─ post_projection ── fed back
      keys and values of the model's last layers with a window and without ─────┘

An assistant has no rows of its own, so nothing is taken back. All guesses of a draft stand at the position of
the newest token. The layers are mlx-lm's of Gemma 4, which take keys and values from elsewhere. Small
assistants score clusters of tokens first, and then the tokens of the best ones.

References, read for what is fed and for names of tensors: transformers' ``modeling_gemma4_assistant.py`` and
``SinglePositionMultiTokenCandidateGenerator``, and mlx-vlm's ``drafters/gemma4_assistant``.

In shapes N is the tokens of a text, D the width of a hidden state, d that of its own; the batch is 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx_lm.models import gemma4_text

from fleetd.engine.cpu.packed_layers import table_rows
from fleetd.engine.layers.stage import Stage
from fleetd.engine.sequence_state.kinds import kind_of

# Keys and values of a text, (1, heads, N, size) each, by the kind of their layer.
KindRows = Mapping[str, tuple[mx.array, mx.array]]


class AssistantConfig(msgspec.Struct, frozen=True, kw_only=True):
    """An assistant's shape, under the names of its config."""

    text_config: dict[str, Any]
    # D.
    backbone_hidden_size: int
    # Whether tokens are scored by clusters; of so many, the tokens of the best so many are scored.
    use_ordered_embeddings: bool = False
    num_centroids: int = 2048
    centroid_intermediate_top_k: int = 32
    tie_word_embeddings: bool = True

    @property
    def args(self) -> Any:
        """The constants of its layers, as mlx-lm takes them. All take keys and values from elsewhere."""
        layers = self.text_config.get("num_hidden_layers")
        plain = {"hidden_size_per_layer_input": 0, "enable_moe_block": False, "use_double_wide_mlp": False}
        given = {**self.text_config, **plain, "num_kv_shared_layers": layers}
        return gemma4_text.ModelArgs.from_dict(given)


class Assistant(nn.Module):  # type: ignore[misc]
    """An assistant of ``model``, with random weights until they are loaded; the model's are not its own.

    Raises:
        ValueError: it was made for another model.
        ModelUnsupported: the model's layers cannot be called apart.
    """

    def __init__(self, model: Any, config: AssistantConfig) -> None:
        super().__init__()
        args = config.args
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.model.layers = [gemma4_text.DecoderLayer(args, i) for i in range(args.num_hidden_layers)]
        self.model.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.pre_projection = nn.Linear(2 * config.backbone_hidden_size, args.hidden_size, bias=False)
        self.post_projection = nn.Linear(args.hidden_size, config.backbone_hidden_size, bias=False)
        if config.use_ordered_embeddings:
            self.masked_embedding = _Clusters(config, args)
        elif not config.tie_word_embeddings:
            self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)
        self.config = config
        self.attach(Stage.of(model))
        self._check(args)

    def attach(self, stage: Stage) -> None:
        """Use the embedding and the last norm of the whole model in ``stage``: again after its modules were
        replaced."""
        kinds = {
            layer.layer_type: index
            for index, layer in enumerate(stage.weights.layers)
            if stage.empty[index] is not None and hasattr(layer, "layer_type")
        }
        self._target = _AssistantTarget(stage, kinds)

    @property
    def hidden_layer(self) -> int:
        """The model's layer whose output it takes."""
        return self._target.stage.total - 1

    def rows(self, cache: Sequence[Any], tokens: int) -> KindRows | None:
        """What it reads of the model's cache, which holds ``tokens`` tokens; None if it is not all there."""
        stage, found = self._target.stage, {}
        each = stage.spread(cache)
        for kind, index in self._target.kinds.items():
            own = kind_of(each[index])
            rows = own.rows(each[index], 0, tokens)
            if own.held(each[index]) != tokens or rows is None or len(rows) != 2:
                return None
            keys, values = own.numbers(each[index], rows)
            found[kind] = (keys, values)
        return found

    def empty_rows(self, tokens: int) -> KindRows:
        """Rows as ``rows`` gives them, of a text of zeros: to see what a guess takes."""
        found = {}
        for kind, index in self._target.kinds.items():
            own = self._target.stage.weights.layers[index].self_attn
            zeros = mx.zeros((1, own.n_kv_heads, tokens, own.head_dim))
            found[kind] = (zeros, zeros)
        return found

    def guesses(self, token: int, position: int, state: mx.array, count: int, rows: KindRows) -> mx.array:
        """The ``count`` likeliest tokens after ``token``, the text's at ``position``: int32 (count,). Lazy.

        Args:
            state: (1, D), what ``hidden_layer`` gave for the token before.
            rows: of all tokens before.
        """
        stage = self._target.stage
        newest, hidden, found = mx.array([[token]]), stage.weights.norm(state[None]), []
        for _ in range(count):
            embedded = stage.embed(newest)
            own = self.pre_projection(mx.concatenate([embedded, hidden.astype(embedded.dtype)], axis=-1))
            for layer in self.model.layers:
                own, _, _ = layer(own, shared_kv=rows[layer.layer_type], offset=position)
            own = self.model.norm(own)
            newest, hidden = self._likeliest(own), self.post_projection(own)
            found.append(newest)
        # To read behind the table would end the process.
        return mx.minimum(mx.concatenate(found, axis=1)[0], table_rows(stage.weights.embed_tokens) - 1)

    def _likeliest(self, own: mx.array) -> mx.array:
        """The likeliest token of (1, 1, d): int32 (1, 1)."""
        if "masked_embedding" in self:
            ids = self.masked_embedding(own[0, 0])
            scores = self.model.embed_tokens(ids) @ own[0, 0]
            return ids[mx.argmax(scores)].reshape(1, 1).astype(mx.int32)
        logits = self.lm_head(own) if "lm_head" in self else self.model.embed_tokens.as_linear(own)
        return mx.argmax(logits, axis=-1).astype(mx.int32)

    def _check(self, args: Any) -> None:
        """Raises ValueError if the model is not one whose keys and values it can read."""
        stage = self._target.stage
        if self.config.backbone_hidden_size != stage.hidden_width:
            raise ValueError(
                f"it takes hidden states of {self.config.backbone_hidden_size}, the model's are of "
                f"{stage.hidden_width}"
            )
        if args.vocab_size != (tokens := table_rows(stage.weights.embed_tokens)):
            raise ValueError(f"it knows {args.vocab_size} tokens; the model has {tokens}")
        for layer in self.model.layers:
            if (index := self._target.kinds.get(layer.layer_type)) is None:
                raise ValueError(f"the model has no layer of {layer.layer_type}")
            own, theirs = layer.self_attn, stage.weights.layers[index].self_attn
            if own.head_dim != theirs.head_dim or own.n_heads % theirs.n_kv_heads:
                raise ValueError(f"its {layer.layer_type} cannot read the model's keys")


class _AssistantTarget(msgspec.Struct, frozen=True):
    """The model, and its last layer of each kind that keeps rows. MLX takes no struct for a parameter."""

    stage: Stage
    kinds: dict[str, int]


class _Clusters(nn.Module):  # type: ignore[misc]
    """Chooses the tokens that are scored: those of the clusters that are likeliest."""

    def __init__(self, config: AssistantConfig, args: Any) -> None:
        super().__init__()
        self.most = config.centroid_intermediate_top_k
        self.centroids = nn.Linear(args.hidden_size, config.num_centroids, bias=False)
        # Ids by cluster, each of them as large as any other.
        self.token_ordering = mx.zeros(args.vocab_size, dtype=mx.int32)

    def __call__(self, own: mx.array) -> mx.array:
        """(d,) to ids."""
        scores = self.centroids(own)
        best = mx.argpartition(scores, -self.most)[-self.most :]
        ids: mx.array = self.token_ordering.reshape(scores.size, -1)[best].reshape(-1)
        return ids
