"""One rank of mlx-lm's own tensor parallel over an MLX ring, in a process that ``mlx.launch`` would start.

``python -m bench.children.mlx_ring RANK HOSTS MODEL``; HOSTS is the host file's JSON. The process says that
it is ready before it joins: ``init`` waits for the other ranks without a limit, so who starts ranks one after
the other and waits for each would wait for ever.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.harness.child import serve
from fleetd.engine.cpu import products


def main(rank: str, hosts: str, model_path: Path) -> None:
    begun = time.perf_counter()
    # mlx binds to the BLAS that is loaded first, so it is imported only now.
    products.preload_blas()
    from fleetd.engine import worker
    from fleetd.engine.cpu import mlx_functions
    from fleetd.engine.load import model_reading

    worker.quiet_libraries()
    import mlx.core as mx
    from mlx_lm import load, stream_generate

    if model_reading.pick_device("auto") == "cpu":
        mlx_functions.install()
        worker.prepare_rank("cpu")
    state: dict[str, Any] = {}

    def join() -> dict[str, Any]:
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write(hosts)
            file.flush()
            os.environ.update(MLX_RANK=rank, MLX_HOSTFILE=file.name)
            group = mx.distributed.init(strict=True, backend="ring")
        model, tokenizer = load(str(model_path), lazy=True)[:2]
        model.shard(group)
        if mx.default_device() == mx.Device(mx.cpu):
            products.to_float32(model)
        mx.eval(model.parameters())
        # As mlx-lm does it: all ranks have read their part before the first one begins.
        mx.eval(mx.distributed.all_sum(mx.array(1.0), group=group))
        state.update(model=model, tokenizer=tokenizer)
        return {"took_s": time.perf_counter() - begun}

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        if question["do"] == "join":
            return join()
        begun, times, said = time.perf_counter(), list[float](), list[int]()
        for response in stream_generate(
            state["model"], state["tokenizer"], question["tokens"], max_tokens=question["max_tokens"]
        ):
            times.append(time.perf_counter() - begun)
            said.append(int(response.token))
        return {"times": times, "tokens": said}

    serve(answer)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
