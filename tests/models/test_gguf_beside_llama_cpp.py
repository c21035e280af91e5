"""The small models of every family in llama.cpp itself: it and the imported model say the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import utils as mlx_utils
from support.gguf_models import CONFIGS, TOKENS, drawn, floats, write

from fleetd.models.gguf.conversion import import_gguf

pytestmark = pytest.mark.long

LENGTH = 100
# The token that llama.cpp is made to answer with: it reports no probabilities for half a character.
SPEAKABLE = TOKENS.index("a")


def log_probabilities(file: Path, tokens: list[int]) -> np.ndarray[Any, Any]:
    """Of the token after ``tokens``, as llama.cpp computes them."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="needs the extra `bench`")
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    # Beyond phi3's original context, so that its long factors apply as in mlx-lm.
    params.n_ctx = 1024
    params.n_parallel = 1
    params.warmup = False
    params.verbosity = 0
    answer = xllamacpp.Server(params).handle_completions(
        {
            "prompt": tokens,
            "n_predict": 1,
            "n_probs": len(TOKENS),
            "cache_prompt": False,
            "logit_bias": [[SPEAKABLE, 100.0]],
        }
    )
    found = np.full(len(TOKENS), np.nan)
    for one in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
        found[one["id"]] = one["logprob"]
    return found


@pytest.mark.parametrize("arch", sorted(CONFIGS))
def test_the_next_token_is_as_probable_as_in_llama_cpp(tmp_path: Path, arch: str) -> None:
    file = write(tmp_path / "model.gguf", arch, drawn(arch), floats)
    tokens = np.random.default_rng(7).integers(0, 256, LENGTH).tolist()
    expected = log_probabilities(file, tokens)
    folder = tmp_path / "model"
    folder.mkdir()
    import_gguf(file, folder)
    model, _ = mlx_utils.load_model(folder)
    model.set_dtype(mx.float32)
    logits = model(mx.array([tokens]))[0, -1]
    found = np.array(logits - mx.logsumexp(logits))
    # llama.cpp keeps keys and values in f16; log probabilities have a deviation of 0.8.
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.02)
