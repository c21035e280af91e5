"""A tiny real model with a known answer: whatever token comes last decides the next one.

It is a llama in every respect (config, safetensors, tokenizer, chat template), with layers that add nothing
and an output matrix that maps each token to the one that follows it. So tests can make a worker, through all
of its real code, reason, call tools, split code points, run into stop strings or go on for ever.

A conversation's last user message ends in one of the markers in CHAINS; the answer is that chain.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HIDDEN = 512
EOS = "<|end|>"
ENDLESS = 150

CHAINS: dict[str, list[str]] = {
    "<hello>": ["Hel", "lo the", "re, wor", "ld!", EOS],
    "<utf8>": ["a", "Ã", "©", "â", "Ĥ", "¬", "ð", "Ł", "ĺ", "Ģ", "z", EOS],  # aé€😀z, byte by byte
    "<weather>": [
        "Let me look.",
        "<tool_call>",
        '{"name": "get_',
        'weather", "argu',
        'ments": {"city": "Par',
        'is"}}',
        "</tool_call>",
        EOS,
    ],
    "<count>": [f" {i}" for i in range(1, ENDLESS + 1)],  # never ends: the last leads to the first
    "<ponder>": ["<think>", "First, ", "I won", "der.", "</think>", "\n\n", "So: ", "42", ".", EOS],
    "<cutoff>": ["good", " part", " ST", "OP", " bad part", EOS],
}

TEMPLATE = (
    "{% if tools %}<tool_call> tool_call.name {{ tools | length }} {% endif %}"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
)


def byte_alphabet() -> list[str]:
    """GPT-2's 256 printable stand-ins for bytes, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(hidden)) for b in range(256)]


def build(
    folder: Path, *, context: int = 4096, layers: int = 2, config: dict[str, Any] | None = None
) -> Path:
    """Write the model into ``folder`` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = byte_alphabet()
    vocab = {char: i for i, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    # The markers are not special: contents spell them.
    pieces = [*CHAINS, *(p for chain in CHAINS.values() for p in chain if p not in vocab)]
    tokenizer.add_special_tokens([AddedToken(EOS, special=True, normalized=False)])
    tokenizer.add_tokens(
        [AddedToken(p, special=False, normalized=False) for p in dict.fromkeys(pieces) if p != EOS]
    )
    ids = {t: tokenizer.token_to_id(t) for t in [*vocab, EOS, *pieces]}
    assert len(ids) <= HIDDEN, len(ids)

    follows = np.full(HIDDEN, ids[EOS])
    for marker, chain in CHAINS.items():
        steps = [marker, *chain]
        for here, there in itertools.pairwise(steps):
            follows[ids[here]] = ids[there]
    follows[ids[f" {ENDLESS}"]] = ids[" 1"]

    weights = {
        "model.embed_tokens.weight": np.eye(HIDDEN, dtype=np.float32),
        "model.norm.weight": np.ones(HIDDEN, dtype=np.float32),
        "lm_head.weight": np.zeros((HIDDEN, HIDDEN), dtype=np.float32),
    }
    weights["lm_head.weight"][follows, np.arange(HIDDEN)] = 1.0
    rng = np.random.default_rng(7)
    for layer in range(layers):
        p = f"model.layers.{layer}."
        for name, shape in {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (128, HIDDEN),
            "self_attn.v_proj": (128, HIDDEN),
            "mlp.gate_proj": (64, HIDDEN),
            "mlp.up_proj": (64, HIDDEN),
        }.items():
            weights[f"{p}{name}.weight"] = (rng.standard_normal(shape) * 0.02).astype(np.float32)
        weights[f"{p}self_attn.o_proj.weight"] = np.zeros((HIDDEN, HIDDEN), dtype=np.float32)
        weights[f"{p}mlp.down_proj.weight"] = np.zeros((HIDDEN, 64), dtype=np.float32)
        weights[f"{p}input_layernorm.weight"] = np.ones(HIDDEN, dtype=np.float32)
        weights[f"{p}post_attention_layernorm.weight"] = np.ones(HIDDEN, dtype=np.float32)
    save_file(weights, folder / "model.safetensors")

    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "intermediate_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "vocab_size": HIDDEN,
        "rope_theta": 10000.0,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "eos_token_id": ids[EOS],
        "torch_dtype": "float32",
    }
    settings.update(config or {})
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": EOS,
                "chat_template": TEMPLATE,
                "clean_up_tokenization_spaces": False,
            }
        )
    )
    return folder
