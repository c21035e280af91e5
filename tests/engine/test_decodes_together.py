"""Two answers at once: of which models mlx-lm can make one batch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from family_params import each
from mlx_lm.models import llama4
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.deepseek_v41 import LayerCache
from mlx_lm.tokenizer_utils import load as load_tokenizer
from speculating import Run
from tiny_architectures import FAMILIES, tiny

from fleetd.engine.load.loading import decodes_together
from fleetd.engine.load.model_reading import warm_up
from fleetd.errors import ModelUnsupported

pytestmark = pytest.mark.usefixtures("cpu_installed")

# The attention of gemma2, which caps the scores, takes the mask's rows for heads. This tiny one has as many
# heads as there are answers, so that nothing fails: the numbers are others. gpt_bigcode has one offset.
ONE_AT_A_TIME = {"gemma2", "gpt_bigcode"}


@pytest.mark.parametrize("name", [*sorted(ONE_AT_A_TIME), *each(FAMILIES.keys() - ONE_AT_A_TIME)])
def test_answers_share_a_batch_where_the_model_can(name: str) -> None:
    assert decodes_together(tiny(name)) == (name not in ONE_AT_A_TIME)


def llama4_model() -> Any:
    """Its context begins anew every 32 tokens, in a cache of which no batch can be made."""
    text = {
        "attention_bias": False,
        "attention_chunk_size": 32,
        "head_dim": 32,
        "hidden_size": 64,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 64,
        "intermediate_size_mlp": 64,
        "max_position_embeddings": 2048,
        "model_type": "llama4_text",
        "num_attention_heads": 2,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "num_local_experts": 2,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "use_qk_norm": True,
        "vocab_size": 256,
    }
    mx.random.seed(7)
    model = llama4.Model(llama4.ModelArgs.from_dict({"model_type": "llama4", "text_config": text}))
    mx.eval(model.parameters())
    return model


def test_what_no_batch_can_be_made_of_answers_one_prompt_after_the_other(chain_path: Path) -> None:
    """And goes on from what it has kept of a conversation."""
    model = llama4_model()
    assert not decodes_together(model)
    run = Run(model, load_tokenizer(chain_path), max_streams=1)
    prompts = {name: [(7 * i + seed) % 60 for i in range(50)] for seed, name in enumerate("ab")}
    for name, prompt in prompts.items():
        run.submit(name, prompt, max_tokens=20, ignore_eos=True)
    run.finish()
    prompts["c"] = [*run.tokens["a"], 5, 6, 7]
    run.submit("c", prompts["c"], max_tokens=20, ignore_eos=True)
    run.finish()
    assert run.finished("c").usage.cached_tokens > 50
    for name, prompt in prompts.items():
        cache, answer = make_prompt_cache(model), []
        logits = model(mx.array([prompt]), cache=cache)
        for _ in range(20):
            answer.append(int(mx.argmax(logits[0, -1]).item()))
            logits = model(mx.array([answer[-1:]]), cache=cache)
        assert [*prompt, *answer[:-1]] == run.tokens[name][: len(prompt) + 19], name


def test_a_cache_whose_size_cannot_be_told_is_refused() -> None:
    with pytest.raises(ModelUnsupported, match="LayerCache"):
        warm_up(SimpleNamespace(make_cache=lambda: [LayerCache(32)], layers=[]))
