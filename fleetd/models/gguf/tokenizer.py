"""A GGUF file's tokenizer metadata as tokenizer.json and tokenizer_config.json.

Byte-level BPE only (``tokenizer.ggml.model`` = gpt2). Families differ in how text is cut into words before
the merges apply; that is named by ``tokenizer.ggml.pre`` and looked up in ``_CUTS``. A wrong cut gives
plausible text and wrong tokens, so an unknown name is refused, not guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fleetd.errors import ModelCorrupt, ModelUnsupported

# Values of tokenizer.ggml.token_type that are matched in the text as a whole, before any cutting.
_CONTROL, _USER_DEFINED = 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"

#: Name of the cut → a pattern, or None for GPT-2's own, and whether every digit stands alone.
_CUTS: dict[str, tuple[str | None, bool]] = {
    "default": (None, False),
    "gpt-2": (None, False),
    "smollm": (None, True),
    "llama-bpe": (_LLAMA3, False),
    "llama3": (_LLAMA3, False),
    "llama-v3": (_LLAMA3, False),
    "qwen2": (_QWEN2, False),
}

#: Tokens that end an answer in the families that use them, whatever the metadata calls "eos".
_ENDINGS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "</s>")


@dataclass(frozen=True, slots=True)
class Tokenizer:
    tokenizer_json: str
    tokenizer_config: Mapping[str, Any]
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


def build(metadata: Mapping[str, Any], what: str) -> Tokenizer:
    """Raises ModelUnsupported for another kind of tokenizer, ModelCorrupt for metadata that disagrees."""
    kind, cut = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or cut not in _CUTS:
        raise ModelUnsupported(
            f"{what} has a tokenizer of the kind {kind!r} ({cut!r}), which cannot be imported.",
            hint="Take the same model from the hub instead: fleetctl models pull ORGANISATION/NAME.",
        )
    tokens = _strings(metadata, "tokens", what)
    merges = _strings(metadata, "merges", what)
    types = [int(item) for item in metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))]
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise _corrupt(
            what, f"{len(tokens)} tokens, {len(set(tokens))} of them different, {len(types)} types"
        )
    bos = _id(metadata, "bos", len(tokens), what)
    eos = _id(metadata, "eos", len(tokens), what)
    eot = _id(metadata, "eot", len(tokens), what)
    controls = {token: index for index, token in enumerate(tokens) if types[index] == _CONTROL}
    endings = [found for found in (eos, eot) if found is not None]
    endings += [controls[token] for token in _ENDINGS if token in controls]
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", False)) and bos is not None

    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 30,
        "add_bos_token": add_bos,
    }
    for field, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (found := _id(metadata, key, len(tokens), what)) is not None:
            config[f"{field}_token"] = tokens[found]
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return Tokenizer(
        tokenizer_json=_serialise(tokens, merges, types, cut, bos if add_bos else None, what),
        tokenizer_config=config,
        vocab_size=len(tokens),
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys(endings)),
    )


def _serialise(
    tokens: list[str], merges: list[str], types: list[int], cut: str, bos: int | None, what: str
) -> str:
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers import Tokenizer as Fast

    pairs: list[tuple[str, str]] = []
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not space:
            raise _corrupt(what, f"the merge {merge!r} is not a pair")
        pairs.append((left, right))
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        fast = Fast(models.BPE(vocab=vocab, merges=pairs))
    except Exception as error:  # the library raises bare Exception, e.g. for a merge outside the vocabulary
        raise _corrupt(what, f"vocabulary and merges do not fit each other ({error})") from None
    pattern, digits = _CUTS[cut]
    steps: list[Any] = []
    if digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    fast.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if cut == "qwen2":
        fast.normalizer = normalizers.NFC()
    fast.decoder = decoders.ByteLevel()
    if bos is not None:
        fast.post_processor = processors.TemplateProcessing(
            single=[tokens[bos], "$A"], pair=[tokens[bos], "$A", "$B"], special_tokens=[(tokens[bos], bos)]
        )
    whole = [token for token, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    control = {token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL}
    fast.add_tokens([AddedToken(token, special=token in control, normalized=False) for token in whole])
    if fast.get_vocab_size() != len(tokens):
        raise _corrupt(what, "special tokens are missing from the vocabulary")
    return str(fast.to_str())


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
