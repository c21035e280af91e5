"""BERT as onnxruntime computes it: the graph that its own optimizer for transformers makes of one, with the
weights of the model's safetensors file.

No package on the index has this model in float32 as ONNX, and the ``onnx`` package is no requirement of
fleetd's: the file's format is written field by field, as for products with packed weights.

    tokens, mask (B, T) ──embeddings──► norm ──┬─ attention, norm ─┬─ up, GELU, down, norm ─┐ per layer
                                               └───────────────────┘                        ▼
                                                                             states (B, T, width)
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fleetd.engine.cpu.onnx_graph import field

Array = npt.NDArray[np.float32]

# Numbers of ONNX's formats: types of elements and of attributes, versions.
_FLOAT, _INT32, _INT64 = 1, 6, 7
_FLOAT_ATTRIBUTE, _INT_ATTRIBUTE = 1, 2
_IR_VERSION, _OPERATORS, _CONTRIBUTED = 10, 21, 1
_MICROSOFT = "com.microsoft"
# Of publishers' files for layer n.
_LAYER = "encoder.layer.{}."


class OnnxBert:
    """A BERT for sentence vectors (mean of the states, one unit long) in onnxruntime, on one thread."""

    def __init__(self, folder: Path) -> None:
        """``folder``: of a model of sentence-transformers."""
        import onnxruntime
        from tokenizers import Tokenizer

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        config = json.loads((folder / "config.json").read_text())
        graph = model(config, tensors(folder / "model.safetensors"))
        self._session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.enable_padding()
        longest = json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
        self._tokenizer.enable_truncation(longest)

    def vectors(self, texts: Sequence[str]) -> Array:
        """(len(texts), width)."""
        found = self._tokenizer.encode_batch(list(texts))
        ids = np.array([each.ids for each in found], np.int64)
        mask = np.array([each.attention_mask for each in found], np.int32)
        (states,) = self._session.run(None, {"tokens": ids, "mask": mask})
        weights = mask[:, :, None].astype(np.float32)
        sums = (states * weights).sum(1) / weights.sum(1)
        vectors: Array = sums / np.linalg.norm(sums, axis=1, keepdims=True)
        return vectors


def tensors(file: Path) -> dict[str, Array]:
    """The float32 tensors of a safetensors file."""
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    # A slice of bytes would be a copy of all weights, for each tensor.
    weights = memoryview(data)[8 + size :]
    return {
        name: np.frombuffer(weights[slice(*facts["data_offsets"])], np.float32).reshape(facts["shape"])
        for name, facts in header.items()
        if name != "__metadata__" and facts["dtype"] == "F32"
    }


def model(config: Mapping[str, float], weights: Mapping[str, Array]) -> bytes:
    """An ONNX file: ``states`` (B, T, width) of ``tokens`` (B, T) int64 and ``mask`` (B, T) int32, 1 for a
    token and 0 for what fills up."""
    graph = _Graph(float(config["layer_norm_eps"]))
    heads = int(config["num_attention_heads"])
    # All tokens are of the first kind.
    kind = weights["embeddings.token_type_embeddings.weight"][0]
    places = graph.tensor("places", weights["embeddings.position_embeddings.weight"] + kind)
    words = graph.node(
        "Gather", [graph.tensor("words", weights["embeddings.word_embeddings.weight"]), "tokens"]
    )
    length = graph.node("Shape", ["tokens"], start=1, end=2)
    first = graph.tensor("first", np.zeros(1, np.int64))
    placed = graph.node("Add", [words, graph.node("Slice", [places, first, length])])
    norm = [
        graph.tensor(f"norm.{part}", weights[f"embeddings.LayerNorm.{part}"]) for part in ("weight", "bias")
    ]
    x = graph.node("LayerNormalization", [placed, *norm], axis=-1, epsilon=graph.epsilon)
    for number in range(int(config["num_hidden_layers"])):
        x = graph.layer(_LAYER.format(number), weights, heads, x)
    return graph.file(x)


class _Graph:
    """The nodes and tensors of an ONNX file, as they are added."""

    def __init__(self, epsilon: float) -> None:
        self.epsilon = epsilon
        self._fields: list[bytes] = []
        self._count = 0

    def tensor(self, name: str, values: npt.NDArray[np.float32] | npt.NDArray[np.int64]) -> str:
        kind = _INT64 if values.dtype == np.int64 else _FLOAT
        sizes = b"".join(field(1, size) for size in values.shape)
        data = np.ascontiguousarray(values).tobytes()
        self._fields.append(field(5, sizes + field(2, kind) + field(8, name) + field(9, data)))
        return name

    def node(self, operator: str, inputs: Sequence[str], domain: str = "", **attributes: float) -> str:
        """Returns the name of what it computes."""
        self._count += 1
        output = f"{operator}.{self._count}"
        named = b"".join(field(1, name) for name in inputs) + field(2, output) + field(4, operator)
        given = b"".join(_attribute(name, value) for name, value in attributes.items())
        self._fields.append(field(1, named + field(7, domain) + given))
        return output

    def layer(self, layer: str, weights: Mapping[str, Array], heads: int, x: str) -> str:
        parts = ("query", "key", "value")
        matrices = [weights[f"{layer}attention.self.{part}.weight"].T for part in parts]
        biases = [weights[f"{layer}attention.self.{part}.bias"] for part in parts]
        qkv = self.tensor(f"{layer}qkv", np.concatenate(matrices, 1))
        bias = self.tensor(f"{layer}qkv.bias", np.concatenate(biases))
        seen = self.node("Attention", [x, qkv, bias, "mask"], _MICROSOFT, num_heads=heads)
        x = self._normed(
            layer + "attention.output.", weights, self._times(layer + "attention.output.", weights, seen), x
        )
        up = self._times(layer + "intermediate.", weights, x)
        up_bias = self.tensor(f"{layer}up.bias", weights[f"{layer}intermediate.dense.bias"])
        active = self.node("BiasGelu", [up, up_bias], _MICROSOFT)
        return self._normed(layer + "output.", weights, self._times(layer + "output.", weights, active), x)

    def _times(self, name: str, weights: Mapping[str, Array], x: str) -> str:
        return self.node("MatMul", [x, self.tensor(f"{name}matrix", weights[f"{name}dense.weight"].T)])

    def _normed(self, name: str, weights: Mapping[str, Array], x: str, before: str) -> str:
        """The norm of ``x``, its bias and what was ``before``."""
        given = [
            self.tensor(f"{name}scale", weights[f"{name}LayerNorm.weight"]),
            self.tensor(f"{name}shift", weights[f"{name}LayerNorm.bias"]),
            self.tensor(f"{name}bias", weights[f"{name}dense.bias"]),
        ]
        return self.node("SkipLayerNormalization", [x, before, *given], _MICROSOFT, epsilon=self.epsilon)

    def file(self, output: str) -> bytes:
        """All of it, with what goes in and comes out."""
        self._fields.append(field(1, field(1, output) + field(2, "states") + field(4, "Identity")))
        ends = [
            field(2, "bert"),
            field(11, _value("tokens", _INT64, ("texts", "length"))),
            field(11, _value("mask", _INT32, ("texts", "length"))),
            field(12, _value("states", _FLOAT, ("texts", "length", "width"))),
        ]
        imports = (
            field(8, field(1, domain) + field(2, version))
            for domain, version in (("", _OPERATORS), (_MICROSOFT, _CONTRIBUTED))
        )
        return b"".join((field(1, _IR_VERSION), field(7, b"".join((*self._fields, *ends))), *imports))


def _attribute(name: str, value: float) -> bytes:
    if isinstance(value, int):
        # Negative numbers are 64 bits wide.
        return field(5, field(1, name) + field(3, value % (1 << 64)) + field(20, _INT_ATTRIBUTE))
    # A float is four bytes without a length.
    number = bytes([2 << 3 | 5]) + struct.pack("<f", value)
    return field(5, field(1, name) + number + field(20, _FLOAT_ATTRIBUTE))


def _value(name: str, kind: int, sizes: Sequence[str]) -> bytes:
    """A tensor that goes in or comes out, of any sizes."""
    shape = b"".join(field(1, field(2, size)) for size in sizes)
    return field(1, name) + field(2, field(1, field(1, kind) + field(2, shape)))
