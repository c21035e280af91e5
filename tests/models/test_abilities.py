"""What a model can do is told by its chat template, before it is loaded, and as it will be when it is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import miniature_tokenizers as miniature
import pytest
from mlx_lm.tokenizer_utils import _infer_tool_parser

from fleetd.engine.answer.tool_formats import with_format
from fleetd.models import abilities, chat_templates
from fleetd.models.abilities import ModelAbilities, of_entry, of_files, of_template
from fleetd.models.catalog import entries, find
from fleetd.models.chat_templates import read_templates

# Templates of which only what tells their format is here.
TEMPLATES = {
    "minimax_m2": "<minimax:tool_call>",
    "gemma4": "<|tool_call>call:{{ name }}<tool_call|>",
    "function_gemma": "<start_function_call>",
    "longcat": "<longcat_tool_call>",
    "glm47": "<tool_call>{{ name }}<arg_key>",
    "pythonic": "<|tool_call_start|>",
    "qwen3_coder": "<tool_call>\n<function={{ name }}>",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "minicpm5": '<function name="{{ name }}"><param name="',
    "mistral": "[TOOL_CALLS]",
    "muse_spark": "<atem:function_calls>",
    "json_tools": "<tool_call>{{ tool_call.name }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_is_the_one_that_mlx_lm_finds(name: str) -> None:
    template = TEMPLATES[name]
    assert _infer_tool_parser(SimpleNamespace(chat_template=template)) == name
    assert of_template(template) == ModelAbilities(name, chats=True)


def test_the_formats_of_fleetd_are_known_too() -> None:
    llama = miniature.llama3()
    llama._tokenizer.chat_template = (
        """<|start_header_id|>{% for c in m.tool_calls %}{"name": x, "parameters": }"""
    )
    for tokenizer in (llama, miniature.gpt_oss()):
        template = str(tokenizer.chat_template)
        assert of_template(template).tools == with_format(tokenizer).init_kwargs["tool_parser_type"]


@pytest.mark.parametrize(
    ("template", "thinking"),
    [
        ("{% if enable_thinking %}", True),
        ("<think>\n", True),
        ("{{ reasoning_effort }}", True),
        ("{{ m }}", False),
    ],
)
def test_thinking_is_what_a_template_asks_for_or_writes(template: str, thinking: bool) -> None:
    assert of_template(template) == ModelAbilities("", thinking, chats=True)


def test_files_come_before_the_catalog_and_a_new_template_is_seen(tmp_path: Path) -> None:
    entry = find("qwen3-coder")
    assert of_files(None, entry) == of_files(tmp_path, entry) == ModelAbilities("qwen3_coder", chats=True)
    assert of_files(None, None) == of_files(tmp_path, None) == ModelAbilities()
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "<think>"}))
    assert of_files(tmp_path, entry) == ModelAbilities("", True, chats=True)
    config.write_text(json.dumps({"chat_template": [{"name": "default", "template": "[TOOL_CALLS]"}]}))
    os.utime(config, ns=(1, 1))
    assert of_files(tmp_path, entry) == ModelAbilities("mistral", chats=True)
    (tmp_path / "chat_template.jinja").write_text("<arg_key>")
    assert of_files(tmp_path, entry) == ModelAbilities("glm47", chats=True)


@pytest.mark.parametrize(
    ("able", "shown"),
    [
        (ModelAbilities("mistral", chats=True), "mistral"),
        (ModelAbilities("", chats=True), "grammar"),
        (ModelAbilities(), ""),
    ],
)
def test_tools_of_a_model_that_chats_are_by_grammar_unless_it_has_a_format(
    able: ModelAbilities, shown: str
) -> None:
    assert able.shown_tools == shown


def test_the_catalog_lists_the_default_model_with_tools_by_grammar() -> None:
    entry = find("smollm2-135m")
    assert entry is not None
    assert of_entry(entry).shown_tools == of_files(None, entry).shown_tools == "grammar"


def test_a_template_is_read_once_while_its_files_stay(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("x")
    before = chat_templates._templates.cache_info().hits
    assert read_templates(tmp_path) == read_templates(tmp_path) == {"default": "x"}
    assert chat_templates._templates.cache_info().hits == before + 1


def test_every_format_of_the_catalog_is_one_that_a_template_can_have() -> None:
    formats = {name for _, name in abilities._FORMATS}
    assert {entry.tools for entry in entries()} - {""} <= formats
