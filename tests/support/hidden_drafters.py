"""Tiny models whose next token is easy to know, for drafters that read hidden states, and a grammar."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chain_model
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny_architectures
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from fleetd.engine.heads.mtp_head import MtpHead
from fleetd.engine.sequence_state import rollback
from fleetd.engine.speculation.exactness_probe import ProbePlan, probe

VOCAB = tiny_architectures.VOCAB


def silenced(module: nn.Module) -> None:
    """Let all layers add nothing to the hidden state: it stays the token's embedding."""
    ends = (
        *("o_proj.weight", "down_proj.weight", "out_proj.weight", ".switch_mlp.fc2.weight"),
        ".per_layer_projection.weight",
    )
    for name, array in tree_flatten(module.parameters()):
        if name.endswith(ends):
            module.load_weights([(name, mx.zeros_like(array))], strict=False)


@functools.cache
def simple(name: str) -> Any:
    """A model of a family whose next token depends on the newest one alone."""
    model = tiny_architectures.tiny(name)
    silenced(model)
    return model


def random_head(model: Any, draft_tokens: mx.array | None = None) -> MtpHead:
    """A head with the layers that heads of such models have."""
    pattern = getattr(model.args, "hybrid_override_pattern", None)
    layers = pattern and [pattern.index("*"), pattern.index("E")]
    return MtpHead(model, draft_tokens, layers=layers)


def right_head(model: Any, draft_tokens: mx.array | None = None) -> MtpHead:
    """A head of a ``simple`` model that gives what the model gives."""
    head = random_head(model, draft_tokens)
    silenced(head)
    width = head.width
    head.pre_fc_norm_embedding.weight = mx.ones(width)
    head.fc.weight = mx.concatenate([mx.eye(width), mx.zeros((width, width))], axis=1)
    return head


class LyingHead(MtpHead):
    """Guesses another token than the head does, every time."""

    def likeliest(self, given: mx.array) -> mx.array:
        return (super().likeliest(given) + 1) % VOCAB


def lying_head(model: Any) -> MtpHead:
    """A head that is never right."""
    head = right_head(model)
    head.__class__ = LyingHead
    return head


_VERDICTS: dict[int, Any] = {}


def verdict_of(model: Any) -> Any:
    """The probe's verdict, found once for each model. Of a model with running states it goes by the
    processor: what it declines has no drafts here."""
    if id(model) not in _VERDICTS:
        plan = ProbePlan((20,), (2, 16), 1, every=True)
        _VERDICTS[id(model)] = probe(model, vocab_size=VOCAB, context_tokens=2048, plan=plan)
    if rollback.needs_mark(make_prompt_cache(model)) and not _VERDICTS[id(model)].exact:
        pytest.skip(f"NO DRAFTS OF THIS MODEL ON THIS PROCESSOR: {_VERDICTS[id(model)].text}")
    assert _VERDICTS[id(model)].exact
    return _VERDICTS[id(model)]


class Even:
    """Lets an answer have even tokens only, as an ``AnswerMatcher`` does."""

    failure, open = "", True

    def __init__(self) -> None:
        self.held = 0

    def consume(self, tokens: Sequence[int]) -> None:
        assert all(token % 2 == 0 for token in tokens)
        self.held += len(tokens)

    def allowed(self, drafts: Sequence[int]) -> int:
        return next((at for at, token in enumerate(drafts) if token % 2), len(drafts))

    def forced(self, most: int) -> list[int]:
        return []

    def masks(self, drafts: Sequence[int] = ()) -> list[Any]:
        return [np.arange(VOCAB) % 2 == 0] * (self.allowed(drafts) + 1)


def write_head(folder: Path, head: MtpHead) -> Path:
    """A head beside a model's weights; returns the model's folder."""
    tensors = {f"mtp.{name}": array for name, array in tree_flatten(head.parameters())}
    mx.save_safetensors(str(folder / "mtp.safetensors"), tensors, metadata={"format": "mlx"})
    return folder


def nemotrons_name(name: str) -> str:
    """What Nemotron-H's publisher calls a tensor of a head, behind ``mtp.``."""
    own = {"fc": "0.eh_proj", "pre_fc_norm_embedding": "0.enorm", "pre_fc_norm_hidden": "0.hnorm"}
    module, _, part = name.rpartition(".")
    theirs = {**own, "norm": "1.final_layernorm"}
    return name if name.startswith("layers.") else f"layers.{theirs[module]}.{part}"


def nemotron_chain(folder: Path) -> Path:
    """``chain_model``'s answers by a model of Nemotron-H's kind, whose files hold a head that is right too;
    returns the folder."""
    chain_model.build(folder)
    file = folder / "model.safetensors"
    chain: Any = mx.load(str(file))
    eos = json.loads((folder / "config.json").read_text())["eos_token_id"]
    width = chain_model.HIDDEN
    model = tiny_architectures.tiny("nemotron_3", vocab_size=width, hidden_size=width)
    silenced(model)
    for layer in model.layers:
        # States that stay 0 are the same bits however many tokens a pass has, on any processor.
        if layer.block_type == "M":
            layer.mixer.in_proj.weight = mx.zeros_like(layer.mixer.in_proj.weight)
            layer.mixer.conv1d.bias = mx.zeros_like(layer.mixer.conv1d.bias)
    model.backbone.embeddings.weight = chain["model.embed_tokens.weight"]
    model.backbone.norm_f.weight = chain["model.norm.weight"]
    model.lm_head.weight = chain["lm_head.weight"]
    mx.eval(model.parameters())
    tiny_architectures.write(folder, "nemotron_3", vocab_size=width, hidden_size=width, eos_token_id=eos)
    head = {f"mtp.{nemotrons_name(n)}": a for n, a in tree_flatten(right_head(model).parameters())}
    weights = {**dict(tree_flatten(model.parameters())), **head}
    mx.save_safetensors(str(file), weights, metadata={"format": "mlx"})
    return folder
