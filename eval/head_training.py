"""A head fitted to a model's own answers: what it begins as, how it is trained, and how often it is right.

    hidden state of token t, token t+1 ──► step 0: guesses token t+2 ──► step 1: token t+3 ──► step 2: …

A step attends to what it will attend to when it drafts: to the rows of the text up to t, and to those of the
steps before it, of the same draft. All drafts of a text are computed at once. The head begins as the model's
last layer, fed with what a linear map finds of that layer's input.

In shapes B is the batch, L the tokens of a text, T the drafts of a text, D the width, V the draft tokens.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import msgspec
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from eval.head_answers import Answers
from eval.head_prompts import KINDS, Kind
from fleetd.engine.heads.mtp_head import MtpHead
from fleetd.models.heads import TARGET


class Recipe(msgspec.Struct, frozen=True):
    """How a head is made."""

    # Tokens that it guesses among.
    draft_tokens: int = 8192
    # For each epoch, the steps of a draft: more cost more, and are worth it once the first is often right.
    steps: tuple[int, ...] = (1, 1, 1, 2, 3)
    # What a step counts beside the one before it.
    step_weight: float = 0.8
    # What the distance of its hidden states from the model's counts beside the distance of its guesses.
    regression: float = 0.2
    # Tokens that the guesses of an update are compared among, beside those of its texts: the commonest, and
    # others by chance.
    common: int = 1024
    others: int = 512
    # Texts of an update; the rate of the first one, for matrices and for the rest.
    rows: int = 8
    matrix_rate: float = 0.015
    rate: float = 3e-4
    seed: int = 5


# Updates until the full rate, at most.
_WARM = 10
# Of the linear map.
_RIDGE = 1e-3
# Batches, and texts of each, that the linear map is found from.
_MAPPED_BATCHES, _MAPPED_TEXTS = 4, 6
# Texts at once whose guesses are judged.
_JUDGED = 8


def commonest(answers: Sequence[Answers], count: int, vocabulary: int) -> tuple[mx.array, float]:
    """The ``count`` commonest tokens of the answers, sorted, int32; and the share that they are of all."""
    seen = np.zeros(vocabulary, np.int64)
    for batch in answers:
        for row, length in zip(batch.tokens, batch.lengths, strict=True):
            seen += np.bincount(row[batch.prompt_tokens : length], minlength=vocabulary)
    ids = np.sort(np.argsort(-seen, kind="stable")[:count])
    return mx.array(ids.astype(np.int32)), float(seen[ids].sum() / seen.sum())


def begun(model: Any, draft_tokens: mx.array, answers: Sequence[Answers]) -> MtpHead:
    """A head that is the model's last layer, fed with what a linear map of its inputs gives."""
    head = MtpHead(model, draft_tokens)
    width, last = head.width, model.model.layers[-1]
    head.pre_fc_norm_embedding.weight = mx.ones(width)
    head.pre_fc_norm_hidden.weight = mx.ones(width)
    head.layers[0].update(tree_unflatten(tree_flatten(last.parameters())))
    square, product = mx.zeros((2 * width, 2 * width)), mx.zeros((2 * width, width))
    for batch in answers[:_MAPPED_BATCHES]:
        embedded = model.model.embed_tokens(mx.array(batch.tokens[:_MAPPED_TEXTS]))
        wanted = embedded
        for layer in model.model.layers[:-1]:
            wanted = layer(wanted, "causal", None)
        hidden = mx.array(batch.hidden[:_MAPPED_TEXTS]).astype(mx.float32)
        given = [head.pre_fc_norm_embedding(embedded[:, 1:]), head.pre_fc_norm_hidden(hidden)]
        # The first token's states are unlike all others.
        both = mx.concatenate(given, -1)[:, 1:].reshape(-1, 2 * width)
        square += both.T @ both
        product += both.T @ wanted[:, 2:].reshape(-1, width)
        mx.eval(square, product)
    held = square + _RIDGE * mx.trace(square) / (2 * width) * mx.eye(2 * width)
    head.fc.weight = mx.linalg.solve(held, product, stream=mx.cpu).T
    mx.eval(head.parameters())
    return head


def unrolled(head: MtpHead, embedded: mx.array, hidden: mx.array, steps: int) -> list[mx.array]:
    """What the head gives behind its norm, for each step: (B, T, D), T being L - 1 - steps.

    Args:
        embedded: what the model's embedding gives for the texts, (B, L, D).
        hidden: (B, L - 1, D).
    """
    count = embedded.shape[1] - 1 - steps
    fed, given = hidden[:, :count], []
    keys: list[mx.array] = []
    values: list[mx.array] = []
    for step in range(steps):
        token = head.pre_fc_norm_embedding(embedded[:, 1 + step : 1 + step + count])
        x = head.fc(mx.concatenate([token, head.pre_fc_norm_hidden(fed)], -1))
        layer = head.layers[0]
        x = x + _attention(layer.self_attn, layer.input_layernorm(x), step, keys, values)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        fed = head.norm(x)
        given.append(fed)
    return given


def _attention(
    attention: Any, x: mx.array, step: int, keys: list[mx.array], values: list[mx.array]
) -> mx.array:
    """Attention of a step's rows to the text's, which are those of step 0, and to the draft's own.

    Args:
        keys, values: those of the steps before; this step's are added.
    """
    batch, count, _ = x.shape
    groups = attention.n_heads // attention.n_kv_heads

    def heads(projected: mx.array, number: int) -> mx.array:
        return projected.reshape(batch, count, number, -1).transpose(0, 2, 1, 3)

    queries = attention.rope(heads(attention.q_proj(x), attention.n_heads), offset=step)
    keys.append(attention.rope(heads(attention.k_proj(x), attention.n_kv_heads), offset=step)[:, :, None])
    values.append(heads(attention.v_proj(x), attention.n_kv_heads)[:, :, None])
    queries = attention.scale * queries.reshape(batch, attention.n_kv_heads, groups, count, -1)
    later = mx.triu(mx.full((count, count), -mx.inf), k=1)
    scores = queries @ keys[0].swapaxes(-1, -2) + later
    own = [(queries * key).sum(-1, keepdims=True) for key in keys[1:]]
    shares = mx.softmax(mx.concatenate([scores, *own], -1), axis=-1)
    summed = shares[..., :count] @ values[0]
    for index, value in enumerate(values[1:]):
        summed = summed + shares[..., count + index, None] * value
    summed = summed.reshape(batch, attention.n_heads, count, -1).transpose(0, 2, 1, 3)
    projected: mx.array = attention.o_proj(summed.reshape(batch, count, -1))
    return projected


class Texts(msgspec.Struct, frozen=True):
    """Some rows of a batch of answers, on the device."""

    kinds: tuple[Kind, ...]
    prompt_tokens: int
    tokens: mx.array
    hidden: mx.array
    lengths: mx.array

    @classmethod
    def of(cls, answers: Answers, rows: Sequence[int]) -> Texts:
        chosen = np.array(rows)
        return cls(
            tuple(answers.kinds[row] for row in rows),
            answers.prompt_tokens,
            mx.array(answers.tokens[chosen]),
            mx.array(answers.hidden[chosen]).astype(mx.float32),
            mx.array(answers.lengths[chosen]),
        )

    def counted(self, steps: int) -> tuple[int, int, mx.array]:
        """The first draft of the answer, the end of the drafts, and which of these drafts end within the
        answer, (B, drafts)."""
        first, end = self.prompt_tokens - 1, self.tokens.shape[1] - 1 - steps
        return first, end, mx.arange(first, end) + steps + 1 < self.lengths[:, None]


def loss(head: MtpHead, model: Any, recipe: Recipe, texts: Texts, among: mx.array, steps: int) -> mx.array:
    """Cross-entropy with what the model would say among some tokens, and the distance of states.

    Args:
        among: rows of the head's draft tokens.
    """
    first, end, counted = texts.counted(steps)
    rows = mx.stop_gradient(head.lm_head.weight[among])
    aims = mx.stop_gradient(texts.hidden[:, first + 1 : end + steps])
    likely = mx.softmax(aims @ rows.T, axis=-1)
    spread, number = mx.mean(mx.square(aims)), mx.maximum(counted.sum(), 1)
    embedded, total = model.model.embed_tokens(texts.tokens), mx.array(0.0)
    for step, given in enumerate(unrolled(head, embedded, texts.hidden, steps)):
        guessed, aim = given[:, first:], slice(step, step + end - first)
        logits = guessed @ rows.T
        surprise = mx.logsumexp(logits, -1) - (likely[:, aim] * logits).sum(-1)
        distance = mx.square(guessed - aims[:, aim]).mean(-1) / spread
        each = surprise + recipe.regression * distance
        total = total + recipe.step_weight**step * (each * counted).sum() / number
    return total


def acceptance(head: MtpHead, model: Any, answers: Sequence[Answers], steps: int) -> dict[Kind, list[float]]:
    """For each kind of prompt: the share of drafts whose first 1, 2, … tokens are what the model says."""
    draft_tokens, right = _draft_tokens(head), {kind: np.zeros(steps) for kind in KINDS}
    drafts = dict.fromkeys(KINDS, 0)
    for batch in answers:
        for begin in range(0, len(batch.kinds), _JUDGED):
            texts = Texts.of(batch, range(begin, min(begin + _JUDGED, len(batch.kinds))))
            first, end, counted = texts.counted(steps)
            given = unrolled(head, model.model.embed_tokens(texts.tokens), texts.hidden, steps)
            said = texts.tokens[:, first + 2 : end + 1 + steps]
            so_far = counted
            for step, states in enumerate(given):
                guessed = draft_tokens[mx.argmax(states[:, first:] @ head.lm_head.weight.T, axis=-1)]
                so_far = so_far & (guessed == said[:, step : step + end - first])
                for kind, found in zip(texts.kinds, np.array(so_far.sum(1)), strict=True):
                    right[kind][step] += found
            for kind, number in zip(texts.kinds, np.array(counted.sum(1)), strict=True):
                drafts[kind] += int(number)
    return {kind: [round(float(n) / max(drafts[kind], 1), 3) for n in right[kind]] for kind in KINDS}


def trained(
    head: MtpHead,
    model: Any,
    answers: Sequence[Answers],
    recipe: Recipe,
    kept: Path,
    after_epoch: Callable[[int, float], None] = lambda epoch, mean: None,
) -> None:
    """Change a head's weights by the answers, of which its draft tokens are the commonest.

    Args:
        kept: a file that is written after each epoch, and read first if it is there: the run goes on.
    """
    head.lm_head.freeze()
    epochs = [_order(answers, recipe, epoch) for epoch in range(len(recipe.steps))]
    optimizer = _optimizer(recipe, updates=sum(map(len, epochs)))
    optimizer.init(head.trainable_parameters())
    done = _resumed(kept, head, optimizer)
    common = _common(head, answers)[: recipe.common]
    for epoch, steps in list(enumerate(recipe.steps))[done:]:
        step = nn.value_and_grad(head, functools.partial(loss, head, model, recipe, steps=steps))
        chance, found = random.Random(f"{recipe.seed} {epoch} others"), []
        for batch, rows in epochs[epoch]:
            texts = Texts.of(answers[batch], rows)
            others = chance.sample(range(len(head.lm_head.weight)), recipe.others)
            value, gradients = step(texts, _among(head, texts, [*common, *others]))
            gradients, _ = optim.clip_grad_norm(gradients, 1.0)
            optimizer.update(head, gradients)
            mx.eval(head.parameters(), optimizer.state, value)
            found.append(value.item())
        _keep(kept, head, optimizer, epoch + 1)
        after_epoch(epoch, float(np.mean(found)))


def _optimizer(recipe: Recipe, updates: int) -> optim.Optimizer:
    """Muon for matrices, Adam for the rest; their rates rise for a few updates, and then fall to 0."""

    warm = min(_WARM, updates // 10 + 1)

    def falling(rate: float) -> Any:
        rise = optim.linear_schedule(0.0, rate, warm)
        return optim.join_schedules([rise, optim.cosine_decay(rate, max(updates - warm, 1))], [warm])

    matrices = optim.Muon(learning_rate=falling(recipe.matrix_rate), weight_decay=0.0)
    rest = optim.AdamW(learning_rate=falling(recipe.rate), weight_decay=0.0)
    return optim.MultiOptimizer([matrices, rest], [lambda _, weight: weight.ndim == 2])


def _keep(file: Path, head: MtpHead, optimizer: optim.Optimizer, done: int) -> None:
    state = {"head": head.trainable_parameters(), "optimizer": optimizer.state, "done": mx.array(done)}
    unfinished = file.with_name(f"part-{file.name}")
    mx.save_safetensors(str(unfinished), dict(tree_flatten(state)))
    os.replace(unfinished, file)


def _resumed(file: Path, head: MtpHead, optimizer: optim.Optimizer) -> int:
    """Epochs that were done; the head and the optimizer are as after them."""
    if not file.exists():
        return 0
    flat: Any = mx.load(str(file))
    state: Any = tree_unflatten(list(flat.items()))
    head.update(state["head"])
    optimizer.state = state["optimizer"]
    return int(state["done"])


def _common(head: MtpHead, answers: Sequence[Answers]) -> list[int]:
    """Rows of the draft tokens, the commonest first."""
    ids = np.array(_draft_tokens(head))
    seen = np.zeros(int(ids.max()) + 1 + max(int(batch.tokens.max()) for batch in answers), np.int64)
    for batch in answers:
        seen += np.bincount(batch.tokens.ravel(), minlength=len(seen))
    return [int(row) for row in np.argsort(-seen[ids], kind="stable")]


def _among(head: MtpHead, texts: Texts, more: Sequence[int]) -> mx.array:
    """Rows of the draft tokens that are in the texts, and more of them."""
    said = np.isin(np.array(_draft_tokens(head)), np.array(texts.tokens)).nonzero()[0]
    return mx.array(np.union1d(said, np.array(more)).astype(np.int32))


def _order(answers: Sequence[Answers], recipe: Recipe, epoch: int) -> list[tuple[int, list[int]]]:
    """Updates of an epoch: which answers, and which rows of them."""
    chance, found = random.Random(f"{recipe.seed} {epoch}"), []
    for batch, each in enumerate(answers):
        rows = list(range(len(each.kinds)))
        chance.shuffle(rows)
        found += [(batch, rows[begin : begin + recipe.rows]) for begin in range(0, len(rows), recipe.rows)]
    chance.shuffle(found)
    return found


def _draft_tokens(head: MtpHead) -> mx.array:
    if head.draft_tokens is None:
        raise ValueError("The head guesses among all tokens.")
    return head.draft_tokens


def save(head: MtpHead, file: Path, target: str = "") -> None:
    """Write a head as a model's folder has it. The rows of the model's own output head are not written.
    ``target``: the digest of the model's weights, for which alone it is read then; "" for any that fit."""
    named = {
        f"mtp.{name}": array.astype(mx.float16)
        for name, array in tree_flatten(head.parameters())
        if not name.startswith("lm_head.")
    }
    notes = {"format": "mlx"} | ({TARGET: target} if target else {})
    mx.save_safetensors(str(file), {**named, "mtp.draft_tokens": _draft_tokens(head)}, notes)
