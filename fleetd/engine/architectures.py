"""Which models can be cut between layers, and what each does outside its layers.

mlx-lm's models all run tokens through an embedding, a list of layers and a head; they differ in a few things
around the layers, which are the fields of ``Architecture``. Within a layer nothing is known here: a stage
calls mlx-lm's own. A layer attends within a window where the cache that the model makes for it rotates.

An architecture is in ``CUT`` when a small random model of it passes ``tests/engine/test_stage.py`` at every
cut; the others are refused by name. ``docs/models.md`` is written from these tables.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from fleetd.errors import ModelUnsupported


@dataclass(frozen=True, slots=True)
class Architecture:
    """How to run a model of this type in pieces; the defaults are llama's.

    The parts are named as mlx-lm does: ``embed_tokens``, ``layers`` and ``norm`` in ``model``, and beside it
    ``lm_head``, or none where the embedding's matrix serves as the head.
    """

    # Where within the whole model the one that makes text lies; the rest reads pictures and is not used.
    text: str = ""
    # What the embedding is multiplied by: √width (rounded to bf16 first where the makers did), or a constant.
    scale: Literal["", "sqrt_width", "sqrt_width_bf16", "embedding_multiplier"] = ""
    # The layers want full attention's mask as an array, not as the word "causal".
    mask_array: bool = False
    # What is done to the head's output.
    logits: Literal["", "softcap", "times_logit_scale", "over_logits_scaling"] = ""
    # Whether, on a CPU in f32, the bytes stay the same wherever a prompt is cut into chunks; otherwise they
    # change in the last bits, as the whole model's do, and a plan is exact if its chunks are those of local
    # prefill. "unless windows": what a window hides from one chunk is not there at all in another.
    chunks: Literal["any", "unless windows", "same"] = "any"


_PLAIN = Architecture()
_LLAMA = Architecture(chunks="unless windows")
_WINDOWS = Architecture(chunks="same")
_GEMMA3 = Architecture(scale="sqrt_width_bf16", chunks="same")
# Attends to one new token otherwise than to several.
_DEEPSEEK3 = Architecture(mask_array=True, chunks="same")

CUT: dict[str, Architecture] = {
    "cohere": Architecture(logits="times_logit_scale"),
    "cohere2": Architecture(logits="times_logit_scale", chunks="same"),
    "deepseek_v2": _PLAIN,
    "deepseek_v3": _DEEPSEEK3,
    "ernie4_5": _PLAIN,
    "exaone4": _WINDOWS,
    "gemma": Architecture(scale="sqrt_width"),
    # Caps the scores, which leaves attention to MLX's own products.
    "gemma2": Architecture(scale="sqrt_width", mask_array=True, logits="softcap", chunks="same"),
    "gemma3": replace(_GEMMA3, text="language_model"),
    "gemma3_text": _GEMMA3,
    "glm4": _PLAIN,
    "glm4_moe": _PLAIN,
    "gpt_oss": _WINDOWS,
    "granite": Architecture(scale="embedding_multiplier", logits="over_logits_scaling"),
    "hunyuan_v1_dense": _PLAIN,
    "kimi_k2": _DEEPSEEK3,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _PLAIN,
    "olmo2": _PLAIN,
    "olmo3": _WINDOWS,
    "phi3": _PLAIN,
    "qwen2": _PLAIN,
    "qwen2_moe": _PLAIN,
    "qwen3": _PLAIN,
    "qwen3_moe": _PLAIN,
    "smollm3": _LLAMA,
    "starcoder2": _PLAIN,
}

_STATE = "some of its layers keep a running state instead of a row per token, which cannot be sent in pieces"
_SHARED = "its later layers read keys and values of earlier ones, which may lie on the other side of a cut"
_STREAMS = "more passes between its layers than one hidden state per token"
_LOOPS = "it runs through its layers more than once"
_SEVERAL = "its layers keep several sets of keys and values: a second attention's, or an index of the context"
_POSITION = "positions enter outside its layers, or its context begins anew every so many tokens"

REFUSED: dict[str, str] = {
    "afm7": _SHARED,
    "baichuan_m1": _STATE,
    "bailing_hybrid": _STATE,
    "bailing_moe_linear": _STATE,
    "bailing_moe_v3": _STATE,
    "deepseek_v32": _SEVERAL,
    "deepseek_v41": _STREAMS,
    "falcon_h1": _STATE,
    "gear": _STATE,
    "gemma3n": _SHARED,
    "gemma4": _SHARED,
    "gemma4_text": _SHARED,
    "glm_moe_dsa": _SEVERAL,
    "gpt2": _POSITION,
    "gpt_bigcode": _POSITION,
    "granitemoehybrid": _STATE,
    "hunyuan": _SHARED,
    "iquestloopcoder": _LOOPS,
    "jamba": _STATE,
    "kimi_k3": _STREAMS,
    "kimi_linear": _STATE,
    "lfm2": _STATE,
    "lfm2_moe": _STATE,
    "llama4": _POSITION,
    "longcat_flash": _SEVERAL,
    "longcat_flash_ngram": _SEVERAL,
    "mamba": _STATE,
    "mamba2": _STATE,
    "minimax_m3_vl": _SEVERAL,
    "ministral3": _POSITION,
    "mistral4": _POSITION,
    "muse_spark": _STREAMS,
    "nanbeige": _LOOPS,
    "nemotron_h": _STATE,
    "olmo_hybrid": _STATE,
    "plamo2": _STATE,
    "qwen3_5": _STATE,
    "qwen3_5_moe": _STATE,
    "qwen3_next": _STATE,
    "recurrent_gemma": _STATE,
    "rwkv7": _STATE,
}


def architecture_of(model_type: str) -> Architecture:
    """Raises ModelUnsupported, with the reason, for a type that cannot be cut."""
    found = CUT.get(model_type)
    if found is None:
        reason = REFUSED.get(model_type, "no test shows that a cut leaves its answers as they are")
        raise ModelUnsupported(
            f"A model of type {model_type!r} cannot be shared between machines by layers: {reason}.",
            hint="It runs whole, on one machine. docs/models.md lists what can be shared.",
        )
    return found
