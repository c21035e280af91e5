"""mlx.distributed by NCCL with one rank: that it starts, and what a sum over all ranks takes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from bench.figures import Figure, Taking
from bench.harness.child import ROOT

_BYTES, _WARM, _RUNS = 64 << 20, 3, 10
_WITHIN_S = 25.0
# Of the memory of an H100: a sum reads and writes each byte once at least.
_CARD_BYTES_PER_S = 3.0e12


def measure(runs: int) -> Taking:
    return Taking(_figures(), _HOW)


def _figures() -> Iterator[Figure]:
    """Raises RuntimeError where NCCL cannot be had: then nothing is measured."""
    told = _told()
    if not told["right"]:
        raise RuntimeError(f"the sum over {told['ranks']} ranks is wrong")
    yield Figure("mlx.distributed by NCCL, start of one rank", "s", [told["init_s"]])
    times = sorted(told["seconds"])
    # With one rank MLX may give the array back as it is: a time that no memory allows is none of a sum.
    if times[len(times) // 2] < (floor_s := 2 * _BYTES / _CARD_BYTES_PER_S):
        print(f"  no sum: less than the {1e6 * floor_s:.0f} µs of reading and writing it", flush=True)
        return
    yield Figure(f"all_sum of {_BYTES >> 20} MiB over one rank", "µs", [1e6 * s for s in told["seconds"]])


def _told() -> dict[str, Any]:
    """What the child said. Raises RuntimeError with its error if it failed or took too long."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # As ``mlx.launch`` sets them for the first of its ranks.
    rank = {"MLX_RANK": "0", "MLX_WORLD_SIZE": "1", "NCCL_HOST_IP": "127.0.0.1", "NCCL_PORT": str(port)}
    command = [sys.executable, "-m", "bench.children.nccl", *map(str, (_BYTES, _WARM, _RUNS))]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | rank, capture_output=True, text=True, timeout=_WITHIN_S
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"NCCL did not start within {_WITHIN_S:.0f} s:\n{error.stderr!r}") from None
    if done.returncode:
        raise RuntimeError(f"no NCCL here (exit code {done.returncode}):\n{done.stderr[-2000:]}")
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


_HOW = (
    "One process, `mx.distributed.init(backend='nccl')` with one rank; the median of "
    f"{_RUNS} sums of {_BYTES >> 20} MiB of float32 after {_WARM} that do not count, if MLX sums over one "
    "rank: a time that the card's memory does not allow is left out. It shows that NCCL "
    "starts on this card, and nothing of two cards."
)
