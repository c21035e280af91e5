"""Which models can be cut between layers, and what each does outside its layers.

mlx-lm's models all run tokens through an embedding, a list of layers and a head; they differ in a few things
around the layers, which are the fields of ``Architecture``. Within a layer nothing is known here: a stage
calls mlx-lm's own (``layer_calls``). What a layer keeps, and whether it attends within a window, is told by
the cache that the model makes for it.

An architecture goes by the module of mlx-lm that has its code, which a config may call by other names:
``minimax_m2`` is run by ``minimax``. It is in ``CUT`` when a small random model of it passes
``tests/engine/test_stage.py`` at every cut; the others are refused by name. ``docs/models.md`` is written
from these tables.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec.structs import replace

from fleetd.errors import ModelUnsupported


class Architecture(msgspec.Struct, frozen=True):
    """How to run a model with this code in pieces; the defaults are llama's.

    The parts are named as mlx-lm does: ``embed_tokens``, ``layers`` and ``norm`` in ``model``, and beside it
    ``lm_head``, or none if the embedding's matrix serves as the head.
    """

    # Where within the whole model the one that makes text lies; the rest reads pictures and is not used.
    text: str = ""
    # Where the embedding, the layers and the last norm lie: a path from the text model, and names in there.
    body: str = "model"
    embed: str = "embed_tokens"
    layers: str = "layers"
    norm: str = "norm"
    # Where further layers lie, behind the others, which keep nothing.
    tail: str = ""
    # An embedding of positions, which is added to that of the tokens.
    positions: str = ""
    # How a layer is called, if not as ``layer(hidden, mask, cache)``: see ``layer_calls``.
    call: Literal[
        "",
        "scaled queries",
        "at offset",
        "two masks",
        "per-layer inputs",
        "reused keys",
        "reused caches",
        "residual blocks",
        "given keys",
        "first values",
    ] = ""
    # What a token has between two layers, if not one hidden state: see ``between_layers``.
    between: Literal["", "several states", "residual blocks", "keys", "first values"] = ""
    # The layers that keep something in a cache of their own, if not all do: the first ones, whose keys and
    # values the later ones read, or those that mix tokens.
    keeps: Literal["all", "first", "mixers"] = "all"
    # What the embedding is multiplied by: √width (rounded to bf16 first where the makers did), or a constant.
    scale: Literal["", "sqrt_width", "sqrt_width_bf16", "embedding_multiplier"] = ""
    # The layers want full attention's mask as an array, not as the word "causal".
    mask_array: bool = False
    # What is done to the head's output.
    logits: Literal["", "softcap", "times_logit_scale", "over_logits_scaling", "times_tied_multipliers"] = ""
    # Whether, on a CPU in f32, the bytes stay the same wherever a prompt is cut into chunks; otherwise they
    # change in the last bits, as the whole model's do, and a plan is exact if its chunks are those of local
    # prefill. "unless windows": what a window hides from one chunk is not there at all in another.
    chunks: Literal["any", "unless windows", "same"] = "any"
    # Why every token of a prompt must be computed; "" if some may be left out (sparse prefill).
    whole: str = ""
    # The rest is for docs/models.md, and tests compare. Whether some layers keep a sliding window, or may.
    windows: Literal["no", "where set", "yes"] = "no"
    # On a CPU a block of tokens is computed by other sums than single ones, and no drafts are verified there.
    other_blocks: bool = False
    # Drafts leave the tokens as they are, and after them the last bit of log-probabilities may differ.
    rounds: bool = False

    @property
    def keeps_state(self) -> bool:
        """True if some layers keep a running state, which cannot be cut at a token."""
        return self.whole == _STATE


_STATE = "some of its layers keep a running state, into which every token goes"
_INDEX = "its layers keep an index of the context beside keys and values"
_TWICE = "its layers keep two sets of keys and values"
_SCALED = "it scales queries by their position, outside of RoPE"
_ADDED = "positions are added to its embeddings one after the other"
_PLAIN_POSITIONS = "its layers are told positions as plain numbers"

_PLAIN = Architecture()
_LLAMA = Architecture(chunks="unless windows", windows="where set")
_WINDOWS = Architecture(chunks="same", windows="yes")
_GEMMA3 = Architecture(scale="sqrt_width_bf16", chunks="same", windows="yes")
_GEMMA4 = Architecture(
    scale="sqrt_width",
    call="per-layer inputs",
    keeps="first",
    logits="softcap",
    chunks="same",
    whole=_PLAIN_POSITIONS,
    windows="yes",
)
# Attends to one new token otherwise than to several.
_LATENT = Architecture(mask_array=True, chunks="same", other_blocks=True)
_HYBRID = Architecture(whole=_STATE)
_TEXT = "language_model"

# Code that reads pictures around a text model, which may be any here.
ANY_TEXT = frozenset({"mistral3"})

CUT: dict[str, Architecture] = {
    "afmoe": Architecture(scale="sqrt_width", chunks="same", windows="yes"),
    "apertus": _PLAIN,
    "bailing_moe": Architecture(embed="word_embeddings"),
    "dots1": _PLAIN,
    "ernie4_5_moe": _PLAIN,
    "exaone_moe": _WINDOWS,
    "mimo_v2_flash": _WINDOWS,
    "seed_oss": _PLAIN,
    "step3p5": _WINDOWS,
    "afm7": Architecture(
        embed="embedding",
        tail="kv_reuse_layers",
        norm="output_norm",
        call="reused keys",
        keeps="first",
        whole=_PLAIN_POSITIONS,
    ),
    "baichuan_m1": Architecture(chunks="same", whole=_STATE, rounds=True),
    "bailing_hybrid": Architecture(
        embed="word_embeddings",
        call="at offset",
        mask_array=True,
        chunks="same",
        whole=_STATE,
        other_blocks=True,
    ),
    "bailing_moe_linear": Architecture(embed="word_embeddings", call="at offset", whole=_STATE),
    "bailing_moe_v3": Architecture(
        embed="word_embeddings", mask_array=True, chunks="same", whole=_STATE, other_blocks=True
    ),
    "cohere": Architecture(logits="times_logit_scale"),
    "cohere2": Architecture(logits="times_logit_scale", chunks="same", windows="yes"),
    "deepseek_v2": _PLAIN,
    "deepseek_v3": _LATENT,
    "deepseek_v32": replace(_LATENT, whole=_INDEX),
    "ernie4_5": _PLAIN,
    "exaone4": _WINDOWS,
    "falcon_h1": Architecture(
        norm="final_layernorm",
        call="two masks",
        logits="times_tied_multipliers",
        chunks="same",
        whole=_STATE,
        other_blocks=True,
    ),
    "gear": Architecture(scale="sqrt_width", logits="softcap", chunks="same", whole=_STATE, windows="yes"),
    "gemma": Architecture(scale="sqrt_width"),
    # Caps the scores, which leaves attention to MLX's own products.
    "gemma2": Architecture(
        scale="sqrt_width", mask_array=True, logits="softcap", chunks="same", other_blocks=True
    ),
    "gemma3": replace(_GEMMA3, text="language_model"),
    "gemma3_text": _GEMMA3,
    "glm4": _PLAIN,
    "glm4_moe": _PLAIN,
    "gpt_oss": _WINDOWS,
    "gpt2": Architecture(embed="wte", positions="wpe", layers="h", norm="ln_f", whole=_ADDED),
    "gpt_bigcode": Architecture(
        body="transformer", embed="wte", positions="wpe", layers="h", norm="ln_f", whole=_ADDED
    ),
    "granite": Architecture(scale="embedding_multiplier", logits="over_logits_scaling"),
    "hunyuan_v1_dense": _PLAIN,
    "llama": _LLAMA,
    "mixtral": _PLAIN,
    "olmo2": _PLAIN,
    "olmo3": _WINDOWS,
    "phi3": _PLAIN,
    "qwen2": _PLAIN,
    "qwen2_moe": _PLAIN,
    "qwen3": _PLAIN,
    "qwen3_moe": _PLAIN,
    "rwkv7": Architecture(
        embed="embeddings", call="first values", between="first values", chunks="same", whole=_STATE
    ),
    "smollm3": _LLAMA,
    "starcoder2": _PLAIN,
    "gemma4": replace(_GEMMA4, text=_TEXT),
    "gemma4_text": _GEMMA4,
    "gemma3n": replace(
        _GEMMA4, text="model.language_model", body="", call="reused caches", between="several states"
    ),
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": replace(_LATENT, whole=_INDEX),
    "granitemoehybrid": Architecture(
        scale="embedding_multiplier",
        logits="over_logits_scaling",
        chunks="same",
        whole=_STATE,
        other_blocks=True,
    ),
    "hunyuan": Architecture(call="given keys", between="keys"),
    "jamba": Architecture(norm="final_layernorm", whole=_STATE),
    "kimi_k25": replace(_LATENT, text=_TEXT),
    "kimi_k3": Architecture(
        text=_TEXT,
        call="residual blocks",
        between="residual blocks",
        mask_array=True,
        chunks="same",
        whole=_STATE,
        other_blocks=True,
    ),
    "kimi_linear": Architecture(mask_array=True, chunks="same", whole=_STATE, other_blocks=True),
    "lfm2": Architecture(norm="embedding_norm", whole=_STATE),
    "lfm2_moe": Architecture(norm="embedding_norm", whole=_STATE),
    "longcat_flash": replace(_LATENT, whole=_TWICE),
    "mamba2": Architecture(
        body="backbone", embed="embeddings", norm="norm_f", chunks="same", whole=_STATE, other_blocks=True
    ),
    "minimax": _PLAIN,
    "minimax_m3_vl": Architecture(text=_TEXT, chunks="same", whole=_INDEX, other_blocks=True),
    "ministral3": Architecture(call="scaled queries", chunks="same", whole=_SCALED, windows="where set"),
    "mistral4": Architecture(call="scaled queries", chunks="same", whole=_SCALED, other_blocks=True),
    "nemotron_h": Architecture(
        body="backbone",
        embed="embeddings",
        norm="norm_f",
        keeps="mixers",
        chunks="same",
        whole=_STATE,
        other_blocks=True,
    ),
    "olmo_hybrid": _HYBRID,
    "plamo2": Architecture(layers="layers.layers", chunks="same", whole=_STATE, other_blocks=True),
    "qwen3_5": replace(_HYBRID, text=_TEXT),
    "qwen3_5_moe": replace(_HYBRID, text=_TEXT),
    "qwen3_next": _HYBRID,
    "qwen3_vl": Architecture(text=_TEXT),
    "qwen3_vl_moe": Architecture(text=_TEXT),
}

_OWN_WAYS = "it keeps running states in ways of its own, and no test shows that a cut leaves them as they are"
_COMPRESSED = "later layers read what earlier ones compressed of several tokens, and its cache cannot be cut"
_METAL = "its layers are Metal kernels, on which the tests of the bytes do not run"
_LOOPS = "it runs through its layers more than once"
_NGRAMS = "its embedding reads the tokens before, which it keeps in a cache that is no layer's"
_ANEW = "its context begins anew every so many tokens"

REFUSED: dict[str, str] = {
    "deepseek_v41": _COMPRESSED,
    "iquestloopcoder": _LOOPS,
    "llama4": _ANEW,
    "longcat_flash_ngram": _NGRAMS,
    "mamba": _OWN_WAYS,
    "muse_spark": _METAL,
    "nanbeige": _LOOPS,
    "recurrent_gemma": _OWN_WAYS,
}


def architecture_of(code: str) -> Architecture:
    """How to run what the module ``code`` of mlx-lm builds in pieces.

    Raises ModelUnsupported, with the reason, if it cannot be cut.
    """
    found = CUT.get(code)
    if found is None:
        reason = REFUSED.get(code, "no test shows that a cut leaves its answers as they are")
        raise ModelUnsupported(
            f"A model of type {code!r} cannot be shared between machines by layers: {reason}.",
            hint="It runs whole, on one machine. docs/models.md lists what can be shared.",
        )
    return found
