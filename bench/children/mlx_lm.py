"""mlx-lm's own ``stream_generate``, without daemon or HTTP: what fleetd is held against.

cured      with everything in fleetd/engine/cpu/products.py
unpadded   the same without padding products to a minimum of rows
loose      unpadded, and MKL free to choose kernels by shape: nothing reproducible is left
stock      MLX as installed, quantised weights as they are on disk
stock-f16  MLX as installed, weights dequantised to f16
stock-f32  MLX as installed, weights dequantised to f32

``wrapped`` in a question: this answer has smart prefill's wrapper around every rope, others have none.
``batch``: prompts that its ``BatchGenerator`` answers together, instead of ``tokens``.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.harness.child import serve
from fleetd.engine.cpu import products

MODES = ("cured", "unpadded", "loose", "stock", "stock-f16", "stock-f32")


def main(mode: str, model_path: Path) -> None:
    if mode not in MODES:
        raise SystemExit(f"mode is one of {', '.join(MODES)}")
    cured = not mode.startswith("stock")
    if mode == "loose":
        os.environ["MKL_CBWR"] = "AUTO"
    preloaded = cured and products.preload_blas()
    # mlx binds to the BLAS that is loaded first, so it is imported only now.
    from fleetd.engine import worker
    from fleetd.engine.cpu import mlx_functions
    from fleetd.engine.load import model_reading

    worker.quiet_libraries()
    import mlx.core as mx
    from mlx_lm import load, stream_generate

    device = model_reading.pick_device("auto")
    if cured and device == "cpu":
        if not preloaded and sys.platform == "linux":
            raise SystemExit("no BLAS to preload: install mkl")
        mlx_functions.install()
        if mode != "cured":
            products.row_stable = _unpadded
    model, tokenizer = load(str(model_path))[:2]
    if device == "cpu" and mode != "stock":
        products.to_float32(model)
        if mode == "stock-f16":
            model.set_dtype(mx.float16)
    mx.eval(model.parameters())

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        if asked := question.get("batch"):
            return batched(model, asked, question["max_tokens"])
        wrap(model, wanted=question.get("wrapped", False))
        times: list[float] = []
        said: list[int] = []
        begun = time.perf_counter()
        for response in stream_generate(
            model, tokenizer, question["tokens"], max_tokens=question["max_tokens"]
        ):
            times.append(time.perf_counter() - begun)
            said.append(int(response.token))
        return {"times": times, "tokens": said, "text": tokenizer.decode(said)}

    serve(answer)


def batched(model: Any, prompts: list[list[int]], max_tokens: int) -> dict[str, float]:
    """Answer prompts together.

    ``tok_s``: tokens per second of all answers, but each one's first, from the first of any to the last one.
    ``step_s``: the median time from one step's tokens to the next one's.
    """
    from mlx_lm.generate import BatchGenerator

    generator = BatchGenerator(model, prefill_batch_size=len(prompts), completion_batch_size=len(prompts))
    generator.insert(prompts, [max_tokens] * len(prompts))
    count, times = 0, list[float]()
    while count < max_tokens * len(prompts):
        count += len(generator.next_generated())
        times.append(time.perf_counter())
    generator.close()
    return {
        "tok_s": (count - len(prompts)) / (times[-1] - times[0]),
        "step_s": statistics.median(now - before for before, now in itertools.pairwise(times)),
    }


def wrap(model: Any, *, wanted: bool) -> None:
    """Install smart prefill's wrappers in the model, or take them out again."""
    from fleetd.engine.sparse_prefill.rope import PosRoPE, install

    if wanted:
        install(model)
        return
    for module in model.modules():
        if isinstance(rope := module.get("rope"), PosRoPE) and not isinstance(module, PosRoPE):
            module.rope = rope.rope


def _unpadded(product: Callable[[Any], Any], x: Any) -> Any:
    return product(x)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
