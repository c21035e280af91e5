"""How many examples a property is tried on, where that is another number than the profile's."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> settings:
    """``count`` in the long run; in the quick one a third, though not less than twenty."""
    whole = settings.get_current_profile_name() == "long"
    return settings(max_examples=count if whole else max(min(count, 20), count // 3))
