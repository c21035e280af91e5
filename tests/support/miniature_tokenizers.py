"""Tokenizers in miniature: a family's control tokens and the shape of its chat template, with few words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_lm.chat_templates import deepseek_v32 as deepseek_v32_template
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_WORDS = [
    "The system asks the user; the assistant, or a tool, answers: end of turn, start of turn.",
    '{"name": "look", "arguments": {"city": "Paris"}} <|im_start|>im_end|> <|message|> header_id|>',
]

_QWEN = """
{%- if tools %}{{ '<|im_start|>system\nYou may call:' }}{% for tool in tools %}{{ '\n' + tool | tojson }}
{%- endfor %}{{ '\nWrite <tool_call>...</tool_call>.<|im_end|>\n' }}{% endif %}
{%- for m in messages %}{% set content = m.content or '' %}
{%- if m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + content }}
{{- '\n</tool_response><|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
{{- '<|im_start|>assistant\n' + content }}
{%- for call in m.tool_calls or [] %}{{ '\n<tool_call>\n{"name": "' + call.function.name }}
{{- '", "arguments": ' + call.function.arguments | tojson + '}\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
"""

_LLAMA = """
{{- bos_token }}
{%- macro head(role) %}{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}{% endmacro %}
{%- if tools %}{{ head('system') }}{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}
{{- '<|eot_id|>' }}{% endif %}
{%- for m in messages %}{% set content = m.content or '' %}
{%- if m.role == 'tool' %}{{ head('ipython') + content | tojson + '<|eot_id|>' }}
{%- elif 'tool_calls' in m %}
{%- if m.tool_calls | length > 1 %}{{ raise_exception('One call at a time!') }}{% endif %}
{{- head('assistant') + m.tool_calls[0].function.name + m.tool_calls[0].function.arguments | tojson }}
{{- '<|eot_id|>' }}
{%- else %}{{ head(m.role) + content | trim + '<|eot_id|>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ head('assistant') }}{% endif %}
"""

# As the publisher's: one call of a message is shown, and of system messages the first; the thoughts of a call
# go when an answer follows it.
_HARMONY = """
{%- set called = namespace(name=none) %}
{%- if tools %}{{ '<|start|>developer<|message|># Tools\n' }}
{%- for t in tools %}{{ '// ' + t.function.description + '\ntype ' + t.function.name }}
{{- ' = (_: ' + t.function.parameters | tojson + ') => any;\n' }}
{%- endfor %}{{ '<|end|>' }}{% endif %}
{%- for m in messages %}{% set content = m.content or '' %}
{%- if m.role == 'tool' %}
{%- if called.name is none %}{{ raise_exception('No call comes before this result!') }}{% endif %}
{{- '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- content | tojson + '<|end|>' }}
{%- elif m.role == 'assistant' and 'tool_calls' in m %}
{%- set thought = m.thinking or '' %}
{%- if '<|channel|>analysis<|message|>' in thought or '<|channel|>final<|message|>' in thought %}
{{- raise_exception('These are channels, and no thought!') }}{% endif %}
{%- if content and thought %}{{ raise_exception('Either a text or a thought!') }}{% endif %}
{%- set said = messages[loop.index:] | selectattr('role', 'equalto', 'assistant') %}
{%- if (content or thought) and not said | rejectattr('tool_calls') | list %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (content or thought) + '<|end|>' }}{% endif %}
{%- set called.name = m.tool_calls[0].function.name %}
{{- '<|start|>assistant to=functions.' + called.name }}
{{- '<|channel|>commentary json<|message|>' + m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
{%- elif m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + content + '<|end|>' }}
{%- elif loop.first or m.role == 'user' %}
{{- '<|start|>' + m.role + '<|message|>' + content + '<|end|>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""

# Roles alternate, calls and results apart, and ids of calls have nine characters.
_MISTRAL = """
{%- macro check(id) %}
{%- if id | default('', true) | length != 9 %}{{ raise_exception('Ids have nine characters!') }}{% endif %}
{%- endmacro %}
{{- bos_token }}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{%- for m in rest | rejectattr('role', 'equalto', 'tool') | rejectattr('tool_calls') %}
{%- if m.role != ('user', 'assistant')[loop.index0 % 2] %}
{{- raise_exception('User and assistant speak in turns, behind a system message that may be missing!') }}
{%- endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}
{%- elif m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{ check(m.tool_call_id) }}
{{- '[TOOL_RESULTS]{"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}{{ '[TOOL_CALLS][' }}
{%- for call in m.tool_calls %}{{ check(call.id) }}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (']' if loop.last else ', ') }}
{%- endfor %}{{ eos_token }}
{%- else %}{{ m.content + eos_token }}{% endif %}
{%- endfor %}
"""

# A macro for contents, which may be parts; what is neither text nor parts is printed.
_GLM = """
{%- macro visible(content) %}{% if content is string %}{{ content }}
{%- elif content is iterable and content is not mapping %}{% for p in content %}{{ p.text }}{% endfor %}
{%- else %}{{ content }}{% endif %}{% endmacro %}
{%- for m in messages %}{{ '<|' + m.role + '|>\n' + visible(m.content) }}
{%- for call in m.tool_calls or [] %}{{ '\n<tool_call>' + call.function.name }}
{%- for key, value in call.function.arguments.items() %}{{ '\n<arg_key>' + key + '</arg_key>\n<arg_value>' }}
{{- (value if value is string else value | tojson) + '</arg_value>' }}{% endfor %}{{ '\n</tool_call>' }}
{%- endfor %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""

_PIECES = """
{%- for m in messages %}{{ '<start_of_turn>' + m.role + '\n' + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
"""

# Its model knows neither instructions nor tools.
_GEMMA2 = """
{%- for m in messages %}
{%- if m.role == 'system' %}{{ raise_exception('There is no system here!') }}{% endif %}
{%- if loop.index is even and m.role == 'user' or loop.index is odd and m.role != 'user' %}
{{- raise_exception('User and assistant speak in turns!') }}{% endif %}
{{- '<start_of_turn>' + m.role + '\n' + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
"""


def qwen3() -> Any:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>"]
    markers = [f"<{end}{name}>" for name in ("tool_call", "tool_response", "think") for end in ("", "/")]
    return _wrapped(
        _bytes(special, markers, normalizers.NFC()),
        _QWEN,
        tool_call_start="<tool_call>",
        tool_call_end="</tool_call>",
    )


def llama3() -> Any:
    names = [
        "begin_of_text",
        "end_of_text",
        "start_header_id",
        "end_header_id",
        "eom_id",
        "eot_id",
        "python_tag",
    ]
    reserved = [f"reserved_special_token_{i}" for i in range(240)]
    return _wrapped(
        _bytes([f"<|{name}|>" for name in names + reserved], []), _LLAMA, bos_token="<|begin_of_text|>"
    )


def glm() -> Any:
    special = ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
    return _wrapped(
        _bytes(special, ["<tool_call>", "</tool_call>"]),
        _GLM,
        tool_call_start="<tool_call>",
        tool_call_end="</tool_call>",
    )


def gpt_oss() -> Any:
    names = ["start", "message", "channel", "end", "return", "call", "constrain", "endoftext"]
    return _wrapped(_bytes([f"<|{name}|>" for name in names], []), _HARMONY)


def mistral() -> Any:
    names = ["INST", "SYSTEM_PROMPT", "TOOL_RESULTS"]
    special = ["<s>", "</s>", "[TOOL_CALLS]", *(f"[{end}{name}]" for name in names for end in ("", "/"))]
    return _wrapped(
        _bytes(special, []),
        _MISTRAL,
        bos_token="<s>",
        eos_token="</s>",
        tool_call_start="[TOOL_CALLS]",
        tool_call_end="",
    )


def deepseek_v32() -> Any:
    """With the template that mlx-lm has as a function."""
    special = [
        f"<\uff5c{name}\uff5c>" for name in ("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant")
    ]
    made = _wrapped(_bytes(special, ["<think>", "</think>", "\uff5cDSML\uff5c"]), "")
    return TokenizerWrapper(made._tokenizer, chat_template=deepseek_v32_template.apply_chat_template)


def gemma2() -> Any:
    made = pieces()
    made._tokenizer.chat_template = _GEMMA2.strip("\n")
    return made


def pieces(*, normalised: bool = False, spelling: bool = True) -> Any:
    """Pieces with a sign for spaces, as SentencePiece makes them: one before each stretch of text.

    ``normalised``: control tokens are looked for in the text in small letters. ``spelling``: there is a token
    for each character.
    """
    control = ["<pad>", "<start_of_turn>", "<end_of_turn>"]
    characters = [chr(c) for c in range(32, 127)] if spelling else list("abcdefghijklmnopqrstuvwxyz_")
    vocab = {text: i for i, text in enumerate(["<unk>", "▁", "\n", *control, "▁<", "▁a", *characters])}
    made = Tokenizer(models.BPE(vocab, [("▁", "a")] + ([("▁", "<")] if spelling else []), unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    if normalised:
        made.normalizer = normalizers.Lowercase()
    made.add_special_tokens([AddedToken(t, special=True, normalized=normalised) for t in control])
    return _wrapped(made, _PIECES)


def _bytes(special: Sequence[str], markers: Sequence[str], normaliser: Any = None) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        _WORDS * 4, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    if normaliser is not None:
        made.normalizer = normaliser
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in markers])
    return made


def _wrapped(
    backend: Tokenizer,
    template: str,
    *,
    bos_token: str | None = None,
    eos_token: str | None = None,
    **tools: str,
) -> Any:
    whole = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=template.strip("\n"),
        bos_token=bos_token,
        eos_token=eos_token,
    )
    return TokenizerWrapper(whole, **tools)
