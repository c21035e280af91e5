"""``nccl N_BYTES WARM RUNS``: one rank of mlx.distributed by NCCL; prints a JSON object and ends."""

from __future__ import annotations

import json
import sys
import time


def main(n_bytes: int, warm: int, runs: int) -> None:
    """Print the seconds of the start and of each sum of so many bytes, and whether the sum is right."""
    import mlx.core as mx

    begun = time.perf_counter()
    group = mx.distributed.init(strict=True, backend="nccl")
    init_s = time.perf_counter() - begun
    array = mx.ones(n_bytes // 4, mx.float32)
    mx.eval(array)
    seconds = []
    for _ in range(warm + runs):
        begun = time.perf_counter()
        total = mx.distributed.all_sum(array, group=group)
        mx.eval(total)
        mx.synchronize()
        seconds.append(time.perf_counter() - begun)
    right = bool(mx.all(total == group.size()).item())
    print(json.dumps({"init_s": init_s, "ranks": group.size(), "seconds": seconds[warm:], "right": right}))


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
