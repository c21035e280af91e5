"""The table of families is there wherever fleetd runs, also where nothing else is installed."""

from __future__ import annotations

import subprocess
import sys

from bench.harness.child import ROOT

# Of the extras dev and bench; each family imports what it needs of them when it measures.
_EXTRAS = ("playwright", "xllamacpp", "openai", "anthropic", "ollama", "schemathesis", "hypothesis")


def test_no_family_needs_another_ones_requirements() -> None:
    code = f"import sys; sys.modules |= dict.fromkeys({_EXTRAS}); import bench.__main__"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
