"""One rank of a program that divides a tiny model of each family, and compares it with the whole one.

python rank_families.py PLACE FAMILY…     PLACE is a RingPlace as JSON; prints JSON by family
"""

from __future__ import annotations

import json
import sys

from fleetd.engine.cpu import products

products.preload_blas()

import mlx.core as mx  # noqa: E402
import msgspec  # noqa: E402
import tiny_architectures  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from fleetd.engine.cpu import mlx_functions  # noqa: E402
from fleetd.engine.layers.stage import Stage  # noqa: E402
from fleetd.engine.measure.pass_progress import PassProgress  # noqa: E402
from fleetd.engine.ranks import dividing, ring  # noqa: E402
from fleetd.engine.ranks.rank_pass import run_pass  # noqa: E402
from fleetd.engine.settings import RingPlace  # noqa: E402

# Prompts in two chunks, then steps.
CHUNKS = ([[5, 7, 11, 13, 17, 19, 23]], [[3, 8]], [[4]], [[9]])


def compared(name: str, group: object, progress: PassProgress) -> dict[str, object]:
    """How far the divided model's logits are from the whole one's, as a share of the largest; the tokens."""
    whole, other = tiny_architectures.tiny(name), tiny_architectures.tiny(name)
    products.to_float32(whole)
    stage = dividing.divided(other, group)
    dividing.read_singly(stage.weights)
    products.to_float32(stage.weights)
    cache = make_prompt_cache(whole)
    ours = [each for each in stage.make_caches() if each is not None]
    apart, at, equal = 0.0, 0, True
    for chunk in CHUNKS:
        tokens = mx.array(chunk)
        right = whole(tokens, cache=cache)
        found = stage.finish(run_pass(stage, tokens, ours, at, group, progress))
        at += tokens.shape[1]
        apart = max(apart, float(mx.abs(found - right).max() / mx.abs(right).max()))
        equal = equal and bool(mx.all(mx.argmax(found, -1) == mx.argmax(right, -1)))
    halved = stage.weights_bytes / Stage.of(whole).weights_bytes
    return {"apart": apart, "equal": equal, "share": halved}


def main() -> None:
    place = msgspec.json.decode(sys.argv[1], type=RingPlace)
    mx.set_default_device(mx.cpu)
    mlx_functions.install()
    ring.keep_rows_stable()
    progress = PassProgress.alone()
    group = ring.joined(place, progress)
    ring.check(group, progress)
    found: dict[str, object] = {}
    for name in sys.argv[2:]:
        try:
            found[name] = compared(name, group, progress)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:200]
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
