"""Every field of the request schemas of vLLM, llama.cpp, mlx-lm and OpenAI, and for vectors of Jina, Voyage,
Cohere and Hugging Face, is served, refused by name, or known to change no answer. The names are those of the
schemas in November 2026."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import msgspec
import pytest
from openai_bodies import HELLO

from fleetd.api.anthropic.bodies import MessagesBody
from fleetd.api.generation import other_fields
from fleetd.api.generation.fields import decode
from fleetd.api.ollama import translate as ollama
from fleetd.api.ollama.bodies import OllamaChatBody
from fleetd.api.openai.bodies import ChatBody, CompletionBody
from fleetd.api.openai.embeddings import EmbeddingsBody
from fleetd.api.rerank import RerankBody
from fleetd.api.responses.bodies import ResponsesBody
from fleetd.errors import InvalidValue, UnsupportedParameter

# Both of vLLM's bodies, the sampling parameters and the extra ones.
VLLM_BOTH = """
    model frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream
    stream_options temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking
    length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
    spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids
    allowed_token_ids bad_words echo add_special_tokens response_format structured_outputs priority
    request_id session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start
    return_token_offsets return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs
    repetition_detection thinking_token_budget stream_interval guided_json guided_regex guided_choice
    guided_grammar guided_decoding_backend guided_whitespace_pattern
"""
VLLM_CHAT = """
    messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort include_reasoning
    parallel_tool_calls add_generation_prompt continue_final_message documents chat_template
    chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text
"""
VLLM_COMPLETION = "prompt suffix prompt_embeds best_of logits_processors"
VLLM_RESPONSES = """
    background include input instructions max_output_tokens max_tool_calls metadata model logit_bias
    parallel_tool_calls previous_response_id prompt reasoning service_tier store stream temperature text
    tool_choice tools top_logprobs top_p top_k truncation user skip_special_tokens
    include_stop_str_in_output prompt_cache_key request_id mm_processor_kwargs priority cache_salt
    enable_response_messages previous_input_messages previous_response structured_outputs
    repetition_penalty seed stop ignore_eos vllm_xargs
"""
LLAMA_CPP = """
    verbose timings_per_token stream stream_options cache_prompt return_tokens return_progress
    sse_ping_interval n_predict max_tokens n_indent n_keep n_discard n_cmpl n n_cache_reuse
    t_max_predict_ms t_max_prompt_ms response_fields top_k top_p min_p top_n_sigma xtc_probability
    xtc_threshold typical_p temperature dynatemp_range dynatemp_exponent repeat_last_n repeat_penalty
    frequency_penalty presence_penalty dry_multiplier dry_base dry_allowed_length dry_penalty_last_n
    mirostat mirostat_tau mirostat_eta adaptive_target adaptive_decay seed n_probs logprobs min_keep
    backend_sampling post_sampling_probs lora dry_sequence_breakers json_schema grammar grammar_lazy
    grammar_type chat_format reasoning_format generation_prompt parse_tool_calls chat_parser
    continue_final_message echo preserved_tokens grammar_triggers reasoning_control
    reasoning_budget_tokens reasoning_budget_start_tag reasoning_budget_end_tag reasoning_budget_end_tags
    reasoning_budget_message logit_bias ignore_eos stop samplers id_slot
"""
LLAMA_CPP_CHAT = """
    messages tools tool_choice parallel_tool_calls response_format chat_template_kwargs
    add_generation_prompt max_completion_tokens
"""
MLX_LM = """
    stream stream_options model draft_model num_draft_tokens adapters max_tokens temperature top_p top_k
    min_p repetition_penalty repetition_context_size presence_penalty presence_context_size
    frequency_penalty frequency_context_size xtc_probability xtc_threshold logit_bias logprobs seed
    chat_template_kwargs stop
"""
MLX_LM_CHAT = "messages tools role_mapping max_completion_tokens top_logprobs"
OPENAI_CHAT = """
    audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens
    messages metadata modalities model moderation n parallel_tool_calls prediction presence_penalty
    prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort response_format
    safety_identifier seed service_tier stop store stream stream_options temperature tool_choice tools
    top_logprobs top_p user verbosity web_search_options
"""
OPENAI_COMPLETION = """
    best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt seed
    stop stream stream_options suffix temperature top_p user
"""
OPENAI_RESPONSES = """
    background context_management conversation include input instructions max_output_tokens max_tool_calls
    metadata model moderation parallel_tool_calls previous_response_id prompt prompt_cache_key
    prompt_cache_options prompt_cache_retention reasoning safety_identifier service_tier store stream
    stream_options temperature text tool_choice tools top_logprobs top_p truncation user
"""
VLLM_EMBEDDING = """
    model input encoding_format dimensions user truncate_prompt_tokens truncation_side request_id priority
    normalize use_activation embed_dtype endianness mm_processor_kwargs
"""
JINA_EMBEDDING = """
    model input task dimensions late_chunking embedding_type normalized truncate return_multivector
    encoding_type
"""
VOYAGE_EMBEDDING = "model input input_type truncation output_dimension output_dtype encoding_format"
HUGGING_FACE_EMBEDDING = "truncate truncation_direction prompt_name normalize truncate_dim"
VLLM_RERANK = """
    model query documents top_n truncate_prompt_tokens mm_processor_kwargs priority use_activation activation
"""
COHERE_RERANK = """
    model query documents top_n max_tokens_per_doc priority return_documents rank_fields max_chunks_per_doc
"""
VOYAGE_RERANK = "model query documents top_k return_documents truncation"
HUGGING_FACE_RERANK = "query texts raw_scores return_text truncate truncation_direction"
SCHEMAS: list[tuple[type[msgspec.Struct], str]] = [
    (ChatBody, f"{VLLM_BOTH} {VLLM_CHAT} {LLAMA_CPP} {LLAMA_CPP_CHAT} {MLX_LM} {MLX_LM_CHAT} {OPENAI_CHAT}"),
    (CompletionBody, f"{VLLM_BOTH} {VLLM_COMPLETION} {LLAMA_CPP} {MLX_LM} {OPENAI_COMPLETION}"),
    (ResponsesBody, f"{VLLM_RESPONSES} {OPENAI_RESPONSES}"),
    (EmbeddingsBody, f"{VLLM_EMBEDDING} {JINA_EMBEDDING} {VOYAGE_EMBEDDING} {HUGGING_FACE_EMBEDDING}"),
    (RerankBody, f"{VLLM_RERANK} {COHERE_RERANK} {VOYAGE_RERANK} {HUGGING_FACE_RERANK}"),
]
MINIMAL: dict[type[msgspec.Struct], dict[str, Any]] = {
    ChatBody: {"messages": HELLO},
    CompletionBody: {"prompt": "hello"},
    ResponsesBody: {"input": "hello"},
    MessagesBody: {"messages": HELLO, "max_tokens": 5},
    EmbeddingsBody: {"input": "hello"},
    RerankBody: {"query": "hello", "documents": ["hello"]},
}
CASES = [(kind, name) for kind, names in SCHEMAS for name in sorted(set(names.split()))]


def take(kind: type[msgspec.Struct], **fields: Any) -> None:
    decode(msgspec.json.encode({**MINIMAL[kind], **fields}), kind, spelling=kind is not MessagesBody)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_each_field_is_served_or_refused_or_harmless(kind: type[msgspec.Struct], name: str) -> None:
    known = set(kind.__struct_fields__) | {field.encode_name for field in msgspec.structs.fields(kind)}
    served, refused = name in known, name in other_fields.REFUSED
    elsewhere = other_fields.ELSEWHERE.get(name) in known
    if served:
        return
    assert refused + (name in other_fields.HARMLESS) + elsewhere == 1
    if name in other_fields.HARMLESS:
        take(kind, **{name: ["anything"]})
        return
    beside = {other: 1.5 for other in other_fields.BESIDE.get(name, ()) if other in known}
    if name in other_fields.BESIDE and not beside:
        return
    with pytest.raises(UnsupportedParameter if refused else InvalidValue) as caught:
        take(kind, **{name: "something", **beside})
    assert caught.value.param == name


def test_no_field_is_both_refused_and_harmless() -> None:
    assert not set(other_fields.REFUSED) & other_fields.HARMLESS
    listed = [name for group in other_fields.GROUPS for name in (*group.refused, *group.harmless)]
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize(
    ("name", "nothing", "something"),
    [
        ("truncate_prompt_tokens", -1, 100),
        ("add_generation_prompt", True, False),
        ("skip_special_tokens", True, False),
        ("include_reasoning", True, False),
        ("reasoning_budget_tokens", -1, 0),
        ("adapters", None, "a"),
        ("lora", [], [{"id": 0, "scale": 1}]),
        ("chat_template", None, "{{ messages }}"),
    ],
)
@pytest.mark.parametrize("kind", [ChatBody, ResponsesBody, MessagesBody])
def test_a_value_that_asks_for_nothing_is_taken(
    kind: type[msgspec.Struct], name: str, nothing: Any, something: Any
) -> None:
    take(kind, **{name: nothing})
    take(kind, **{name: None})
    with pytest.raises(UnsupportedParameter):
        take(kind, **{name: something})


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (RerankBody, {"max_tokens_per_doc": 4096, "max_chunks_per_doc": 10, "rank_fields": ["text"]}),
        (RerankBody, {"raw_scores": False, "truncation_direction": "right", "use_activation": True}),
        (EmbeddingsBody, {"normalized": True, "late_chunking": False, "embedding_type": "float"}),
        (EmbeddingsBody, {"output_dtype": "float", "embed_dtype": "float32", "endianness": "native"}),
    ],
)
def test_defaults_of_other_servers_for_vectors_are_taken(
    kind: type[msgspec.Struct], fields: dict[str, Any]
) -> None:
    take(kind, **fields)


def test_how_far_back_penalties_look_matters_only_beside_one() -> None:
    take(ChatBody, repeat_last_n=64, repetition_context_size=20)
    take(ChatBody, repeat_last_n=64, repetition_penalty=1, presence_penalty=0)
    take(ChatBody, repeat_last_n=-1, repetition_penalty=1.1)
    with pytest.raises(UnsupportedParameter, match="repeat_last_n"):
        take(ChatBody, repeat_last_n=64, presence_penalty=1)
    with pytest.raises(UnsupportedParameter, match="repetition_context_size"):
        take(ChatBody, repetition_context_size=20, repetition_penalty=1.1)


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"repeat_last_n": 64}, False),
        ({"repeat_last_n": 64, "repeat_penalty": 1.0}, False),
        ({"repeat_last_n": -1, "repeat_penalty": 1.1}, False),
        ({"repeat_last_n": 64, "repeat_penalty": 1.1}, True),
        ({"repeat_last_n": 0, "presence_penalty": 0.5}, True),
    ],
)
def test_ollamas_penalties_have_the_same_rule(options: dict[str, Any], refused: bool) -> None:
    body = msgspec.convert({"model": "m", "messages": HELLO, "options": options}, OllamaChatBody)
    with pytest.raises(UnsupportedParameter) if refused else nullcontext() as caught:
        ollama.chat(body, "r")
    assert not refused or caught.value.param == "options.repeat_last_n"
