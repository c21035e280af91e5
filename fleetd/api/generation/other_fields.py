"""Fields of OpenAI's dialects, and of other servers that speak them, which a body here does not have. One
table: the spelling check, the refusals and docs/http.md are made from it.

    refused    would change the answer, or asks for a part of it that is not given: refused by name, unless
               its value asks for nothing
    harmless   changes no answer, whatever its value is
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import msgspec

from fleetd.engine.sampling.parameters import EVERY, PARAMETERS

# Values that ask for nothing.
_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})
_UNLESS_TRUE: tuple[Any, ...] = (None, True)
# A number of tokens or of milliseconds that is no bound.
_UNBOUNDED: tuple[Any, ...] = (None, -1)

_LOOKING_BACK = (
    "repeat_last_n",
    "repetition_context_size",
    "presence_context_size",
    "frequency_context_size",
)


def _all(*names: str) -> dict[str, tuple[Any, ...]]:
    return dict.fromkeys(names, _NOTHING)


# Sampling parameters that some dialects do not have.
_SAMPLING = {
    each.field: _NOTHING if each.neutral in _NOTHING else (None, each.neutral)
    for each in PARAMETERS
    if each.dialects != EVERY
}


class FieldGroup(msgspec.Struct, frozen=True):
    """Fields that say something about one matter."""

    #: The matter, in the words of docs/http.md.
    what: str
    #: By name, the values that ask for nothing: every other value is refused.
    refused: Mapping[str, tuple[Any, ...]] = {}
    #: Names of fields that are ignored.
    harmless: tuple[str, ...] = ()


# fmt: off
GROUPS: tuple[FieldGroup, ...] = (
    FieldGroup(
        "the form of the answer",
        {
            "modalities": (None, [], ["text"]),
            **_all("audio", "grammar_lazy"),
        },
        (
            "guided_decoding_backend", "guided_whitespace_pattern", "grammar_triggers", "grammar_type",
            "preserved_tokens",
        ),
    ),
    FieldGroup(
        "how tokens are chosen",
        {
            **_all(
                "logits_processors", "use_beam_search", "mirostat", "xtc_probability", "dry_multiplier",
                "dynatemp_range", "bad_words", "allowed_token_ids", "top_a", "min_keep", "samplers",
                "watermarking", "n_indent",
            ),
            "typical_p": (None, 1),
            "top_n_sigma": (None, 0, -1),
            "adaptive_target": _UNBOUNDED,
        },
        (
            "length_penalty", "mirostat_tau", "mirostat_eta", "xtc_threshold", "dry_base",
            "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "dynatemp_exponent",
            "adaptive_decay", "backend_sampling",
        ),
    ),
    FieldGroup(
        "how far back penalties look, which is over all tokens here: refused beside a penalty",
        dict.fromkeys(_LOOKING_BACK, _UNBOUNDED),
    ),
    FieldGroup(
        "where an answer ends",
        {
            **_all("stop_token_ids", "include_stop_str_in_output", "repetition_detection"),
            **dict.fromkeys(
                ("thinking_token_budget", "thinking_budget", "reasoning_budget", "reasoning_budget_tokens"),
                _UNBOUNDED,
            ),
            **dict.fromkeys(("t_max_predict_ms", "t_max_prompt_ms"), (None, -1, 0)),
        },
        (
            "reasoning_budget_start_tag", "reasoning_budget_end_tag", "reasoning_budget_end_tags",
            "reasoning_budget_message", "reasoning_control", "n_keep", "n_discard",
        ),
    ),
    FieldGroup(
        "how the prompt is made",
        {
            **_all(
                "chat_template", "documents", "continue_final_message", "add_special_tokens",
                "prompt_embeds", "generation_prompt", "role_mapping", "echo", "suffix", "specprefill",
                "previous_input_messages", "previous_response", "functions", "plugins",
            ),
            "add_generation_prompt": _UNLESS_TRUE,
            "truncate_prompt_tokens": _UNBOUNDED,
            "function_call": (None, "none", "auto"),
        },
        ("truncation_side", "transforms", "context_management", "media_io_kwargs", "mm_processor_kwargs"),
    ),
    FieldGroup(
        "another model than the one that is named, or another use of it",
        _all(
            "lora", "adapters", "web_search_options", "moderation", "kv_transfer_params",
            "ec_transfer_params", "vllm_xargs", "chat_format", "chat_parser",
        ),
        ("models", "route", "provider"),
    ),
    FieldGroup(
        "what an answer has in it",
        {
            **_all(
                "prompt_logprobs", "logprob_token_ids", "n_probs", "return_tokens_as_token_ids",
                "return_token_ids", "return_tokens", "return_prompt_text", "response_fields",
                "enable_response_messages",
            ),
            **dict.fromkeys(("skip_special_tokens", "include_reasoning", "parse_tool_calls"), _UNLESS_TRUE),
        },
        (
            "spaces_between_special_tokens", "post_sampling_probs", "return_token_offsets",
            "return_mm_kwargs", "routed_experts_prompt_start", "return_progress", "timings_per_token",
            "verbose", "usage",
        ),
    ),
    FieldGroup(
        "how and when it is computed",
        harmless=(
            "draft_model", "num_draft_tokens", "prediction", "priority", "service_tier", "stream_interval",
            "sse_ping_interval", "cache_prompt", "cache_salt", "n_cache_reuse", "id_slot", "max_tool_calls",
            "prompt_cache_retention", "prompt_cache_options",
        ),
    ),
    FieldGroup(
        "who asks", harmless=("request_id", "session_id", "user_id", "safety_identifier", "client_metadata")
    ),
    FieldGroup(
        "vectors and scores of texts",
        {
            **_all("late_chunking", "raw_scores", "return_multivector"),
            # Cohere's own defaults, which some clients send.
            "rank_fields": (None, [], ["text"]),
            "max_tokens_per_doc": (None, 4096),
            "max_chunks_per_doc": (None, 10),
            **dict.fromkeys(("normalize", "normalized", "use_activation", "activation"), _UNLESS_TRUE),
            **dict.fromkeys(
                ("output_dtype", "embedding_type", "encoding_type", "embed_dtype"), (None, "float", "float32")
            ),
            "embedding_types": (None, [], ["float"]),
            "truncation_direction": (None, "right", "Right"),
            "endianness": (None, "native", "little"),
        },
    ),
    # Known to some bodies and not to others.
    FieldGroup(
        "fields of a chat, where another body does not have them",
        {
            **_all(
                "logprobs", "min_tokens", "ignore_eos", "tools", "guided_json", "guided_regex",
                "guided_choice", "guided_grammar", "structured_outputs", "grammar", "json_schema",
            ),
            "response_format": (None, {"type": "text"}),
            **_SAMPLING,
            "stop": (*_NOTHING, [""]),
            "n": (None, 1),
        },
        ("verbosity", "store", "metadata"),
    ),
)
# fmt: on

REFUSED: Mapping[str, tuple[Any, ...]] = {
    name: nothing for group in GROUPS for name, nothing in group.refused.items()
}
HARMLESS: Set[str] = {name for group in GROUPS for name in group.harmless}
# Refused only if one of the others asks for something, too: its values that do not.
BESIDE: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    name: {"repetition_penalty": (None, 1), "presence_penalty": (None, 0), "frequency_penalty": (None, 0)}
    for name in _LOOKING_BACK
}
# Other servers' names for a field that a body here has.
ELSEWHERE: Mapping[str, str] = {
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "n_cmpl": "n",
    "repeat_penalty": "repetition_penalty",
    "streaming": "stream",
    # Those of the two APIs of OpenAI's for each other's.
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    # Those of Voyage, Jina, and Hugging Face's servers.
    "output_dimension": "dimensions",
    "truncate_dim": "dimensions",
    "prompt_name": "input_type",
    "truncation": "truncate",
    "top_k": "top_n",
    "texts": "documents",
    "return_text": "return_documents",
}
