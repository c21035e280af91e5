"""The module of an MTP head (multi-token prediction): a layer or two more, which guess a token ahead.

    hidden state of token i, after the model's last norm ── pre_fc_norm_hidden ──┐
    token i+1 ── the model's embedding ── pre_fc_norm_embedding ─────────────────┴ fc ─ layers ─ norm ─ head
                                                                                                 token i+2

The layers are of the model's own classes, and embedding and output head are the model's. So one module serves
all families; how they name its parts, and what else differs, is a table in ``fleetd.models.heads``.

References, read for what goes in and what is fed back: vLLM's ``qwen3_next_mtp.py`` (embedding before hidden
state in ``fc``; later steps are fed what ``norm`` gave), ``deepseek_mtp.py`` (the same order; later steps are
fed what the layer gave, and ``shared_head.norm`` stands before the head only), ``mimo_mtp.py`` (hidden
state before embedding) and ``nemotron_h_mtp.py`` (a layer that attends and one of experts; later steps are
fed what ``final_layernorm`` gave). In all of them the first hidden state is the model's output behind its
last norm.

In shapes B is the batch, T the tokens, D the width of a hidden state, V the vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
from msgspec.structs import replace

from fleetd.engine.cpu.packed_layers import table_rows
from fleetd.engine.layers.stage import Stage
from fleetd.engine.sequence_state.kinds import kind_of
from fleetd.errors import ModelUnsupported


class MtpHead(nn.Module):  # type: ignore[misc]
    """A head for ``model``, with random weights until they are loaded; those of the model are not its own.

    Args:
        draft_tokens: int32 (Vd,), the only ids that it guesses; None for all. Their rows of the model's
            output head are then its own.
        feeds_normed: later steps are fed what ``norm`` gave, not what the last layer gave.
        layers: for each of its layers one of the model's that is of the same kind; None for one layer like
            the model's last that keeps plain rows.

    Raises:
        ValueError: ``draft_tokens`` are no token ids of the model.
        ModelUnsupported: the model's layers cannot be called apart, or none of ``layers`` keeps plain rows,
            or one keeps something else.
    """

    def __init__(
        self,
        model: Any,
        draft_tokens: mx.array | None = None,
        *,
        feeds_normed: bool = True,
        layers: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        stage = Stage.of(model)
        indices, width = _attending(stage, layers), stage.hidden_width
        self.pre_fc_norm_embedding = copy.deepcopy(stage.weights.norm)
        self.pre_fc_norm_hidden = copy.deepcopy(stage.weights.norm)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = [_like(stage.weights.layers[index], stage.args, index) for index in indices]
        self.norm = copy.deepcopy(stage.weights.norm)
        self.feeds_normed = feeds_normed
        # MLX takes what begins with "_" for no parameter.
        self._draft_tokens = draft_tokens
        if draft_tokens is not None:
            known = min(_output_head(stage).weight.shape[0], _table_rows(stage))
            check_ids("draft_tokens", draft_tokens, known)
            self.lm_head = _rows_of(_output_head(stage), draft_tokens)
        blocks = (_block(stage, *each) for each in zip(indices, self.layers, strict=True))
        self._target = _Target(stage, tuple(blocks))

    def attach(self, ends: Stage) -> None:
        """Use the embedding, last norm and head of ``ends``, a stage of the model that has both of its ends:
        again after its modules were replaced, or when the layers between went to other machines."""
        self._target = replace(self._target, stage=ends)

    def make_cache(self) -> list[Any]:
        """Empty caches for those of its layers that keep something."""
        made = (cache for block in self._target.blocks for cache in block.make_caches())
        return [cache for cache in made if cache is not None]

    def normed(self, states: mx.array) -> mx.array:
        """Hidden states as the model's last layer gives them, (…, D), as ``__call__`` takes them."""
        hidden: mx.array = self._target.stage.weights.norm(states)
        return hidden

    def __call__(self, tokens: mx.array, hidden: mx.array, cache: list[Any] | None = None) -> mx.array:
        """What its last layer gives for each token, (B, T, D).

        Args:
            tokens: (B, T), each the token after the one that ``hidden`` belongs to.
            hidden: (B, T, D), behind the model's last norm, or what ``fed_back`` gives.
            cache: what its layers keep of earlier rows; None if there are none, as in training.
        """
        embedded = self.pre_fc_norm_embedding(self._target.stage.embed(tokens))
        both = mx.concatenate([embedded, self.pre_fc_norm_hidden(hidden).astype(embedded.dtype)], axis=-1)
        left = iter(self.make_cache() if cache is None else cache)
        state: mx.array = self.fc(both)
        for block in self._target.blocks:
            state = block.run(state, [None if empty is None else next(left) for empty in block.empty])
        return state

    def logits(self, given: mx.array) -> mx.array:
        """What ``__call__`` gave, (…, D), as logits: (…, Vd), or (…, V) if it guesses among all tokens.

        Without what the model does to its head's output: that keeps their order.
        """
        head = self.lm_head if self._draft_tokens is not None else _output_head(self._target.stage)
        # A table of an embedding is called for rows.
        logits: mx.array = getattr(head, "as_linear", head)(self.norm(given))
        return logits

    def likeliest(self, given: mx.array) -> mx.array:
        """The likeliest next token of each row that ``__call__`` gave: (B, T, D) to int32 (B, T)."""
        best = mx.argmax(self.logits(given), axis=-1).astype(mx.int32)
        if self._draft_tokens is not None:
            return self._draft_tokens[best]
        # A head may have more rows than the table; to read behind that would end the process.
        return mx.minimum(best, _table_rows(self._target.stage) - 1)

    def fed_back(self, given: mx.array) -> mx.array:
        """What a further step takes as hidden state, of what ``__call__`` gave."""
        return self.norm(given) if self.feeds_normed else given

    @property
    def draft_tokens(self) -> mx.array | None:
        """The ids that it guesses among; None for all."""
        return self._draft_tokens

    @property
    def width(self) -> int:
        """D."""
        return self._target.stage.hidden_width

    @property
    def hidden_layer(self) -> int:
        """The model's layer whose output it takes."""
        return self._target.stage.total - 1


class _Target(msgspec.Struct, frozen=True):
    """What a head uses of its model: all of it, and a stage for each of the head's layers, called as the
    model calls its own. MLX takes no struct for a parameter."""

    stage: Stage
    blocks: tuple[Stage, ...]


def _block(stage: Stage, index: int, layer: Any) -> Stage:
    """A stage of ``layer``, which is called as the model's at ``index``."""
    own = nn.Module()
    own.layers = [layer]
    return replace(stage.part(index, index + 1), weights=own)


def _attending(stage: Stage, layers: Sequence[int] | None) -> list[int]:
    """``layers`` as they are, or the last one that keeps plain rows of all tokens.

    Raises ModelUnsupported if none of them does, or one keeps something else.
    """
    if stage.architecture.call or stage.architecture.between:
        raise ModelUnsupported("Its layers need more than a hidden state, a mask and a cache.")
    plain = [index for index in range(stage.total) if _keeps_plain_rows(stage.empty[index])]
    if layers is None:
        layers = plain[-1:]
    if not any(index in plain for index in layers):
        raise ModelUnsupported("None of its layers keeps a row of each token.")
    if any(index not in plain and stage.empty[index] is not None for index in layers):
        raise ModelUnsupported("A layer of the head keeps something else than a row of each token.")
    return [*layers]


def _keeps_plain_rows(empty: Any) -> bool:
    if empty is None:
        return False
    kind = kind_of(empty)
    return kind.has_rows(empty) and kind.window(empty) is None


def _like(layer: Any, args: Any, index: int) -> Any:
    """A layer of the same class with weights of its own, as the model makes the one at ``index``."""
    given: dict[str, Any] = {}
    for name, parameter in inspect.signature(type(layer)).parameters.items():
        if name in ("args", "config"):
            given[name] = args
        elif name in ("layer_idx", "idx"):
            given[name] = index
        elif name == "block_type":
            given[name] = layer.block_type
        elif parameter.default is inspect.Parameter.empty:
            raise ModelUnsupported(
                f"A {type(layer).__name__} is made with a {name}, which is not known here."
            )
    return type(layer)(**given)


def _table_rows(stage: Stage) -> int:
    """Ids that the embedding has a row for."""
    return table_rows(stage.weights.embed_tokens)


def check_ids(name: str, tokens: mx.array, known: int) -> None:
    """Raises ValueError for what is no list of ids below ``known``. To read behind a table ends the
    process."""
    if tokens.ndim != 1 or not tokens.size or not mx.issubdtype(tokens.dtype, mx.integer):
        raise ValueError(f"{name} is no list of token ids")
    if int(tokens.min()) < 0 or int(tokens.max()) >= known:
        raise ValueError(f"{name} has ids that are none of the model's {known}")


def _output_head(stage: Stage) -> Any:
    """A linear layer, or the table of the embedding."""
    return stage.weights.lm_head if "lm_head" in stage.weights else stage.weights.embed_tokens


def _rows_of(head: Any, tokens: mx.array) -> Any:
    """A linear layer of some rows of an output head, packed as that is."""
    bits = hasattr(head, "bits")
    rows: Any = nn.QuantizedLinear(64, 1, bias=False) if bits else nn.Linear(1, 1, bias=False)
    rows.clear()
    for name, array in head.parameters().items():
        rows[name] = array[tokens]
    if bits:
        rows.group_size, rows.bits, rows.mode = head.group_size, head.bits, head.mode
    return rows
