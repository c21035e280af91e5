"""Folders as publishers leave them, loaded: marks before files, lists of templates, other vocabularies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chain_model
import pytest
from mlx_lm.utils import load_config
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer

from fleetd.engine.load import loading, model_reading, stage_loading
from fleetd.engine.load.readable_folder import readable
from fleetd.engine.prompt.control_tokens import control_tokens
from fleetd.engine.prompt.prompt_encoding import check_ids, prepare
from fleetd.engine.prompt.template_turns import template_needs
from fleetd.engine.protocol import ChatPrompt, Generate, TextPrompt
from fleetd.engine.sampling.sampler import SamplingDefaults
from fleetd.engine.settings import WorkerSettings
from fleetd.errors import BadRequest
from fleetd.models.abilities import of_files
from fleetd.models.chat_templates import read_templates
from fleetd.models.gguf import tokenizer as gguf_tokenizer
from fleetd.models.json_files import BOM

pytestmark = pytest.mark.usefixtures("cpu_installed")

USER = {"role": "user", "content": "<hello>"}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}]
TALK = "{% for m in messages %}talk {{ m.content }}{% endfor %}"
CALLS = "<tool_call>tool_call.name{% for m in messages %}use {{ m.content }}{% endfor %}"


def rewritten(folder: Path, name: str, **values: Any) -> None:
    file = folder / name
    file.write_text(json.dumps({**(json.loads(file.read_text()) if file.exists() else {}), **values}))


def without_template(folder: Path) -> Path:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def settings(folder: Path) -> WorkerSettings:
    return WorkerSettings(name="odd", path=str(folder), speculation="off")


def read(folder: Path) -> model_reading.ReadModel:
    config = model_reading.verified_config(settings(folder), lambda _: None)
    room = model_reading.memory_budget("cpu", settings(folder))
    return model_reading.read_model(settings(folder), config, "cpu", room, lambda _: None)


def tokenizer_of(folder: Path) -> Any:
    with readable(folder) as place:
        return model_reading._tokenizer(place, load_config(place))


def rendered(tokenizer: Any, **fields: Any) -> str:
    request = Generate("r", ChatPrompt([dict(USER)], **fields))
    return str(tokenizer.decode(prepare(request, tokenizer, chain_model.HIDDEN).tokens))


# ---- Marks -----------------------------------------------------------------------------------------------


def test_a_model_whose_files_begin_with_marks_is_the_same_model(tmp_path: Path) -> None:
    """NaN, Infinity and a byte order mark, as some publishers and editors write them."""
    plain = chain_model.build(tmp_path / "plain")
    odd = chain_model.build(tmp_path / "odd")
    for folder in (plain, odd):
        rewritten(folder, "generation_config.json", temperature=0.25, eos_token_id=7)
        without_template(folder)
        (folder / "chat_template.jinja").write_text(chain_model.TEMPLATE)
    rewritten(odd, "config.json", time_step_limit=[0.0, float("inf")])
    for file in [*odd.glob("*.json"), odd / "chat_template.jinja"]:
        file.write_bytes(BOM + file.read_bytes())
    one, other = (read(folder) for folder in (plain, odd))
    assert loading._defaults(plain) == loading._defaults(odd) == SamplingDefaults(temperature=0.25)
    assert one.tokenizer.eos_token_ids == other.tokenizer.eos_token_ids
    assert 7 in other.tokenizer.eos_token_ids
    assert rendered(one.tokenizer) == rendered(other.tokenizer) == "user: <hello>"
    assert loading._vocabulary_hash(one.tokenizer) == loading._vocabulary_hash(other.tokenizer)
    part = stage_loading.load_stage(settings(odd), "cpu", lambda _: None, first=0, last=1)
    assert part.stage.total == 2


def test_a_folder_that_libraries_can_read_is_read_where_it_lies(tmp_path: Path) -> None:
    folder = chain_model.build(tmp_path / "plain")
    with readable(folder) as place:
        assert place == folder
    (folder / "merges.txt").write_bytes(BOM + b"a b")
    with readable(folder) as place:
        assert place != folder
        assert place.name == folder.name
        assert (place / "merges.txt").read_bytes() == b"a b"
        assert {file.name for file in place.iterdir()} == {file.name for file in folder.iterdir()}
    assert not place.exists()


# ---- Templates -------------------------------------------------------------------------------------------

LISTS: dict[str, list[dict[str, str]]] = {
    "both": [{"name": "default", "template": TALK}, {"name": "tool_use", "template": CALLS}],
    "both, and one more": [
        {"name": "rag", "template": "rag"},
        {"name": "tool_use", "template": CALLS},
        {"name": "default", "template": TALK},
    ],
    "only the default": [{"name": "default", "template": CALLS}],
    "only for tools": [{"name": "tool_use", "template": CALLS}],
    "only others": [{"name": "rag", "template": CALLS}],
}


def in_config(folder: Path, templates: Any) -> None:
    rewritten(without_template(folder), "tokenizer_config.json", chat_template=templates)


def in_json(folder: Path, templates: Any) -> None:
    rewritten(without_template(folder), "chat_template.json", chat_template=templates)


def of_gguf(folder: Path, templates: Any) -> None:
    """As the file of a quantised model has them: a key for each, and a list of their names."""
    metadata = {f"tokenizer.chat_template.{each['name']}": each["template"] for each in templates}
    if default := metadata.pop("tokenizer.chat_template.default", None):
        metadata["tokenizer.chat_template"] = default
    metadata["tokenizer.chat_templates"] = [each["name"] for each in templates]
    made = gguf_tokenizer._config(metadata, [], add_bos=False, what="x.gguf")
    in_config(folder, made["chat_template"])


def in_files(folder: Path, templates: Any) -> None:
    without_template(folder)
    (folder / "additional_chat_templates").mkdir()
    for each in templates:
        place = folder if each["name"] == "default" else folder / "additional_chat_templates"
        name = "chat_template" if each["name"] == "default" else each["name"]
        (place / f"{name}.jinja").write_text(each["template"])


WAYS: dict[str, Callable[[Path, Any], None]] = {
    "tokenizer_config": in_config,
    "chat_template.json": in_json,
    "GGUF": of_gguf,
    "files": in_files,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", LISTS)
def test_lists_of_templates_are_served_as_transformers_does(tmp_path: Path, kind: str, way: str) -> None:
    folder = chain_model.build(tmp_path / "m")
    WAYS[way](folder, LISTS[kind])
    made = tokenizer_of(folder)
    with readable(folder) as place:
        oracle = AutoTokenizer.from_pretrained(place)
    for tools in (None, TOOLS):
        try:
            wanted = oracle.apply_chat_template([dict(USER)], tools=tools, tokenize=False)
        except ValueError:
            wanted = None
        if wanted is None:
            with pytest.raises(BadRequest, match="none is the default") as raised:
                rendered(made, tools=tools)
            assert "tool_use" in raised.value.hint
        elif tools is None or made.has_tool_calling:
            assert rendered(made, tools=tools) == wanted
    # Offered tools are for the template that takes them, and known before the model is loaded.
    able = of_files(folder, None)
    assert made.has_tool_calling == bool(able.tools) == (kind != "only others")
    assert read_templates(folder).keys() == {each["name"] for each in LISTS[kind]}


def test_each_of_several_templates_has_its_own_needs_and_all_have_the_markers(tmp_path: Path) -> None:
    folder = chain_model.build(tmp_path / "m")
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TALK
    in_config(
        folder,
        [
            {"name": "default", "template": strict + "<think>"},
            {
                "name": "tool_use",
                "template": chain_model.TEMPLATE,
            },
        ],
    )
    made = tokenizer_of(folder)
    assert template_needs(made, with_tools=True).system == "anywhere"
    assert template_needs(made, with_tools=False).system != "anywhere"
    assert control_tokens(made).every.search("<think>")


def test_a_template_of_its_own_comes_before_that_of_pictures(tmp_path: Path) -> None:
    folder = chain_model.build(tmp_path / "m")
    rewritten(folder, "chat_template.json", chat_template="other")
    with readable(folder) as place:
        assert place == folder
    assert read_templates(folder) == {"default": chain_model.TEMPLATE}
    without_template(folder)
    assert rendered(tokenizer_of(folder)) == "other"
    (folder / "chat_template.jinja").write_text("jinja")
    assert rendered(tokenizer_of(folder)) == "jinja"
    assert read_templates(folder) == {"default": "jinja"}


@pytest.mark.parametrize("odd", [3, [3], [{"name": "default"}], {"default": 3}, [], "", None])
def test_attack_templates_that_are_none(tmp_path: Path, odd: Any) -> None:
    folder = chain_model.build(tmp_path / "m")
    in_json(folder, odd)
    assert read_templates(folder) in ({}, {"default": ""})


# ---- Vocabularies ----------------------------------------------------------------------------------------


def nested(folder: Path, vocab_size: int) -> Path:
    """The chain model as the text part of one that sees pictures."""
    inner = json.loads((folder / "config.json").read_text())
    outer = {"model_type": "mistral3", "text_config": inner, "vocab_size": vocab_size}
    (folder / "config.json").write_text(json.dumps(outer | {"eos_token_id": inner["eos_token_id"]}))
    weights = load_file(folder / "model.safetensors")
    save_file({f"language_model.{k}": v for k, v in weights.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("claimed", [16, 1_000_000])
def test_the_vocabulary_is_that_of_the_weights_whatever_the_config_claims(
    tmp_path: Path, claimed: int
) -> None:
    """Reading a row behind the table of embeddings ended the process."""
    folder = nested(chain_model.build(tmp_path / "m"), claimed)
    assert read(folder).vocab_size == chain_model.HIDDEN


def test_a_text_beyond_the_embedding_is_refused_not_answered_with_noise(tmp_path: Path) -> None:
    folder = chain_model.build(tmp_path / "m")
    tokens = json.loads((folder / "tokenizer.json").read_text())
    last = tokens["added_tokens"][-1]
    more = [*(f"<{number}>" for number in range(chain_model.HIDDEN - last["id"])), "<extra>"]
    tokens["added_tokens"] += [
        {**last, "id": last["id"] + 1 + index, "content": text} for index, text in enumerate(more)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    made = tokenizer_of(folder)
    [beyond] = made.encode("<extra>", add_special_tokens=False)
    assert beyond >= chain_model.HIDDEN
    chat = ChatPrompt([{"role": "user", "content": "<extra>"}])
    for prompt in (TextPrompt("a<extra>"), chat):
        with pytest.raises(BadRequest, match=f"token id {beyond} .*{chain_model.HIDDEN} tokens"):
            prepare(Generate("r", prompt), made, chain_model.HIDDEN)
        assert beyond in prepare(Generate("r", prompt), made, beyond + 1).tokens
    check_ids([], 1)
