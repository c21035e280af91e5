"""The process that brings layers of a model from the hub: ``python -m fleetd.models.pull.part_process``.

Its argument is a ``HubPartOrder`` as JSON. Each line of its output is a ``PullLine``; the last one names the
folder.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fleetd.models.hub_parts import HubPartOrder
from fleetd.models.pull.hub_part import pull_part
from fleetd.models.pull.process import run
from fleetd.text.decoding import from_json


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fleetd.models.pull.part_process", description="Bring layers of a model here."
    )
    parser.add_argument("order", help="a HubPartOrder as JSON")
    parser.add_argument("--models-dir", type=Path, required=True)
    options = parser.parse_args()
    order = from_json(options.order.encode(), HubPartOrder)
    return run(
        f"The download of layers of {order.hub_id}",
        lambda report: str(pull_part(order, options.models_dir, report)),
        as_json=True,
    )


if __name__ == "__main__":
    sys.exit(main())
