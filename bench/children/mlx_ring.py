"""``mlx_ring RANK HOSTFILE MODEL SPLIT CORE``: one rank of mlx-lm's own model over several processes.

``SPLIT``: pipeline or tensors, by mlx-lm's ``pipeline()`` and ``shard()``. Both ranks are asked the same, and
compute in step, as its server's ranks do under ``mlx.launch``; without HTTP, which costs fleetd nothing here
either.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from bench.children.mlx_lm import batched
from bench.harness.child import serve
from fleetd.engine.cpu import products


def main(rank: str, hosts: str, model_path: Path, split: str, core: int) -> None:
    os.sched_setaffinity(0, {core})
    os.environ |= {"MLX_RANK": rank, "MLX_HOSTFILE": hosts, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    # The same BLAS as fleetd's workers have.
    products.preload_blas()
    import mlx.core as mx
    from mlx_lm.utils import load_model

    group = mx.distributed.init(strict=True, backend="ring")
    model, _ = load_model(model_path, lazy=True)
    if split == "pipeline":
        model.model.pipeline(group)
    else:
        model.shard(group)
    mx.eval(model.parameters())
    # Both have come so far before the first question.
    mx.eval(mx.distributed.all_sum(mx.ones(1), group=group))

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        return batched(model, question["batch"], question["max_tokens"])

    serve(answer)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
