"""One rank of an MLX ring that adds up arrays, without a model.

``python -m bench.children.ring_sum PLACE``; PLACE is a RingPlace as JSON.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import msgspec

from bench.harness.child import serve
from fleetd.engine.measure.pass_progress import PassProgress
from fleetd.engine.settings import RingPlace


def main(place: RingPlace) -> None:
    import mlx.core as mx

    from fleetd.engine.ranks import ring

    mx.set_default_device(mx.cpu)
    groups: list[Any] = []

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        if question["do"] == "join":
            progress = PassProgress.alone()
            groups.append(ring.joined(place, progress))
            ring.check(groups[0], progress)
            return {}
        x, times = mx.ones(question["bytes"] // 4), list[float]()
        mx.eval(x)
        for _ in range(question["count"]):
            begun = time.perf_counter()
            mx.eval(mx.distributed.all_sum(x, group=groups[0]))
            times.append(time.perf_counter() - begun)
        return {"times": times}

    serve(answer)


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=RingPlace))
