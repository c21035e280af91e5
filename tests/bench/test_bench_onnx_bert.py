"""onnxruntime is measured with the model that it is compared with: its vectors are the reference's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import vector_reference as reference
from tokenizers import Tokenizer

from bench.harness.onnx_bert import OnnxBert
from fleetd.models.folder import ModelFolder

pytest.importorskip("onnxruntime", reason="no release for this system")

TEXTS = [
    "The quay where ships lie at night has a long wall of stone.",
    "a",
    "Die Katze saß auf der Matte und schaute aus dem Fenster.",
    "猫はマットの上に座って窓の外を見ていた。",
    "stone " * 60,
]


@pytest.mark.model
def test_minilm_in_onnxruntime_is_the_reference_whatever_is_beside_a_text(minilm: ModelFolder) -> None:
    weights: dict[str, Any] = reference.read(minilm.path / "model.safetensors")
    tokenizer = Tokenizer.from_file(str(minilm.path / "tokenizer.json"))
    # The file has bounds of its own.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    rows = [encoding.ids for encoding in tokenizer.encode_batch(TEXTS)]
    model = OnnxBert(minilm.path)
    found = model.vectors(TEXTS)
    for vector, states in zip(found, reference.bert(weights, minilm.config, rows), strict=True):
        assert reference.cosine(vector, states.mean(0)) > 1 - 1e-6
    alone = np.concatenate([model.vectors([text]) for text in TEXTS])
    assert np.allclose(found, alone, atol=1e-5)
