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
{%- elif m.tool_calls %}{{ head('assistant') + m.tool_calls[0].function.arguments | tojson + '<|eot_id|>' }}
{%- else %}{{ head(m.role) + content | trim + '<|eot_id|>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ head('assistant') }}{% endif %}
"""

_HARMONY = """
{%- if tools %}{{ '<|start|>developer<|message|># Tools\n' }}
{%- for t in tools %}{{ '// ' + t.function.description + '\ntype ' + t.function.name }}
{{- ' = (_: ' + t.function.parameters | tojson + ') => any;\n' }}
{%- endfor %}{{ '<|end|>' }}{% endif %}
{%- for m in messages %}{% set content = m.content or '' %}
{%- if m.role == 'tool' %}{{ '<|start|>functions.look to=assistant<|channel|>commentary<|message|>' }}
{{- content | tojson + '<|end|>' }}
{%- elif m.tool_calls %}{{ '<|start|>assistant to=functions.' + m.tool_calls[0].function.name }}
{{- '<|channel|>commentary json<|message|>' + m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
{%- elif m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + content + '<|end|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + content + '<|end|>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
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


def deepseek_v32() -> Any:
    """With the template that mlx-lm has as a function."""
    special = [
        f"<\uff5c{name}\uff5c>" for name in ("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant")
    ]
    made = _wrapped(_bytes(special, ["<think>", "</think>", "\uff5cDSML\uff5c"]), "")
    return TokenizerWrapper(made._tokenizer, chat_template=deepseek_v32_template.apply_chat_template)


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


def _wrapped(backend: Tokenizer, template: str, *, bos_token: str | None = None, **tools: str) -> Any:
    whole = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=template.strip("\n"),
        bos_token=bos_token,
    )
    return TokenizerWrapper(whole, **tools)
