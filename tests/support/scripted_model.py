"""A tiny real model whose weights are random: it says random words, or what ``scripted_answers`` decides.

It has the default model's tokenizer, a long context, and a chat template with tools and reasoning, so that
the real prompts of coding agents are rendered, tokenized and read as with any other model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer

NAME = "scripted"
HIDDEN, HEAD, LAYERS = 32, 16, 2
EOS = "<|im_end|>"
MARKERS = [f"<{end}{name}>" for name in ("think", "tool_call", "tool_response") for end in ("", "/")]

TEMPLATE = r"""
{%- for m in messages if m.role == 'system' %}{{ '<|im_start|>system\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if tools %}{{ '<|im_start|>system\nYou may call these:' }}
{%- for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}
{{- '\nWrite <tool_call>...</tool_call>.<|im_end|>\n' }}{% endif %}
{%- for m in messages if m.role != 'system' %}{% set content = m.content or '' %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}
{%- if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content | trim + '\n</think>\n\n' }}{% endif %}
{{- content | trim }}
{%- for tool_call in m.tool_calls or [] %}{% set tool_call = tool_call.function %}
{{- '\n<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
{{- tool_call.arguments | tojson + '}\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""


def build(folder: Path, tokenizer_of: Path, *, context: int = 40_960) -> Path:
    """Write the model into ``folder`` and return it; ``tokenizer_of`` is the folder of another model."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer.from_file(str(tokenizer_of / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    tokenizer.save(str(folder / "tokenizer.json"))
    vocab = tokenizer.get_vocab_size(with_added_tokens=True)
    rng = np.random.default_rng(7)

    def random(*shape: int) -> Any:
        return (rng.standard_normal(shape) * 0.05).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": random(vocab, HIDDEN),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        # Not tied, or the most likely token would always be the last one again.
        "lm_head.weight": random(vocab, HIDDEN),
    }
    for layer in range(LAYERS):
        for name, shape in {
            "self_attn.q_proj": (2 * HEAD, HIDDEN),
            "self_attn.k_proj": (HEAD, HIDDEN),
            "self_attn.v_proj": (HEAD, HIDDEN),
            "self_attn.o_proj": (HIDDEN, 2 * HEAD),
            "mlp.gate_proj": (HIDDEN, HIDDEN),
            "mlp.up_proj": (HIDDEN, HIDDEN),
            "mlp.down_proj": (HIDDEN, HIDDEN),
        }.items():
            weights[f"model.layers.{layer}.{name}.weight"] = random(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = np.ones(HIDDEN, np.float32)
    save_file(weights, folder / "model.safetensors")
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "intermediate_size": HIDDEN,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": HEAD,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocab,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.token_to_id(EOS),
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": EOS,
                "chat_template": TEMPLATE.strip(),
                "clean_up_tokenization_spaces": False,
            }
        )
    )
    return folder
