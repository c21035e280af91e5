"""Turn a GGUF file into a folder that mlx-lm loads: config, weights, tokenizer, chat template.

Weights in Q4_0, Q4_1 and Q8_0 stay exactly as they are, repacked (gguf_quant); every other kind becomes
f16. Nothing in the file is believed before gguf_header has checked it.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from fleetd.errors import FleetError, ModelCorrupt, ModelUnsupported
from fleetd.models.gguf import hf_config, quantization
from fleetd.models.gguf import tokenizer as gguf_tokenizer
from fleetd.models.gguf.header import GgufHeader, GgufTensor, read_header
from fleetd.models.safetensors_write import PlannedTensor, write_safetensors

Progress = Callable[[int, int], None]


def import_gguf(
    source: Path,
    target: Path,
    *,
    what: str | None = None,
    generation: Mapping[str, float] = MappingProxyType({}),
    progress: Progress = lambda done, total: None,
) -> None:
    """Write the model in ``source`` into the existing, empty folder ``target``.

    Args:
        what: how messages call the file; its name by default.
        generation: recommended sampling, for generation_config.json.
        progress: called with bytes of weights written and to write.

    Raises:
        ModelCorrupt: the file is damaged or malformed.
        ModelUnsupported: a sound file of something that cannot be imported.
        OSError: reading or writing failed.
    """
    what = what or source.name
    with source.open("rb") as file:
        try:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise ModelCorrupt(f"{what} is empty.", hint="Download the file again.") from None
        with mapped:
            # A copy-free view; numpy arrays over it must be gone before the map can close.
            view = memoryview(mapped)
            try:
                _write(view, target, what, generation, progress)
            except (FleetError, OSError, MemoryError):
                raise
            except Exception as error:  # every number and text in the file is the publisher's
                raise ModelCorrupt(
                    f"{what} could not be imported: {error}.", hint="Download the file again."
                ) from error
            finally:
                view.release()


def _write(
    view: memoryview, target: Path, what: str, generation: Mapping[str, float], progress: Progress
) -> None:
    header = read_header(view, what)
    arch = hf_config.architecture(header.metadata, what)
    tokenizer = gguf_tokenizer.build(header.metadata, what)
    by_name = {tensor.name: tensor for tensor in header.tensors}
    embedding = by_name.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2 or embedding.shape[0] < tokenizer.vocab_size:
        raise ModelCorrupt(
            f"{what} has no embedding for its {tokenizer.vocab_size} tokens.", hint="Download the file again."
        )
    config = hf_config.build(
        header.metadata,
        embedding_rows=embedding.shape[0],
        tied="output.weight" not in by_name,
        biased="blk.0.attn_q.bias" in by_name,
        rope_divisors=_rope_divisors(view, by_name),
        what=what,
    )
    planned, bits = _plan(view, header, config, interleaved=hf_config.ARCHITECTURES[arch][1], what=what)
    config |= _quantisation(bits)
    ending_ids: Any = list(tokenizer.eos_token_ids)
    config |= {"eos_token_id": ending_ids, "bos_token_id": tokenizer.bos_token_id}
    write_safetensors(target / "model.safetensors", planned, progress)
    (target / "tokenizer.json").write_text(tokenizer.tokenizer_json, encoding="utf-8")
    _json(target / "tokenizer_config.json", tokenizer.tokenizer_config)
    _json(
        target / "generation_config.json",
        {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": ending_ids, **generation},
    )
    _json(target / "config.json", config)


def _plan(
    view: memoryview, header: GgufHeader, config: dict[str, Any], *, interleaved: bool, what: str
) -> tuple[list[PlannedTensor], dict[str, int]]:
    """What to write, and the bits of every module that stays quantised."""
    planned: list[PlannedTensor] = []
    bits: dict[str, int] = {}
    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config["num_key_value_heads"],
    }
    for tensor in header.tensors:
        if tensor.name == hf_config.ROPE_FREQUENCIES:
            continue
        place = hf_config.module_of(tensor.name, config["num_hidden_layers"])
        if place is None:
            raise ModelUnsupported(
                f"{what} has a tensor {tensor.name!r} that its architecture is not known to have.",
                hint="Take the same model from the hub instead: fleetctl models pull ORGANISATION/NAME.",
            )
        module, leaf = place
        permuted = heads.get(module.rpartition(".")[2]) if interleaved else None
        if permuted is not None and tensor.shape[0] % (2 * permuted):
            raise ModelCorrupt(
                f"{what}: {tensor.name!r} has {tensor.shape[0]} rows, impossible for {permuted} heads.",
                hint="Download the file again.",
            )
        load = partial(_rows, view, tensor, permuted)
        if leaf == "weight" and len(tensor.shape) == 2 and tensor.kind in quantization.BITS:
            bits[module] = quantization.BITS[tensor.kind]
            planned += _triple(module, tensor, load)
        else:
            planned.append(_plain(f"{module}.{leaf}", tensor, load))
    return planned, bits


def _triple(
    module: str, tensor: GgufTensor, load: Callable[[], npt.NDArray[np.uint8]]
) -> tuple[PlannedTensor, PlannedTensor, PlannedTensor]:
    rows, columns = tensor.shape
    kind = tensor.kind

    def blocks() -> npt.NDArray[np.uint8]:
        return load().reshape(rows, -1, tensor.block_bytes)

    def finite(values: npt.NDArray[np.float16]) -> npt.NDArray[np.float16]:
        if not np.isfinite(values).all():
            raise ValueError(f"the tensor {tensor.name!r} has a scale that is not a number")
        return values

    groups = (rows, columns // quantization.GROUP_SIZE)
    word_columns = columns * quantization.BITS[kind] // 32
    return (
        PlannedTensor(
            f"{module}.weight", "U32", (rows, word_columns), lambda: quantization.words(kind, blocks())
        ),
        PlannedTensor(f"{module}.scales", "F16", groups, lambda: finite(quantization.scales(blocks()))),
        PlannedTensor(f"{module}.biases", "F16", groups, lambda: finite(quantization.biases(kind, blocks()))),
    )


def _plain(name: str, tensor: GgufTensor, load: Callable[[], npt.NDArray[np.uint8]]) -> PlannedTensor:
    def values() -> npt.NDArray[Any]:
        wide = quantization.dequantise(tensor.kind, load()).reshape(tensor.shape)
        with np.errstate(over="ignore"):
            half = wide.astype(np.float16)
        if not np.isfinite(half).all():
            raise ValueError(f"the tensor {tensor.name!r} has values that are not numbers f16 can hold")
        return half

    return PlannedTensor(name, "F16", tensor.shape, values)


def _rows(view: memoryview, tensor: GgufTensor, heads: int | None) -> npt.NDArray[np.uint8]:
    """The tensor's bytes, one row per output row; q and k put back in the order that half-split RoPE wants.

    Copied, so that nothing outlives the memory map.
    """
    raw = np.frombuffer(view, np.uint8, tensor.size_bytes, tensor.offset).copy()
    raw = raw.reshape(1 if len(tensor.shape) == 1 and heads is None else tensor.shape[0], -1)
    if heads is None:
        return raw
    return raw.reshape(heads, -1, 2, raw.shape[1]).swapaxes(1, 2).reshape(raw.shape)


def _rope_divisors(view: memoryview, by_name: dict[str, GgufTensor]) -> list[float] | None:
    tensor = by_name.get(hf_config.ROPE_FREQUENCIES)
    if tensor is None:
        return None
    return [float(value) for value in quantization.dequantise(tensor.kind, _rows(view, tensor, None)).ravel()]


def _quantisation(bits: dict[str, int]) -> dict[str, Any]:
    """The commonest width is the default; the others are named one by one."""
    if not bits:
        return {}
    counts = sorted(bits.values())
    default = max(set(counts), key=counts.count)
    section: dict[str, Any] = {"group_size": quantization.GROUP_SIZE, "bits": default}
    section |= {
        module: {"group_size": quantization.GROUP_SIZE, "bits": width}
        for module, width in sorted(bits.items())
        if width != default
    }
    return {"quantization": section}


def _json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
