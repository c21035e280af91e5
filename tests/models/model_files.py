"""Small model folders and GGUF files made by hand, sound until a test breaks them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from fleetd.models.safetensors_write import PlannedTensor, write_safetensors

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}


def write_weights(file: Path, *names: str) -> None:
    values = np.arange(64, dtype=np.float32).reshape(2, 32)
    write_safetensors(file, [PlannedTensor.whole(name, "F32", (2, 32), lambda: values) for name in names])


def make_folder(path: Path, **config: Any) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG | config))
    (path / "tokenizer.json").write_text("{}")
    (path / "tokenizer_config.json").write_text("{}")
    write_weights(path / "model.safetensors", "a.weight", "b.weight")
    return path


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


# ---- GGUF ------------------------------------------------------------------------------------------------

F32, F16, Q4_0, Q4_1, Q8_0 = 0, 1, 2, 3, 8


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _text(value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
        case list():
            return struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)
    raise AssertionError(value)


def gguf_bytes(
    metadata: dict[str, Any], tensors: dict[str, tuple[tuple[int, ...], int, bytes]], *, version: int = 3
) -> bytes:
    """A GGUF file; tensors are (shape with rows first, kind, data)."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        out += _text(key) + _value(value)
    offset = 0
    body = b""
    for name, (shape, kind, data) in tensors.items():
        out += _text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        out += struct.pack("<IQ", kind, offset)
        body += data + b"\0" * (-len(data) % 32)
        offset = len(body)
    return out + b"\0" * (-len(out) % 32) + body


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in byte-level BPE."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [chr(256 + index) for index in range(len(rest))]


def tiny_llama(
    *, architecture: str = "llama", pre: str = "smollm", seed: int = 0, output: bool = False
) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], int, bytes]]]:
    """Metadata and tensors of a one-layer model: 64 wide, 2 heads, 1 KV head."""
    rng = np.random.default_rng(seed)
    tokens = [*byte_alphabet(), "th", "the", "<|im_start|>", "<|im_end|>"]
    metadata: dict[str, Any] = {
        "general.architecture": architecture,
        f"{architecture}.block_count": 1,
        f"{architecture}.context_length": 128,
        f"{architecture}.embedding_length": 64,
        f"{architecture}.feed_forward_length": 96,
        f"{architecture}.attention.head_count": 2,
        f"{architecture}.attention.head_count_kv": 1,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 258 + [3, 3],
        "tokenizer.ggml.merges": ["t h", "th e"],
        "tokenizer.ggml.eos_token_id": 259,
        "tokenizer.ggml.bos_token_id": 258,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }
    kinds = {Q4_0: 18, Q4_1: 20, Q8_0: 34}

    def quantised(rows: int, columns: int, kind: int) -> tuple[tuple[int, ...], int, bytes]:
        blocks = rng.integers(0, 256, (rows * columns // 32, kinds[kind]), dtype=np.uint8)
        blocks[:, :2] = np.frombuffer(
            rng.uniform(0.001, 0.02, len(blocks)).astype("<f2").tobytes(), np.uint8
        ).reshape(-1, 2)
        if kind == Q4_1:
            blocks[:, 2:4] = blocks[:, :2]
        return (rows, columns), kind, blocks.tobytes()

    def plain(*shape: int, kind: int = F32) -> tuple[tuple[int, ...], int, bytes]:
        values = rng.standard_normal(shape).astype("<f4" if kind == F32 else "<f2")
        return shape, kind, values.tobytes()

    tensors = {
        "token_embd.weight": quantised(len(tokens), 64, Q8_0),
        "output_norm.weight": plain(64),
        "blk.0.attn_norm.weight": plain(64),
        "blk.0.attn_q.weight": quantised(64, 64, Q4_1),
        "blk.0.attn_k.weight": quantised(32, 64, Q4_0),
        "blk.0.attn_v.weight": plain(32, 64, kind=F16),
        "blk.0.attn_output.weight": quantised(64, 64, Q4_0),
        "blk.0.ffn_norm.weight": plain(64),
        "blk.0.ffn_gate.weight": quantised(96, 64, Q4_1),
        "blk.0.ffn_up.weight": quantised(96, 64, Q4_1),
        "blk.0.ffn_down.weight": quantised(64, 96, Q8_0),
    }
    if architecture == "qwen2":
        tensors |= {
            f"blk.0.attn_{part}.bias": plain(rows) for part, rows in (("q", 64), ("k", 32), ("v", 32))
        }
    if architecture == "qwen3":
        tensors |= {"blk.0.attn_q_norm.weight": plain(32), "blk.0.attn_k_norm.weight": plain(32)}
    if output:
        tensors["output.weight"] = plain(len(tokens), 64, kind=F16)
    return metadata, tensors
