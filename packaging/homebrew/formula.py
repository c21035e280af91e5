"""``python packaging/homebrew/formula.py SDIST [--homepage URL]``: the formula of that sdist, on stdout."""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

TEMPLATE = Path(__file__).with_name("fleetd.rb")


def formula(template: str, sdist: Path, homepage: str) -> str:
    values = {
        "HOMEPAGE": homepage,
        "FILE": sdist.name,
        "SHA256": hashlib.sha256(sdist.read_bytes()).hexdigest(),
    }
    for name, value in values.items():
        template = template.replace(f"@{name}@", value)
    return template.partition("\n")[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sdist", type=Path)
    parser.add_argument("--homepage", default="https://pypi.org/project/fleetd/")
    args = parser.parse_args()
    sys.stdout.write(formula(TEMPLATE.read_text(encoding="utf-8"), args.sdist, args.homepage))
    return 0


if __name__ == "__main__":
    sys.exit(main())
