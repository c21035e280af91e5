"""tokenizer.json and tokenizer_config.json, made from a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from fleetd.errors import ModelCorrupt
from fleetd.models.chat_templates import DEFAULT
from fleetd.models.gguf import byte_level, sentencepiece
from fleetd.models.gguf.refusals import unsupported

# Values of tokenizer.ggml.token_type: such tokens are matched as a whole before text is cut.
_CONTROL, _USER_DEFINED = 3, 4

#: Tokens that end an answer in the families that use them, besides the "eos" of the metadata.
_ENDINGS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<|return|>",
    "<|call|>",
    "<|end|>",
    "</s>",
)
#: In GLM's chats an answer ends where the next turn begins.
_GLM_CUTS, _GLM_ENDINGS = ("chatglm-bpe", "glm4"), ("<|user|>", "<|observation|>")
#: Control tokens of Phi 3 that do not swallow the spaces after them.
_PHI3_PLAIN = frozenset({"<unk>", "<s>", "<|endoftext|>"})


class Tokenizer(msgspec.Struct, frozen=True):
    """The tokenizer's files, and the facts that the model's config needs."""

    # The content of tokenizer.json.
    tokenizer_json: str
    # The content of tokenizer_config.json.
    tokenizer_config: Mapping[str, Any]
    # How many tokens there are.
    vocab_size: int
    # The token that begins a text; None if the file names none.
    bos_token_id: int | None
    # The tokens that end an answer.
    eos_token_ids: tuple[int, ...]


def build(metadata: Mapping[str, Any], what: str) -> Tokenizer:
    """A file's tokenizer. Raises ModelUnsupported for an unknown kind, ModelCorrupt if metadata disagree."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    cut = byte_level.CUTS.get(pre) if kind == "gpt2" else None
    if cut is None and kind != "llama":
        raise unsupported(
            what, f"has a tokenizer of the kind {kind!r} ({pre!r}), which cannot be imported.", metadata
        )
    tokens = _strings(metadata, "tokens", what)
    types = [int(item) for item in metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))]
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise _corrupt(
            what, f"{len(tokens)} tokens, {len(set(tokens))} of them different, {len(types)} types"
        )
    bos = _id(metadata, "bos", len(tokens), what)
    endings = _endings(metadata, tokens, types, pre, what)
    for index in endings:
        types[index] = _CONTROL
    starts = metadata.get("tokenizer.ggml.add_bos_token", cut.starts if cut is not None else True)
    add_bos = bool(starts) and bos is not None
    try:
        if cut is not None:
            fast = byte_level.build(tokens, _strings(metadata, "merges", what), cut)
        else:
            scores = [float(score) for score in metadata.get("tokenizer.ggml.scores", ())]
            if len(scores) != len(tokens):
                raise ValueError(f"{len(scores)} scores for {len(tokens)} tokens")
            leading_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
            fast = sentencepiece.build(tokens, types, scores, leading_space=leading_space)
    except ValueError as error:
        raise _corrupt(what, str(error)) from None
    swallows = cut is None and metadata.get("general.architecture") == "phi3"
    _add_whole(fast, tokens, types, swallows=swallows)
    if fast.get_vocab_size() != len(tokens):
        raise _corrupt(what, "special tokens are missing from the vocabulary")
    if add_bos and bos is not None:
        _begin_with(fast, tokens[bos], bos)
    return Tokenizer(
        tokenizer_json=str(fast.to_str()),
        tokenizer_config=_config(metadata, tokens, add_bos, what),
        vocab_size=len(tokens),
        bos_token_id=bos,
        eos_token_ids=endings,
    )


def _endings(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], pre: str, what: str
) -> tuple[int, ...]:
    """The tokens that end an answer: those that the file names, then those that are known by their text."""
    stated = [_id(metadata, key, len(tokens), what) for key in ("eos", "eot", "eom")]
    names = [*_ENDINGS, *(_GLM_ENDINGS if pre in _GLM_CUTS else ())]
    whole = {token: index for index, token in enumerate(tokens) if types[index] in (_CONTROL, _USER_DEFINED)}
    if "<|return|>" in whole and "<|call|>" in whole:
        names.remove("<|end|>")  # gpt-oss ends a message with it and goes on with the next
    found = [index for index in stated if index is not None]
    return tuple(dict.fromkeys([*found, *(whole[name] for name in names if name in whole)]))


def _add_whole(fast: Any, tokens: list[str], types: list[int], *, swallows: bool) -> None:
    from tokenizers import AddedToken

    fast.add_tokens(
        [
            AddedToken(
                token,
                special=kind == _CONTROL,
                normalized=False,
                rstrip=swallows and kind == _CONTROL and token not in _PHI3_PLAIN,
            )
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )


def _begin_with(fast: Any, token: str, index: int) -> None:
    from tokenizers import processors

    fast.post_processor = processors.TemplateProcessing(
        single=[token, "$A"], pair=[token, "$A", "$B"], special_tokens=[(token, index)]
    )


def _config(metadata: Mapping[str, Any], tokens: list[str], add_bos: bool, what: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 30,
        "add_bos_token": add_bos,
    }
    for field, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (found := _id(metadata, key, len(tokens), what)) is not None:
            config[f"{field}_token"] = tokens[found]
    templates = _templates(metadata)
    if templates.keys() == {DEFAULT}:
        config["chat_template"] = templates[DEFAULT]
    elif templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return config


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates, by name. The default one has its own key; the file lists the names of others."""
    others = metadata.get("tokenizer.chat_templates")
    keys = {DEFAULT: "tokenizer.chat_template"} | {
        name: f"tokenizer.chat_template.{name}"
        for name in (others if isinstance(others, list) else [])
        if name != DEFAULT
    }
    found = ((name, metadata.get(key)) for name, key in keys.items())
    return {name: text for name, text in found if isinstance(text, str)}


def _strings(metadata: Mapping[str, Any], key: str, what: str) -> list[str]:
    found = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(found, list) or not found:
        raise _corrupt(what, f"no list of {key}")
    return found


def _id(metadata: Mapping[str, Any], key: str, count: int, what: str) -> int | None:
    found = metadata.get(f"tokenizer.ggml.{key}_token_id")
    if found is None:
        return None
    if not isinstance(found, int) or not 0 <= found < count:
        raise _corrupt(what, f"the {key} token {found!r} is outside the vocabulary of {count}")
    return found


def _corrupt(what: str, why: str) -> ModelCorrupt:
    return ModelCorrupt(f"The tokenizer in {what} is malformed: {why}.", hint="Download the file again.")
