"""What every finding of doctor must have."""

from __future__ import annotations

from fleetctl.doctor.findings import Finding


def level(finding: Finding) -> str:
    """The level; whatever is not well must come with advice."""
    assert (finding.level == "ok") == (finding.fix == ""), finding
    assert finding.what
    return finding.level
