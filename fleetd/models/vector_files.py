"""What a model's files say of its vectors: what it is for, and how sentence-transformers puts them together.

    modules.json                        the steps: Transformer, Pooling, Dense*, Normalize?
    1_Pooling/config.json               how one vector is made of those of the tokens
    2_Dense/config.json                 a layer behind it, with weights beside
    sentence_bert_config.json           the longest text, in tokens
    config_sentence_transformers.json   what is put before queries and documents

A model that fleetd installed has files of folders beside the others, under a name with a dot in place of the
slash: every part of a model lies in one folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from fleetd import limits
from fleetd.control.model_facts import ModelPurpose
from fleetd.errors import ModelCorrupt, ModelUnsupported
from fleetd.models.json_files import read_json
from fleetd.models.opening import read_regular
from fleetd.text.decoding import from_json

Pooling = Literal["cls", "mean", "last", "max"]

#: ``model_type`` of models that read a text in both directions and write none.
ENCODERS = frozenset({"bert", "modernbert", "roberta", "xlm-roberta"})
#: Files of folders that belong to a model: the settings and weights of the steps.
MODULE_FILE = re.compile(r"(\d{1,2}_[A-Za-z]{1,32})/(config\.json|model\.safetensors)")

_POOLINGS: dict[str, Pooling] = {
    "cls": "cls",
    "cls_token": "cls",
    "mean": "mean",
    "mean_tokens": "mean",
    "lasttoken": "last",
    "max": "max",
    "max_tokens": "max",
}
_RERANKER, _EMBEDDER = re.compile(r"rerank", re.IGNORECASE), re.compile(r"embed", re.IGNORECASE)


class Dense(msgspec.Struct, frozen=True):
    """A layer behind the pooling."""

    # Its folder in ``modules.json``: "2_Dense"; "" if its weights are among the model's.
    folder: str
    width: int
    activation: Literal["identity", "tanh"]


class VectorRecipe(msgspec.Struct, frozen=True):
    """How a model's vectors are made of the states of a text's tokens."""

    pooling: Pooling
    dense: tuple[Dense, ...] = ()
    # Whether they are made one unit long.
    normalized: bool = True
    # What is put before a text, by its kind: "query", "document", "" for neither.
    prompts: Mapping[str, str] = {}


def installed_name(name: str) -> str | None:
    """The name under which a file of a repository is installed; None if it belongs to no step."""
    if "/" not in name:
        return name
    return name.replace("/", ".") if MODULE_FILE.fullmatch(name) else None


def module_file(path: Path, folder: str, name: str) -> Path:
    """A file of a step, as installed or as published."""
    beside = path / f"{folder}.{name}"
    return beside if beside.exists() else path / folder / name


def purpose_of(path: Path, config: Mapping[str, Any], name: str) -> ModelPurpose:
    """What a model gives. ``name``: its own; models that were converted often have no other sign."""
    architectures = config.get("architectures")
    heads = [str(each) for each in architectures] if isinstance(architectures, list) else []
    encoder = config.get("model_type") in ENCODERS
    if any(head.endswith("ForSequenceClassification") for head in heads):
        return "rerank" if encoder or _RERANKER.search(name) else "chat"
    if encoder:
        return "embedding"
    if _RERANKER.search(name):
        return "rerank"
    return "embedding" if (path / "modules.json").exists() or _EMBEDDER.search(name) else "chat"


def width_or_none(path: Path, config: Mapping[str, Any]) -> int:
    """Numbers in each vector; 0 if the files do not tell, as a load will say."""
    try:
        return vector_width(path, config)
    except (ModelCorrupt, ModelUnsupported):
        return 0


def vector_width(path: Path, config: Mapping[str, Any]) -> int:
    """Numbers in each vector. Raises as ``recipe``."""
    dense = _dense(path, config, _modules(path))
    return dense[-1].width if dense else int(config.get("hidden_size") or 0)


def first_place(config: Mapping[str, Any]) -> int:
    """The row of a text's first token in the table of positions: RoBERTa's first rows are the padding's."""
    if "roberta" not in str(config.get("model_type")):
        return 0
    padding = config.get("pad_token_id")
    return 1 + (padding if type(padding) is int else 1)


def longest_text(path: Path, config: Mapping[str, Any], context_tokens: int) -> int:
    """Tokens of the longest text, what is put around it included.

    Args:
        context_tokens: how many positions the model has, by its config.
    """
    context_tokens -= first_place(config)
    stated = _settings(path / "sentence_bert_config.json").get("max_seq_length")
    if isinstance(stated, int) and stated > 0:
        context_tokens = min(context_tokens, stated)
    return max(1, min(context_tokens, limits.VECTOR_TEXT_TOKENS))


def recipe(path: Path, config: Mapping[str, Any]) -> VectorRecipe:
    """How its vectors are made. A folder without ``modules.json`` is taken for what its family publishes: the
    last token's state for a decoder, the mean for others, one unit long.

    Raises:
        ModelCorrupt: a file cannot be read.
        ModelUnsupported: a step that fleetd does not have.
    """
    modules = _modules(path)
    prompts = _prompts(_settings(path / "config_sentence_transformers.json"))
    decoder = config.get("model_type") not in ENCODERS and not config.get("use_bidirectional_attention")
    if not modules:
        return VectorRecipe("last" if decoder else "mean", _dense(path, config, modules), prompts=prompts)
    kinds = [kind for kind, _ in modules]
    if odd := set(kinds) - {"Transformer", "Pooling", "Dense", "Normalize"}:
        raise ModelUnsupported(f"Its vectors need a step that fleetd does not have: {min(odd)[:40]}.")
    folders = [folder for kind, folder in modules if kind == "Pooling"]
    if len(folders) != 1:
        raise ModelUnsupported("Its modules.json names no way to make one vector of a text.")
    pooling = _pooling(_settings(module_file(path, folders[0], "config.json")))
    return VectorRecipe(pooling, _dense(path, config, modules), "Normalize" in kinds, prompts)


def _settings(file: Path) -> dict[str, Any]:
    """The content of a file; empty if there is none."""
    return read_json(file, limits.MODEL_CONFIG_BYTES) if file.exists() else {}


def _modules(path: Path) -> list[tuple[str, str]]:
    """The steps in their order, each with its folder."""
    file = path / "modules.json"
    if not file.exists():
        return []
    try:
        steps = from_json(read_regular(file, limits.MODEL_CONFIG_BYTES), list[dict[str, Any]])
    except (msgspec.DecodeError, OSError, UnicodeDecodeError, RecursionError) as error:
        raise ModelCorrupt(f"{file} cannot be read: {error}.") from None
    found = []
    for step in steps:
        kind, folder = str(step.get("type", "")).rpartition(".")[2], str(step.get("path", ""))
        if folder and not re.fullmatch(r"[A-Za-z0-9_]{1,40}", folder):
            raise ModelCorrupt(f"{file} names a folder that is none: {folder[:40]!r}.")
        found.append((kind, folder))
    return found


def _pooling(settings: Mapping[str, Any]) -> Pooling:
    if settings.get("include_prompt") is False:
        raise ModelUnsupported("Its vectors leave out the tokens of the prompt, which fleetd does not do.")
    named = settings.get("pooling_mode")
    chosen = [
        key.removeprefix("pooling_mode_")
        for key, value in settings.items()
        if key.startswith("pooling_mode_") and value is True
    ]
    modes = [named] if isinstance(named, str) else chosen
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ModelUnsupported(f"Its vectors are made in a way that fleetd does not have: {modes}.")
    return _POOLINGS[modes[0]]


def _dense(path: Path, config: Mapping[str, Any], modules: list[tuple[str, str]]) -> tuple[Dense, ...]:
    if not modules and config.get("use_bidirectional_attention"):
        # EmbeddingGemma: where its folders are left out, their weights lie beside the others.
        width = int(config.get("hidden_size") or 0)
        return (Dense("", 4 * width, "identity"), Dense("", width, "identity"))
    return tuple(_dense_step(path, folder) for kind, folder in modules if kind == "Dense")


def _dense_step(path: Path, folder: str) -> Dense:
    settings = _settings(module_file(path, folder, "config.json"))
    name = str(settings.get("activation_function", "")).rpartition(".")[2].lower()
    width = settings.get("out_features")
    if name not in ("identity", "tanh") or not isinstance(width, int) or width < 1:
        raise ModelUnsupported(f"Its step {folder} is of a kind that fleetd does not have.")
    return Dense(folder, width, "tanh" if name == "tanh" else "identity")


def _prompts(settings: Mapping[str, Any]) -> dict[str, str]:
    """What is put before texts, by kind; families name the kind of documents in several ways."""
    given = settings.get("prompts")
    known = {str(k): v for k, v in given.items() if isinstance(v, str)} if isinstance(given, Mapping) else {}
    found = {"query": known.get("query", "")}
    found["document"] = next((known[name] for name in ("document", "passage", "corpus") if name in known), "")
    found[""] = known.get(str(settings.get("default_prompt_name")), "")
    return found
